"""Test that a node logs an outage once, whatever the number of its loops and processes."""

import os

import pytest

from django_faktory.store.outages import Outages
from tests.waiting import wait_until

pytestmark = pytest.mark.core


def test_an_outage_is_logged_when_it_begins_and_when_it_has_ended(caplog):
    caplog.set_level("INFO", "django_faktory")
    outages = Outages(over_after_s=0.2)
    for loop in ("fetch", "beats", "fetch"):
        outages.record_failure(loop, OSError("away"), released=2)
    outages.record_success()
    assert caplog.messages == ["the broker is unavailable, retrying loop=fetch error=away"]
    wait_until(lambda: outages.record_success() or len(caplog.messages) > 1)
    outages.record_success()
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith("failures=3 released=6")


def test_a_lasting_outage_is_logged_again_after_a_while(caplog):
    outages = Outages(repeat_s=0.2)
    outages.record_failure("fetch", OSError("away"))
    wait_until(lambda: outages.record_failure("fetch", OSError("away")) or len(caplog.messages) > 1)
    assert caplog.messages[1].startswith("the broker is still unavailable at times loop=fetch failures=")


def test_forked_processes_share_the_outage(caplog):
    outages = Outages()
    if (pid := os.fork()) == 0:
        outages.record_failure("fetch", OSError("away"))
        os._exit(0)
    os.waitpid(pid, 0)
    outages.record_failure("beats", OSError("away"))
    assert caplog.messages == []
