"""Jobs pushed in one set are stored as each would be alone, whatever they have in common."""

from datetime import timedelta
from operator import itemgetter

import pytest
from django.db import connection, transaction

from django_faktory.core.payloads import new_job
from django_faktory.models import Job
from django_faktory.store.dialects import dialect_of
from django_faktory.store.dialects.postgresql.prepared import Command
from django_faktory.store.jobs import pushes
from django_faktory.store.store import Store
from tests.factories import T0
from tests.project.tasks import noop

pytestmark = pytest.mark.django_db

SIZES = [1, 2, 8, 9, 40, 600]
ODD = ['quo"te', "back\\slash", "{}", ",", "ü€😀", "NULL", " "]
UNLIKE = [
    {"priority": 7}, {"retry": -1}, {"reserve_for": 60}, {"backtrace": 3}, {"result_ttl": 5}, {"at": T0},
    {"at": T0 + timedelta(days=1)},
]  # fmt: skip


def made(size, **last):
    """Return `size` jobs with different texts; the last one has the additional fields."""
    some = [
        {
            "jid": f"job-{number * 7919 % 10_000:05d}",
            "jobtype": f"type{number % 3}",
            "queue": f"q{number % 5}",
            "args": [ODD[number % 7]],
        }
        for number in range(size)
    ]
    some[-1] |= last
    return [new_job(**{"retry": 3, "result_ttl": 60} | one) for one in some]


def rows():
    fields = (
        "jid",
        "jobtype",
        "queue",
        "state",
        "sort_priority",
        "payload",
        "retry",
        "reserve_for",
        "backtrace",
        "result_ttl",
    )
    return {row["jid"]: row for row in Job.objects.values(*fields, "run_at", "enqueued_at")}


def stored(sets, now=T0):
    Job.objects.all().delete()
    for some in sets:
        assert pushes.push(Store(now=now), some) == [None] * len(some)
    return rows()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("last", [{}, *UNLIKE], ids=str)
def test_jobs_of_a_set_are_stored_in_order_as_if_pushed_singly(size, last):
    some = made(size, **last)
    found = stored([some])
    ready = [row for row in found.values() if row["enqueued_at"]]
    assert sorted(ready, key=itemgetter("enqueued_at")) == [found[job.jid] for job in some if found[job.jid] in ready]
    for job in some[-5:]:
        [alone] = stored([[job]]).values()
        assert found[job.jid] | {"enqueued_at": alone["enqueued_at"]} == alone
        assert (found[job.jid]["enqueued_at"] or T0) - T0 < timedelta(milliseconds=1)


@pytest.mark.parametrize("size", [9, 501, 1100])
@pytest.mark.parametrize("is_ascending", [True, False])
@pytest.mark.parametrize("has_new_jid", [True, False])
def test_jobs_of_one_task_are_stored_in_order_as_if_pushed_singly(size, is_ascending, has_new_jid):
    """Their type and queue are sent once, and places that count up too."""
    numbers = range(size) if is_ascending else range(size - 1, -1, -1)
    jobs = [
        new_job(jid=f"job-{number:05d}", jobtype="t", queue="q", args=[number], has_new_jids=has_new_jid)
        for number in numbers
    ]
    found = stored([jobs])
    assert [row["jid"] for row in sorted(found.values(), key=itemgetter("enqueued_at"))] == [job.jid for job in jobs]
    assert {(row["jobtype"], row["queue"], row["state"]) for row in found.values()} == {("t", "q", "enqueued")}
    assert [found[job.jid]["payload"] for job in jobs] == [job.text for job in jobs]


def test_a_large_set_with_new_jids_is_inserted_without_a_search_for_stored_ones(monkeypatch):
    searched, dialect = [], type(dialect_of(connection))
    search = dialect.lock_stored
    monkeypatch.setattr(
        dialect, "lock_stored", lambda self, on, jobs, now: searched.append(len(jobs)) or search(self, on, jobs, now)
    )
    noop.enqueue_many([()] * (pushes.CHUNK + 1))
    assert searched == []
    stored([made(pushes.CHUNK + 1)])
    assert searched == [pushes.CHUNK + 1]


def test_a_set_of_jobs_with_one_run_time_is_scheduled():
    later = T0 + timedelta(hours=1)
    some = [new_job(jid=f"job-{number:05d}", jobtype="t", args=[], at=later) for number in range(20)]
    times = {(row["state"], row["run_at"], row["enqueued_at"]) for row in stored([some]).values()}
    assert times == {("scheduled", later, None)}


@pytest.mark.parametrize("size", SIZES)
def test_a_pushed_set_keeps_live_jobs_and_replaces_finished_ones(size):
    some = made(size)
    stored([some])
    Job.objects.filter(jid=some[0].jid).update(state="dead", finished_at=T0, purge_at=T0, failures=3)
    Job.objects.exclude(jid=some[0].jid).update(failures=7)
    again = made(size, jobtype="new")
    assert pushes.push(Store(now=T0), again) == [None] * size
    replaced = Job.objects.get(jid=some[0].jid)
    assert (replaced.state, replaced.failures, replaced.jobtype) == ("enqueued", 0, again[0].jobtype)
    assert set(Job.objects.exclude(jid=some[0].jid).values_list("failures", flat=True)) <= {7}
    assert not Job.objects.exclude(jid=some[0].jid).filter(jobtype="new").exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="about statements of PostgreSQL")
@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_set_is_stored_identically_with_and_without_a_prepared_statement(in_transaction):
    """The third use of a statement prepares it."""
    some, expected = made(40), None
    for _ in range(5):
        if in_transaction:
            with transaction.atomic():
                found = stored([some])
        else:
            found = stored([some])
        expected = expected or found
        assert found == expected


@pytest.mark.skipif(connection.vendor != "postgresql", reason="about statements of PostgreSQL")
def test_a_lone_job_is_stored_in_the_same_way_behind_a_pooler(monkeypatch):
    """Nothing can be prepared there: the function stores it, instead of a statement of its own."""
    job = made(1)
    expected = stored([job])
    monkeypatch.setattr(Command, "works", False)
    assert stored([job]) == expected
    Job.objects.update(state="dead", finished_at=T0, purge_at=T0)
    assert pushes.push(Store(now=T0), job) == [None]
    assert list(Job.objects.values_list("state", flat=True)) == ["enqueued"]
