"""Test `manage.py faktory cron`: list, pause, resume and run entries."""

from datetime import UTC, datetime, timedelta

import pytest

from django_faktory.models import CronEntry, CronRun, Job
from django_faktory.store.cron import entries, runs
from django_faktory.tasks.cron import enqueue
from tests.project.tasks import add

pytestmark = [pytest.mark.once, pytest.mark.django_db]

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


def entry(name, **fields):
    made = CronEntry(**{"name": name, "schedule": "0 12 * * *", "zone": "UTC", "jobtype": "ring", **fields})
    entries.save(made, using="default", now=NOON)
    return made


def names():
    return set(CronEntry.objects.filter(paused_at=None).values_list("name", flat=True))


def test_list_shows_the_state_and_problem_of_each_entry(asked, faktory):
    entry("daily", queue="bells")
    entries.pause([entry("paused").pk], using="default")
    entry("gone", origin="code", schedule="0 1 * * *")
    entries.sync([], using="default")
    CronEntry.objects.filter(pk=entry("broken").pk).update(next_at=None, problem="zone: unknown")
    listed = {one["name"]: one for one in asked("cron")["entries"]}
    assert list(listed) == ["broken", "daily", "gone", "paused"]
    assert {name: one["state"] for name, one in listed.items()} == {
        "broken": "never",
        "daily": "active",
        "gone": "removed",
        "paused": "paused",
    }
    assert (listed["broken"]["problem"], listed["daily"]["problem"]) == ("zone: unknown", None)
    assert (listed["daily"]["next_at"], listed["daily"]["latest"]) == ("2026-05-02T12:00:00Z", None)
    assert listed["daily"]["queue"] == "bells"
    lines = faktory("cron", "list", "daily", "broken").out.splitlines()
    assert [line.split()[0] for line in lines] == ["ENTRY", "broken", "daily"]
    assert "zone: unknown" in lines[1]


def test_the_latest_run_shows_the_outcome_of_its_job(asked, faktory):
    entry("daily")
    for day in (2, 3):
        runs.enqueue_due_runs(enqueue, using="default", now=NOON.replace(day=day))
    [latest] = [one["latest"] for one in asked("cron")["entries"]]
    assert (latest["tick"], latest["outcome"]) == ("2026-05-03T12:00:00Z", "enqueued")
    faktory("kill", latest["jid"], "--yes")
    assert asked("cron")["entries"][0]["latest"]["outcome"] == "dead"


def test_next_shows_the_next_times_of_an_entry(asked, faktory):
    entry("daily", zone="Asia/Tokyo")
    found = asked("cron", "next", "daily", "--count", 3)
    times = [datetime.fromisoformat(time) for time in found.pop("next_times")]
    assert found == {"entry": "daily", "state": "active", "problem": None, "zone": "Asia/Tokyo"}
    assert [time.hour for time in times] == [3] * 3
    assert times[2] - times[0] == timedelta(days=2)
    lines = faktory("cron", "next", "daily").out.splitlines()
    assert lines[0].split() == ["UTC", "Asia/Tokyo"]
    assert len(lines) == 6
    assert all(line.endswith("12:00:00") for line in lines[1:])


def test_next_reports_an_entry_that_is_paused_or_has_no_time(faktory):
    entries.pause([entry("daily").pk], using="default")
    CronEntry.objects.filter(pk=entry("broken").pk).update(schedule="0 0 31 2 *", problem="never due")
    paused, broken = faktory("cron", "next", "daily"), faktory("cron", "next", "broken")
    assert (paused.code, "the entry is paused" in paused.err) == (0, True)
    assert (broken.code, "never due" in broken.err) == (2, True)
    assert faktory("cron", "next", "nosuch").code == 2
    assert faktory("cron", "next", "--all").code == 1


def test_pause_and_resume_change_only_the_named_entries(asked):
    for name in ("one", "two", "three"):
        entry(name)
    assert asked("cron", "pause", "one", "two", "one") == {"entries": ["one", "two"]}
    assert names() == {"three"}
    assert asked("cron", "pause", "two", "three") == {"entries": ["three"]}
    assert asked("cron", "pause", "--all", code=2) == {"entries": []}
    assert asked("cron", "resume", "one") == {"entries": ["one"]}
    assert asked("cron", "resume", "--all") == {"entries": ["three", "two"]}
    assert names() == {"one", "two", "three"}


def test_run_enqueues_the_job_of_a_paused_entry(asked, faktory):
    entries.pause([entry("sum", jobtype=add.jobtype, args="[1, 2]").pk], using="default")
    job = Job.objects.get(jid=asked("cron", "run", "sum")["jid"])
    assert (job.jobtype, job.state) == (add.jobtype, "enqueued")
    assert CronRun.objects.get().tick is None
    assert faktory("cron", "run", "sum").out.strip() == Job.objects.latest("pk").jid


def test_run_rejects_an_entry_with_an_invalid_job(faktory):
    entry("daily", job='{"retry": "often"}')
    answer = faktory("cron", "run", "daily")
    assert (answer.code, answer.out) == (1, "")
    assert "retry" in answer.err
    assert Job.objects.count() == 0


@pytest.mark.parametrize("verb", ["list", "pause", "resume", "run"])
@pytest.mark.parametrize("name", ["unknown", "a\x1b[31m\x00"])
def test_an_unknown_name_exits_with_2_and_changes_nothing(faktory, verb, name):
    entry("daily")
    answer = faktory("cron", verb, name)
    assert (answer.code, answer.out) == (2, "")
    assert "no cron entry is defined as" in answer.err
    assert "\x1b" not in answer.err
    assert names() == {"daily"}


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_one_unknown_name_leaves_the_other_entries_unchanged(faktory, verb):
    entry("daily")
    assert faktory("cron", verb, "daily", "unknown").code == 2
    assert names() == {"daily"}


@pytest.mark.parametrize("verb", ["pause", "resume", "run"])
def test_entries_removed_from_code_cannot_be_changed_or_run(faktory, verb):
    entry("gone", origin="code")
    entries.sync([], using="default")
    assert faktory("cron", verb, "gone").code == 2
    assert CronEntry.objects.get().paused_at is None
    assert Job.objects.count() == 0


@pytest.mark.parametrize(
    "words",
    [
        ("pause",),
        ("resume",),
        ("pause", "daily", "--all"),
        ("list", "--all"),
        ("run",),
        ("run", "daily", "second"),
        ("run", "--all"),
    ],
)
def test_incomplete_or_contradictory_arguments_are_rejected(faktory, words):
    entry("daily")
    entry("second")
    answer = faktory("cron", *words)
    assert (answer.code, answer.out) == (1, "")
    assert Job.objects.count() == 0
    assert names() == {"daily", "second"}


def test_cron_is_rejected_with_a_remote_broker(faktory, settings):
    settings.FAKTORY = {"BROKER": "remote", "URL": "tcp://127.0.0.1:1"}
    answer = faktory("cron")
    assert answer.code == 1
    assert "needs the jobs in this project's database" in answer.err
