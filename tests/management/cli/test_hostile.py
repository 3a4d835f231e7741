"""Test hostile texts on the command line: a terminal receives only printable characters, and JSON is unchanged."""

import re

import pytest

from django_faktory.models import Batch, Job
from tests.hostile import JOINED, fill, is_unwelcome

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.django_db]

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Colour codes that rich writes; in a client's text ESC is spelled out, so that nothing there matches."""


def words():
    jids = list(Job.objects.order_by("pk").values_list("jid", flat=True))
    bids = list(Batch.objects.values_list("bid", flat=True))
    lists = [("info",), ("top", "--once"), ("queues",), ("jobs",), ("workers",), ("batches",), ("cron",)]
    return [*lists, *(("job", jid) for jid in jids if not jid.startswith("-")), *(("batches", bid) for bid in bids)]


@pytest.mark.parametrize("names", JOINED)
def test_output_contains_no_control_characters_from_job_data(faktory, asked, names):
    text_of_client = JOINED[names]
    fill(text_of_client)
    for call in words():
        for is_terminal in (False, True):
            answer = faktory(*call, is_terminal=is_terminal)
            assert answer.code in (0, 2), (call, answer)
            text = COLOURS.sub("", answer.out + answer.err) if is_terminal else answer.out + answer.err
            assert not [char for char in text if is_unwelcome(char) or char in "\t\r"], call
        if answer.code == 0:
            asked(*call)  # checks that it is one line of ASCII
    died = Job.objects.get(queue="died")
    if died.jid.isprintable() and not died.jid.startswith("-"):
        assert asked("job", died.jid)["job"]["args"] == [text_of_client, {text_of_client: text_of_client}]
