"""The line that a worker logs at level INFO for each run that ends."""

import re
from types import SimpleNamespace

import pytest

from django_faktory import push
from django_faktory.brokers import get_broker
from django_faktory.worker.execution import Execution
from django_faktory.worker.job_monitor import MonitorLimits
from tests.project import tasks
from tests.waiting import wait_until
from tests.worker import limited
from tests.worker.blocking import gates

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]


def end_lines(caplog):
    """Return the lines that the worker logs about runs that ended."""
    messages = [record.getMessage() for record in caplog.records if record.name == "django_faktory.worker.thread_pool"]
    return [message for message in messages if "seconds=" in message]


def test_each_run_that_ends_is_logged_in_one_line(work, state, caplog):
    with caplog.at_level("INFO", logger="django_faktory"):
        work()
        results = [
            tasks.noop.enqueue(), tasks.async_add.enqueue(1, 2), tasks.writes_mark_atomically.enqueue("x"),
            tasks.fails_for_good.enqueue(),
        ]  # fmt: skip
        for result, name in zip(results, ["succeeded"] * 3 + ["dead"], strict=True):
            state(result, name)
        wait_until(lambda: len(end_lines(caplog)) == len(results))
    for result, outcome in zip(results, ["succeeded"] * 3 + ["failed"], strict=True):
        [line] = [line for line in end_lines(caplog) if result.id in line]
        name = re.escape(result.task.jobtype)
        assert re.fullmatch(rf"job {outcome} jid={result.id} jobtype={name} queue=default seconds=\d+\.\d{{3}}", line)


def test_the_line_says_what_happens_to_a_job_that_did_not_succeed(work, state, caplog):
    with caplog.at_level("INFO", logger="django_faktory"):
        work(limits=MonitorLimits(query_every_s=0.1))
        cancelled = limited.looks_at_its_context.enqueue("a")
        assert gates["a"].begun.acquire(timeout=60)
        assert get_broker().cancel([cancelled.id]) == 1
        outcomes = [
            (cancelled, "discarded", "cancelled"),
            (tasks.asks_for_discard.enqueue(), "discarded", "discarded"),
            (tasks.asks_for_retry.enqueue(3600), "retries", "runs again"),
            (tasks.fails_for_good.enqueue(), "dead", "failed"),
        ]
        for result, name, _ in outcomes:
            state(result, name)
        wait_until(lambda: len(end_lines(caplog)) == len(outcomes))
    for result, _, outcome in outcomes:
        [line] = [line for line in end_lines(caplog) if result.id in line]
        assert line.startswith(f"job {outcome} jid=")


def test_an_error_after_the_end_of_a_task_is_not_logged_as_a_success(work, state, caplog, monkeypatch):
    run = Execution.run

    def fails_after_it(execution, broker, **options):
        run(execution, broker, **options)
        raise RuntimeError("of the clean-up")

    monkeypatch.setattr(Execution, "run", fails_after_it)
    with caplog.at_level("INFO", logger="django_faktory"):
        work()
        state(tasks.noop.enqueue(), "retries", "dead")
        wait_until(lambda: end_lines(caplog))
    [line] = end_lines(caplog)
    assert line.startswith("job failed jid=")


def test_a_job_that_waits_for_newer_code_is_not_logged_as_ended(work, state, caplog):
    with caplog.at_level("INFO", logger="django_faktory"):
        work()
        state(SimpleNamespace(id=push("no.such.task")), "scheduled")
        state(tasks.noop.enqueue(), "succeeded")
    assert [line for line in end_lines(caplog) if "no.such.task" in line] == []
