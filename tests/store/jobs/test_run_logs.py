"""Test how the log lines of successful runs are appended to the histories of their jobs."""

import json

import pytest

from django_faktory.core.payloads import Ack
from django_faktory.models import Job
from django_faktory.store.jobs import run_logs
from django_faktory.store.jobs.history import HISTORY_LIMIT, LOGS_LIMIT
from django_faktory.store.store import Store
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db

FAILED = '[{"attempt":1,"errtype":"E","message":"a ] and \\"quoted\\"","backtrace":[]}]'


def ack(job, *lines, **changes):
    return Ack(**{"jid": job.jid, "wid": "w1", "attempt": 1, "log": lines} | changes)


def history(job):
    return json.loads(Job.objects.get(pk=job.pk).history or "null")


def entry(*lines):
    return {"kind": "log", "attempt": 1, "wid": "w1", "started_at": "2026-05-01T12:00:00Z", "log": [*lines]}


def test_the_lines_of_several_runs_are_stored_with_two_statements(django_assert_num_queries):
    first, second, other = JobFactory.create_batch(3, working=True)
    with django_assert_num_queries(2):
        run_logs.keep_logs(Store(), [ack(first, "one", "two"), ack(second, "three")])
    assert [history(job) for job in (first, second, other)] == [[entry("one", "two")], [entry("three")], None]


def test_the_lines_follow_the_failed_attempts_of_the_job():
    job = JobFactory(working=True, history=FAILED)
    run_logs.keep_logs(Store(), [ack(job, "line")])
    assert history(job) == [*json.loads(FAILED), entry("line")]


@pytest.mark.parametrize("changes", [{"wid": "w2"}, {"attempt": 2}, {"jid": "no-such-job"}])
def test_a_run_that_does_not_hold_the_job_stores_no_lines(changes):
    job = JobFactory(working=True)
    run_logs.keep_logs(Store(), [ack(job, "line", **changes)])
    assert history(job) is None


@pytest.mark.parametrize("state", ["enqueued", "succeeded", "dead"])
def test_a_job_that_does_not_run_stores_no_lines(state):
    job = JobFactory(**{} if state == "enqueued" else {state: True}, history=FAILED)
    Job.objects.filter(pk=job.pk).update(wid="w1", attempt=1)
    run_logs.keep_logs(Store(), [ack(job, "line")])
    assert history(job) == json.loads(FAILED)


@pytest.mark.parametrize("line", ["\x00", "' \" \\ % _ {} \n", "\u202e ü 🚀", "x" * 8000])
def test_lines_with_any_characters_are_stored_unchanged(line):
    job = JobFactory(working=True, history=FAILED)
    run_logs.keep_logs(Store(), [ack(job, line)])
    assert history(job)[-1] == entry(line)


def test_more_runs_than_fit_into_a_statement_are_stored(django_assert_num_queries):
    jobs = JobFactory.create_batch(run_logs.CHUNK + 1, working=True)
    with django_assert_num_queries(4):
        run_logs.keep_logs(Store(), [ack(job, job.jid) for job in jobs])
    assert all(history(job) == [entry(job.jid)] for job in jobs)


def test_the_history_keeps_its_limits_when_lines_are_appended():
    job = JobFactory(working=True, history=json.dumps([{"kind": "log", "log": ["old"]}] * 60))
    run_logs.keep_logs(Store(), [ack(job, "new")])
    runs = history(job)
    assert (len(runs), sum("log" in run for run in runs), runs[-1]) == (HISTORY_LIMIT, LOGS_LIMIT, entry("new"))
