"""Test the log lines of an attempt: which are kept, their limits, and that they reach the job's history."""

import asyncio
import json
import logging
import threading

import pytest
from django.db import connection
from django.test import override_settings

from django_faktory import task
from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import Reservation, new_job
from django_faktory.models import Job, Queue
from django_faktory.tasks import base, encryption
from django_faktory.tasks.compat import TaskResult
from django_faktory.tasks.results import attempts_of, runs_of
from django_faktory.worker import job_log
from django_faktory.worker.execution import prepare
from tests.waiting import wait_until
from tests.worker.test_execution import NO_BROKER

pytestmark = pytest.mark.once_if_quick

logger = logging.getLogger("shop.tasks")


@task
def says(*texts):
    for text in texts:
        logger.warning("says %s", text)
    raise ValueError("no luck")


@task
def succeeds(text):
    logger.warning("says %s", text)


@task(atomic=True)
def succeeds_and_writes(text):
    Queue.objects.create(name="written")
    logger.warning("says %s", text)


@task
def says_in_other_ways():
    logger.debug("not enabled")
    silent = logging.getLogger("shop.silent")
    silent.propagate = False
    silent.warning("does not propagate")
    logger.warning("wrong %d", "arguments")
    try:
        {}["missing"]
    except KeyError:
        logger.exception("two\nlines \x1b[31m")
    thread = threading.Thread(target=logger.warning, args=["another thread"])
    thread.start()
    thread.join()
    raise ValueError("no luck")


@task
async def says_async(text, gate=None):
    logger.warning("async %s", text)
    await asyncio.sleep(0)
    await asyncio.create_task(log_soon(text))
    raise ValueError("no luck")


async def log_soon(text):
    logger.warning("of a coroutine %s", text)


@task(encrypt=True)
def says_secret(text):
    logger.warning("says %s", text)
    raise ValueError("no luck")


# Registered only while its test runs: the system checks report a task that needs a key if none is configured.
del base._registry[says_secret.jobtype]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Watch log records as a worker's process does, until the test has ended."""
    before = logging.getLogRecordFactory()
    uninstall(monkeypatch)
    monkeypatch.setattr(logging.lastResort, "level", logging.CRITICAL + 1)
    # The tasks here log wrong arguments on purpose: the standard library would print a traceback.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    job_log.install()
    job_log.install()
    yield
    logging.setLogRecordFactory(before)


def uninstall(monkeypatch, factory=logging.LogRecord):
    """Watch no log records, as a process in which no worker has started."""
    monkeypatch.setattr(job_log, "_original_factory", None)
    logging.setLogRecordFactory(factory)


def reserved(task_, *args, **fields):
    text = new_job(jid="0123456789", jobtype=task_.jobtype, args=args).text
    return Reservation(jid="0123456789", queue="default", text=text, wid="w1", attempt=1, **fields)


def lines(task_, *args):
    """Run a job of this task; return the lines of its report without their times."""
    execution = prepare(reserved(task_, *args))
    report = asyncio.run(execution.arun(NO_BROKER)) if execution.is_async else execution.run(NO_BROKER)
    assert all(line[:10].count("-") == 2 and line[23] == "Z" for line in report.log if not line.startswith("…"))
    return [line if line.startswith("…") else line[25:] for line in report.log]


def test_the_report_of_a_failure_has_the_lines_of_its_task():
    assert lines(says, "one", 2) == ["WARNING shop.tasks: says one", "WARNING shop.tasks: says 2"]
    assert lines(says) == []


def test_lines_of_any_logger_in_the_thread_of_the_job_are_kept():
    assert lines(says_in_other_ways) == [
        "WARNING shop.silent: does not propagate",
        "WARNING shop.tasks: <a message that cannot be formatted>",
        "ERROR shop.tasks: two\\nlines \\x1b[31m: KeyError: 'missing'",
    ]


def test_lines_of_a_coroutine_and_of_those_that_it_starts_are_kept():
    assert lines(says_async, "x") == ["WARNING shop.tasks: async x", "WARNING shop.tasks: of a coroutine x"]


def test_coroutines_that_run_together_keep_their_own_lines():
    async def both():
        runs = [prepare(reserved(says_async, text)).arun(NO_BROKER) for text in ("a", "b")]
        return await asyncio.gather(*map(asyncio.create_task, runs))

    for text, report in zip("ab", asyncio.run(both()), strict=True):
        assert [line[25:] for line in report.log] == [
            f"WARNING shop.tasks: async {text}", f"WARNING shop.tasks: of a coroutine {text}",
        ]  # fmt: skip


def test_lines_outside_a_job_and_of_the_job_before_are_not_kept():
    logger.warning("before")
    lines(says, "first")
    logger.warning("between")
    assert lines(says, "second") == ["WARNING shop.tasks: says second"]


def test_the_latest_lines_are_kept_within_the_limits():
    assert lines(says, *range(60)) == ["… 10 earlier lines", *(f"WARNING shop.tasks: says {n}" for n in range(10, 60))]
    with override_settings(FAKTORY={"LOG_LINES": 2}):
        assert lines(says, 1, 2, 3) == ["… 1 earlier line", "WARNING shop.tasks: says 2", "WARNING shop.tasks: says 3"]
    with override_settings(FAKTORY={"LOG_LINES": 0}):
        assert lines(says, 1) == []


def test_lines_are_cut_and_bounded_in_bytes():
    found = prepare(reserved(says, *["ü" * 100_000] * 50)).run(NO_BROKER).log
    assert max(len(line.encode()) for line in found) <= job_log.MAX_LINE_BYTES
    assert sum(len(line.encode()) for line in found[1:]) <= job_log.MAX_LOG_BYTES
    assert len(found) > 10


@pytest.mark.parametrize("text", ["\ud83d", "\x00", "\u202e", "{}", "%s"])
def test_hostile_texts_stay_in_their_line(text):
    [line] = lines(says, text)
    assert line.isprintable()


def test_lines_of_jobs_with_encrypted_arguments_are_not_kept(monkeypatch):
    monkeypatch.setitem(base._registry, says_secret.jobtype, says_secret)
    with override_settings(FAKTORY={"ENCRYPTION_KEYS": ["w" * 43 + "="]}):
        sealed = encryption.encrypt_arguments(says_secret.jobtype, ["secret"], {}, with_fingerprint=False)
        assert lines(says_secret, *sealed) == []


def test_lines_that_no_user_may_see_are_not_kept():
    hides = {"REDACT": "tests.project.redacting.hides_cards"}
    with override_settings(FAKTORY=hides):
        assert lines(says, "secret") == []
    with override_settings(FAKTORY=hides | {"REDACT_LOG": "tests.project.redacting.hides_lines"}):
        assert lines(says, "secret") == ["WARNING shop.tasks: says secret"]


def test_records_keep_the_class_of_the_projects_own_factory(monkeypatch):
    class Record(logging.LogRecord):
        pass

    uninstall(monkeypatch, Record)
    job_log.install()
    assert type(logger.makeRecord("n", logging.INFO, "f", 1, "m", (), None)) is Record
    assert lines(says, "x") == ["WARNING shop.tasks: says x"]


def test_a_successful_run_keeps_its_lines_only_if_the_job_keeps_its_result():
    [line] = prepare(reserved(succeeds, "done", result_ttl=60)).run(NO_BROKER).log
    assert line.endswith("WARNING shop.tasks: says done")
    assert prepare(reserved(succeeds, "done")).run(NO_BROKER).log == ()


def test_what_django_logs_about_the_state_of_each_task_is_not_kept(caplog):
    name = TaskResult.__module__.rpartition(".")[0]
    assert name in job_log.NAMES_OF_TASKS
    with caplog.at_level(logging.INFO, logger=name):
        [line] = prepare(reserved(succeeds, "done", result_ttl=60)).run(NO_BROKER).log
    assert line.endswith("says done")
    assert "state=RUNNING" in caplog.text


# --- in the database


@pytest.mark.django_db(transaction=True)
def test_a_worker_watches_and_stores_the_lines_of_a_failed_job(work, monkeypatch):
    uninstall(monkeypatch)
    result = says.using(priority=1).enqueue("from a worker")
    work()
    wait_until(lambda: Job.objects.filter(jid=result.id, failures=1).exists())
    [attempt] = attempts_of(Job.objects.get(jid=result.id).history)
    [line] = attempt.log
    assert line.endswith("WARNING shop.tasks: says from a worker")
    assert "log" not in json.loads(Job.objects.get(jid=result.id).failure)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("task_", [succeeds, succeeds_and_writes], ids=["plain", "atomic"])
def test_a_worker_stores_the_lines_of_a_successful_job(work, monkeypatch, task_):
    uninstall(monkeypatch)
    result = task_.enqueue("from a worker")
    work()
    wait_until(lambda: Job.objects.filter(jid=result.id, state="succeeded").exists())
    [run] = runs_of(Job.objects.get(jid=result.id).history)
    [line] = run.log
    assert line.endswith("WARNING shop.tasks: says from a worker")
    result.refresh()
    assert (result.errors, result.attempts) == ([], 1), "the lines count as no attempt"


@pytest.mark.django_db(transaction=True)
def test_lines_that_cannot_be_stored_do_not_undo_an_atomic_task(work, monkeypatch):
    def refuse(broker, acks):
        with connection.cursor() as cursor:
            cursor.execute("SELECT no_such_column")

    uninstall(monkeypatch)
    monkeypatch.setattr(OrmBroker, "keep_logs", refuse)
    result = succeeds_and_writes.enqueue("from a worker")
    work()
    wait_until(lambda: Job.objects.filter(jid=result.id, state="succeeded", failures=0).exists())
    assert Queue.objects.filter(name="written").exists()


@pytest.mark.django_db(transaction=True)
def test_a_failed_attempt_names_the_release_of_its_worker(work, settings):
    settings.FAKTORY = settings.FAKTORY | {"RELEASE": "2.4.1"}
    result = says.enqueue("x")
    work()
    wait_until(lambda: Job.objects.filter(jid=result.id, failures=1).exists())
    [attempt] = attempts_of(Job.objects.get(jid=result.id).history)
    assert attempt.release == "2.4.1"
