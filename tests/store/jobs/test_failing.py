"""Failed jobs are read and written with one message each if PostgreSQL can do so, or else one by one. ADR 0043."""

import json

import pytest
from django.db import connection, transaction

from django_faktory.core.lifecycle import State
from django_faktory.core.payloads import failure
from django_faktory.errors import JobNotFound
from django_faktory.models import Job
from django_faktory.store.dialects.postgresql import prepared
from django_faktory.store.dialects.postgresql.failures import READ
from django_faktory.store.jobs import failures
from django_faktory.store.statistics import counts
from django_faktory.store.store import Store
from tests.bouncer import needs_session
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db(transaction=True)

of_a_session = needs_session("prepared statements need a session")


@pytest.fixture
def straight():
    if connection.vendor != "postgresql" or not prepared.has_psycopg3():
        pytest.skip("about PostgreSQL and its own driver")


def fail(*jobs, **report):
    return failures.fail(Store(), [failure(jid=job.jid, wid="w1", **report) for job in jobs])


def used_to_it():
    """Make this connection prepare the statements for failures, by failing jobs on it."""
    for _ in range(prepared.USES_BEFORE + 1):
        assert fail(JobFactory(working=True)) == [True]


@pytest.fixture
def messages(monkeypatch):
    """Record the statements of each message sent through libpq; a COMMIT is named."""
    sent = []

    def names(calls):
        return [name.removeprefix("faktory_").rpartition("_")[0] for name, _ in calls]

    def spy(name, *more):
        real = getattr(prepared, name)

        def run(on, calls):
            sent.append([*names(calls), *more])
            return real(on, calls)

        monkeypatch.setattr(prepared, name, run)

    spy("run_prepared")
    spy("run_and_commit", "COMMIT")
    return sent


def processed():
    totals = counts.read(using="default").totals
    return totals["processed"], totals["failed"]


@of_a_session
@pytest.mark.usefixtures("straight")
@pytest.mark.parametrize("count", [1, 7])
def test_any_number_of_failed_jobs_is_recorded_with_two_messages(messages, count):
    used_to_it()
    before, _ = processed()
    jobs = [JobFactory(working=True) for _ in range(count)]
    messages.clear()
    assert fail(*jobs, message="no") == [True] * count
    assert messages == [["failing_1", "clock"], ["save_1", "count", "COMMIT"]]
    assert processed() == (before + count, before + count)
    assert {job.state for job in Job.objects.filter(jid__in=[job.jid for job in jobs])} == {State.RETRIES}


@of_a_session
@pytest.mark.usefixtures("straight")
@pytest.mark.parametrize(
    "traits", [{"bid": "b1"}, {"callback_of": "b1"}, {"lock_key": "k", "lock_token": 7}, {"permits": ""}, {"retry": 0}]
)
def test_a_failure_with_effects_on_other_rows_is_committed_after_them(messages, traits):
    """This concerns a batch, and jobs that wait for a lock or a limiter. Includes a job that leaves no row behind."""
    used_to_it()
    job = JobFactory(working=True, **traits)
    messages.clear()
    assert fail(job) == [True]
    assert not any("COMMIT" in names for names in messages)
    assert messages[0] == ["failing_1", "clock"]
    assert messages[-1] == ["count"]


def test_a_rollback_of_the_caller_undoes_the_failure():
    used_to_it()
    before, job = processed(), JobFactory(working=True)
    with transaction.atomic():
        assert fail(job) == [True]
        assert Job.objects.get(pk=job.pk).state == State.RETRIES
        transaction.set_rollback(True)
    assert Job.objects.get(pk=job.pk).state == State.WORKING
    assert processed() == before


@pytest.mark.parametrize("ways", ["first", "used to it"])
def test_each_failure_is_stored_exactly_as_reported(ways):
    if ways == "used to it":
        used_to_it()
    hostile = ['"quotes", {braces} and \\backslashes', "NULL", "", "naïve ☃ 𝄞", "two\nlines\x00", ",,", "'; --"]
    jobs = [JobFactory(working=True, unique_key=f"key {n}") for n in range(len(hostile))]
    reports = [
        failure(jid=job.jid, wid="w1", errtype=text[:20], message=text, backtrace=[text])
        for job, text in zip(jobs, hostile, strict=True)
    ]
    assert failures.fail(Store(), reports) == [True] * len(jobs)
    for job, report in zip(jobs, reports, strict=True):
        row = Job.objects.get(pk=job.pk)
        assert (row.state, row.failures, row.wid, row.attempt) == (State.RETRIES, 1, "w1", 1)
        assert (row.unique_key, row.reserved_until, row.payload) == (job.unique_key, None, job.payload)
        assert row.errtype == report.errtype.replace("\x00", "\ufffd")
        assert json.loads(row.failure)["message"] == report.message
        [attempt] = json.loads(row.history)
        assert attempt["message"] == report.message


@pytest.mark.parametrize("ways", ["first", "used to it"])
def test_each_failure_report_gets_its_own_answer(ways):
    if ways == "used to it":
        used_to_it()
    ours, theirs, dead = JobFactory(working=True), JobFactory(working=True, wid="w2"), JobFactory(dead=True)
    late = counts.read(using="default").totals["late"]
    unknown = failure(jid="unknown-1", wid="w1")
    answers = failures.fail(Store(), [failure(jid=job.jid, wid="w1") for job in (ours, theirs, ours, dead)])
    assert answers == [True, False, False, False], "the second time it has failed already"
    [answer] = failures.fail(Store(), [unknown])
    assert isinstance(answer, JobNotFound)
    assert counts.read(using="default").totals["late"] == late + 3
    assert Job.objects.get(pk=ours.pk).failures == 1


@of_a_session
@pytest.mark.usefixtures("straight")
def test_a_failure_is_recorded_even_if_a_pooler_drops_prepared_statements():
    used_to_it()
    with connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")
    job = JobFactory(working=True)
    try:
        assert fail(job) == [True]
        assert not prepared.Command.works
    finally:
        prepared.Command.works = True
        connection.close()
    assert Job.objects.get(pk=job.pk).failures == 1


def test_columns_are_read_in_the_order_of_the_model_fields():
    """Django assigns the values of a row in that order, whatever the column names are."""
    names = [field.attname for field in Job._meta.concrete_fields]
    assert [name for name in names if name in READ] == list(READ)
    assert set(names) - set(READ) == {
        "sort_priority", "payload", "reserve_for", "created_at", "result", "expires_at", "unique_expires_at",
        "unique_until_start", "limit_key", "limiter", "claim", "about", "interruptions", "is_returned",
        "waits_for",
    }  # fmt: skip
