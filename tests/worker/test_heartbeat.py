"""The jobs that a worker names in its heartbeats."""

import pytest

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import WorkerIdentity
from django_faktory.errors import BrokerUnavailable
from django_faktory.worker.heartbeat import Heartbeat

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]


class Listening(OrmBroker):
    """Record the jobs that beats name, and be unavailable while `is_down`."""

    is_down = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.held = []

    def beat(self, beats):
        if self.is_down:
            raise BrokerUnavailable("database unavailable")
        self.held += [beat.held for beat in beats]
        return super().beat(beats)


@pytest.fixture
def broker():
    broker = Listening("default")
    broker.hello(WorkerIdentity(wid="w1"))
    return broker


@pytest.fixture
def known():
    return set()


@pytest.fixture
def heartbeat(broker, known):
    return Heartbeat(broker, wid="w1", interval_s=15.0, on_order=lambda _: None, held_attempts=lambda: frozenset(known))


def test_a_heartbeat_lists_the_jobs_held_since_the_previous_heartbeat(broker, heartbeat, known):
    """Check that short jobs are never named, and cost no statement."""
    known |= {("long-job", 1), ("short-job", 1)}
    heartbeat.beat()
    known -= {("short-job", 1)}
    known |= {("later-job", 2)}
    heartbeat.beat()
    heartbeat.beat()
    assert broker.held == [(), (("long-job", 1),), (("later-job", 2), ("long-job", 1))]


def test_the_first_heartbeat_after_an_outage_lists_all_held_jobs(broker, heartbeat, known):
    broker.is_down = True
    known.add(("long-job", 1))
    heartbeat.beat()
    broker.is_down = False
    heartbeat.beat()
    assert broker.held == [(("long-job", 1),)]
