"""Test that docs/reference/commands.md matches the parser, and that its JSON has the shape of the real answers."""

import argparse
import json
import re
from pathlib import Path

import pytest
from django.utils import timezone

from django_faktory.management.cli.subcommands import subcommands
from django_faktory.models import CronEntry, Delta, Queue
from django_faktory.store.batches import batches
from django_faktory.store.cron import entries
from django_faktory.store.jobs import pushes
from django_faktory.store.store import Store
from tests.factories import JobFactory, LockFactory, QueueFactory, WorkerFactory, payload
from tests.project.tasks import add

pytestmark = pytest.mark.once

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
PAGE = TEXT.partition("\n## faktory\n")[2]
SECTIONS = dict(re.findall(r"^### ([\w-]+)\n(.*?)(?=^#|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
CHAPTERS = re.findall(r"^## \w+\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)


def chapter_of(word):
    [chapter] = [chapter for chapter in CHAPTERS if f"\n### {word}\n" in chapter]
    return chapter


def options_of(subcommand):
    parser = argparse.ArgumentParser(add_help=False)
    for argument in subcommand.arguments:
        parser.add_argument(*argument.names, **argument.options)
    return [option for action in parser._actions for option in action.option_strings]


@pytest.mark.core
def test_the_page_lists_exactly_the_existing_subcommands():
    assert sorted(SECTIONS) == sorted(subcommands())


@pytest.mark.core
def test_every_option_on_the_page_exists():
    known = {option for one in subcommands().values() for option in options_of(one)} | {"--json", "--"}
    assert set(re.findall(r"`(--[a-z-]*)", PAGE)) <= known


def shape(value):
    """Return the names of a value at all levels, of lists by their first element, without names of queues and sets."""
    match value:
        case dict():
            return {key: None if key in ("queues", "sets", "job") and isinstance(found, dict) else shape(found)
                    for key, found in value.items()}  # fmt: skip
        case [first, *_]:
            return [shape(first)]
    return None


EXAMPLES = {
    "doctor": ("doctor",),
    "functions": ("functions",),
    "groups": ("groups",),
    "recount": ("recount",),
    "info": ("info",),
    "top": ("top", "--once"),
    "queues": ("queues",),
    "jobs": ("jobs", "dead"),
    "job": ("job", "jid-of-one"),
    "workers": ("workers",),
    "batches": ("batches",),
    "errors": ("errors",),
    "edit": ("edit", "jid-of-one", "--priority", "5"),
    "push": ("push", add.jobtype, "1", "2"),
    "retry": ("retry", "dead"),
    "requeue": ("requeue", "dead"),
    "restart": ("restart", "dead", "--yes"),
    "signal": ("signal", "jid-of-one", "approved", '{"by": "ann"}'),
    "cancel": ("cancel", "enqueued", "--yes"),
    "kill": ("kill", "dead", "--yes"),
    "discard": ("discard", "dead", "--yes"),
    "prune": ("prune", "dead", "--yes"),
    "pause": ("pause", "mail"),
    "resume": ("resume", "mail"),
    "clear": ("clear", "default", "--yes"),
    "locks": ("locks",),
    "quiet": ("quiet", "w1", "--yes"),
    "terminate": ("terminate", "w1", "--yes"),
    "cron": ("cron",),
    "limits": ("limits",),
}


def documented(word):
    """Return the JSON example of the subcommand's own section, else of its chapter."""
    for text in (SECTIONS[word], chapter_of(word)):
        if found := re.search(r"^```json\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            return json.loads(found[1])
    return None


ELSEWHERE = {"import-faktory", "export-faktory", "outbox"}
"""Tested in tests/contrib/transfer, which has a Redis, and in test_outbox.py, which has a second database."""


@pytest.mark.core
def test_each_subcommand_has_an_example():
    assert EXAMPLES.keys() | ELSEWHERE == subcommands().keys()


@pytest.mark.django_db
@pytest.mark.parametrize("word", EXAMPLES)
def test_json_output_has_the_documented_shape(asked, word):
    batches.new(Store(), payloads_of_a_batch())
    JobFactory(dead=True, jid="jid-of-one", history='[{"errtype":"E"}]')
    pushes.push(Store(), [payload()])
    QueueFactory(name="default")
    if word != "top":
        WorkerFactory(wid="w1", labels=["python"], queues=["default"], threads=5)
    if word == "cron":
        entries.save(CronEntry(name="ring", schedule="@daily", zone="UTC", jobtype="ring"), using="default")
        asked("cron", "run", "ring")
    if word == "limits":
        asked("limits", "set", "task", "ring", "5", "--new")
    if word == "locks":
        LockFactory(jid=JobFactory(working=True).jid)
    if word in ("pause", "resume"):
        asked("pause", "mail", "--new")
    if word == "pause":
        asked("resume", "mail")
    if word == "recount":
        Delta.objects.all().delete()
    if word == "doctor":
        Queue.objects.update(paused_at=timezone.now())
    output, example = asked(*EXAMPLES[word]), documented(word)
    if word == "top":
        output |= {"alarms": [], "queues": [], "workers": []}
    assert shape(output) == shape(example)


def payloads_of_a_batch():
    from django_faktory.core.payloads import NewBatch

    return NewBatch(description="import")
