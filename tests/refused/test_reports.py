"""One report that the database refuses: its job ends with the reason, and every other job ends once."""

import json
from collections import Counter

import pytest

from django_faktory.models import Job
from django_faktory.tasks.results import attempts_of, runs_of
from tests.refused import tasks
from tests.refused.conftest import EMOJI
from tests.waiting import wait_until

INNOCENT = 20


@pytest.fixture
def run_jobs(narrow, work):
    """Return a function that runs innocent jobs and one guilty job, and returns the row of the latter."""

    def run(task, where):
        tasks.runs.clear()
        Job.objects.all().delete()
        results = [
            task.enqueue(where if number == INNOCENT // 2 else "", f"job{number}") for number in range(INNOCENT + 1)
        ]
        worker = work(concurrency=4)
        rows = Job.objects
        wait_until(lambda: not rows.filter(state__in=["enqueued", "working"]).exists(), 15, what="the end of all jobs")
        worker.stop()
        assert worker.ended(10), "a report was still waiting"
        assert worker.has_ended_well
        guilty_jid = results[INNOCENT // 2].id
        innocent = [(job.state, job.claims) for job in rows.exclude(jid=guilty_jid)]
        assert Counter(innocent) == {("succeeded", 1): INNOCENT}
        assert Counter(tasks.runs) == {f"job{number}": 1 for number in range(INNOCENT + 1)}
        return rows.get(jid=guilty_jid)

    return run


@pytest.fixture
def end(run_jobs, guilty):
    tasks.VALUES["guilty"] = guilty
    return run_jobs


def test_a_database_without_an_encoding_stores_every_report(kind, narrow, run_jobs):
    if kind != "SQL_ASCII":
        pytest.skip("only SQL_ASCII takes any bytes")
    tasks.VALUES["guilty"] = EMOJI
    assert run_jobs(tasks.plain, "result").result == json.dumps(EMOJI, ensure_ascii=False)
    assert attempts_of(run_jobs(tasks.atomic, "message").history)[0].message == EMOJI


@pytest.mark.parametrize("task", [tasks.plain, tasks.atomic], ids=["plain", "atomic"])
def test_a_result_that_the_database_refuses_ends_its_job_and_no_other(task, end):
    job = end(task, "result")
    [attempt] = attempts_of(job.history)
    assert (job.state, job.failures, job.errtype) == ("dead", 1, "InvalidResult")
    assert attempt.message.startswith("the result was not stored: the database cannot store a ")


@pytest.mark.parametrize("task", [tasks.plain, tasks.atomic], ids=["plain", "atomic"])
def test_an_error_message_that_the_database_refuses_is_stored_in_ascii(task, end, guilty):
    job = end(task, "message")
    [attempt] = attempts_of(job.history)
    assert (job.state, job.failures, job.errtype) == ("retries", 1, "builtins.ValueError")
    assert attempt.message == guilty.encode("ascii", "backslashreplace").decode()[:1000]


@pytest.mark.parametrize("task", [tasks.plain, tasks.atomic], ids=["plain", "atomic"])
@pytest.mark.parametrize("where", ["log", "progress"])
def test_log_lines_and_progress_that_the_database_refuses_cost_no_job(task, where, end):
    job = end(task, where)
    assert (job.state, job.claims) == ("succeeded", 1)
    if where == "log":
        [run] = runs_of(job.history)
        assert "line: " in run.log[0]
