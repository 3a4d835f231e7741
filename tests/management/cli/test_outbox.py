"""Test `manage.py faktory outbox`, with the outbox of a second database."""

import io
import json

import pytest

from django_faktory.models import OutboxEntry
from django_faktory.store import outbox
from tests.factories import payload
from tests.management.cli.test_documented import documented, shape

pytestmark = [pytest.mark.once, pytest.mark.django_db(databases=["default", "other"])]


@pytest.fixture(autouse=True)
def entries(settings):
    settings.FAKTORY = {"DATABASE": "other"}
    outbox.add([payload("first"), payload("second"), payload("third")], using="default")
    OutboxEntry.objects.filter(jid="job-second").update(error="ERR no room")
    return OutboxEntry.objects.using("default")


def test_list_shows_refused_jobs_first(asked, faktory):
    found = asked("outbox")
    assert shape(found) == shape(documented("outbox"))
    assert [(entry["jid"], entry["error"]) for entry in found["entries"]] == [
        ("job-second", "ERR no room"), ("job-first", None), ("job-third", None),
    ]  # fmt: skip
    assert {(entry["jobtype"], entry["database"]) for entry in found["entries"]} == {("noop", "default")}
    assert asked("outbox", "list", "--limit", 2)["is_more"]
    assert "refused: ERR no room" in faktory("outbox").out


def test_list_shows_refused_jobs_of_all_databases_first(asked, settings, entries):
    settings.FAKTORY = {"BROKER": "remote", "OUTBOX": ["other", "default"]}
    outbox.add([payload("another")], using="other")
    found = asked("outbox", "--limit", 2)
    assert ([entry["jid"] for entry in found["entries"]], found["is_more"]) == (["job-second", "job-another"], True)


def test_retry_relays_refused_jobs_again(asked, entries):
    assert asked("outbox", "retry", "job-second") == {"changed": 1}
    assert not entries.exclude(error="").exists()
    assert asked("outbox", "retry", "--all", code=2) == {"changed": 0}


def test_delete_asks_and_deletes_only_refused_jobs(asked, faktory, entries, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert faktory("outbox", "delete", "--all").code == 1
    assert entries.count() == 3
    assert asked("outbox", "delete", "--all", "--yes") == {"changed": 1}
    assert {entry.jid for entry in entries.all()} == {"job-first", "job-third"}


@pytest.mark.parametrize("jid", ["job-first", "job-nosuch", "a\x00"])
def test_a_job_that_was_not_refused_is_not_changed(faktory, entries, jid):
    answer = faktory("outbox", "retry", "job-second", jid)
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (2, "", 1)
    assert entries.exclude(error="").count() == 1


@pytest.mark.parametrize("words", [("list", "job-first"), ("retry",), ("delete", "--all", "job-first")])
def test_wrong_usage_is_rejected(faktory, words):
    assert faktory("outbox", *words).code == 1


def test_a_project_without_an_outbox_gets_an_error(faktory, settings):
    settings.FAKTORY = {}
    assert "this project has none" in faktory("outbox").err


def test_an_entry_that_was_edited_by_hand_is_shown(asked, entries):
    entries.update(job="{broken")
    assert [entry["jobtype"] for entry in asked("outbox")["entries"]] == [None] * 3
    assert json.dumps(asked("outbox"))
