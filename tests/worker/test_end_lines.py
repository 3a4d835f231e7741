"""The line that a worker logs at level INFO for each run that ends."""

import re
from types import SimpleNamespace

import pytest

from django_faktory import push
from tests.project import tasks
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


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


def test_a_job_that_waits_for_newer_code_is_not_logged_as_ended(work, state, caplog):
    with caplog.at_level("INFO", logger="django_faktory"):
        work()
        state(SimpleNamespace(id=push("no.such.task")), "scheduled")
        state(tasks.noop.enqueue(), "succeeded")
    assert [line for line in end_lines(caplog) if "no.such.task" in line] == []
