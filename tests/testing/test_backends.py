"""Test the backends for tests: they behave as FaktoryBackend except for where jobs go."""

from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.test import override_settings

from django_faktory import task
from django_faktory.backend import FaktoryBackend
from django_faktory.errors import InvalidPayload
from django_faktory.tasks.compat import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_enqueued,
    task_finished,
)
from tests.project import tasks
from tests.project.models import Mark

pytestmark = pytest.mark.once_if_quick

DUMMY, IMMEDIATE = "DummyBackend", "ImmediateBackend"
BOTH = pytest.mark.parametrize("name", [DUMMY, IMMEDIATE])


@task(
    priority=5,
    queue_name="mail",
    name="tests.all_options",
    max_attempts=3,
    backoff=lambda *_: 1,
    retry_on=[ValueError],
    discard_on=[KeyError],
    reserve_for=90,
    timeout=10,
    result_ttl=5,
    backtrace=3,
    unique_for=60,
    unique_until="start",
    expires_in=60,
    track=True,
    missing="discard",
)
def all_options(value):
    return value


@task(unique_for=60)
def alone(value=None):
    return value


@pytest.fixture
def signals():
    seen = []

    def enqueued(sender, task_result, **_):
        seen.append(("enqueued", sender.__name__, task_result.id, str(task_result.status)))

    def finished(sender, task_result, **_):
        seen.append(("finished", sender.__name__, task_result.id, str(task_result.status)))

    task_enqueued.connect(enqueued)
    task_finished.connect(finished)
    yield seen
    task_enqueued.disconnect(enqueued)
    task_finished.disconnect(finished)


# --- both backends


@BOTH
def test_a_task_with_every_option_is_accepted_without_a_database(tasks_setting, name):
    backend = tasks_setting(name)
    result = all_options.enqueue(1)
    assert isinstance(backend, FaktoryBackend)
    assert result.task.queue_name == "mail"


@BOTH
def test_both_test_backends_reject_what_faktory_backend_rejects(tasks_setting, name):
    tasks_setting(name)
    with pytest.raises(InvalidTask, match="queue_name"):
        tasks.noop.using(queue_name="no such name!")
    with pytest.raises(TypeError, match="Unsupported type"):
        tasks.returns.enqueue(object())
    with pytest.raises(ValueError, match="no NaN"):
        tasks.returns.enqueue(float("nan"))
    deep = []
    for _ in range(126):
        deep = [deep]
    with pytest.raises(InvalidPayload, match="nested deeper"):
        tasks.returns.enqueue(deep)


def test_arguments_are_passed_to_the_task_as_json(tasks_setting):
    tasks_setting(IMMEDIATE)
    result = tasks.echo.enqueue((1, 2), key={"one": (1,)})
    assert result.return_value == {"args": [[1, 2]], "kwargs": {"key": {"one": [1]}}}


@BOTH
def test_both_test_backends_work_without_the_installed_app(tasks_setting, name):
    backend = tasks_setting(name, QUEUES=["no such name!"])
    with override_settings(INSTALLED_APPS=["django.contrib.contenttypes"]):
        assert [message.id for message in backend.check()] == ["django_faktory.E008"]


# --- DummyBackend


def test_the_dummy_backend_records_enqueued_jobs_without_running_them(tasks_setting, signals):
    backend = tasks_setting(DUMMY)
    result = tasks.fails.enqueue("x")
    assert backend.results == [result]
    assert backend.results[0] is not result
    assert result.status == TaskResultStatus.READY
    assert signals == [("enqueued", DUMMY, result.id, "READY")]


def test_the_dummy_backend_finds_results_until_it_is_cleared(tasks_setting):
    backend = tasks_setting(DUMMY)
    result = tasks.noop.enqueue()
    assert tasks.noop.get_result(result.id) == result
    assert async_to_sync(tasks.noop.aget_result)(result.id) == result
    backend.clear()
    with pytest.raises(TaskResultDoesNotExist):
        tasks.noop.get_result(result.id)
    assert backend.results == []


@BOTH
def test_backends_for_tests_compare_unique_jobs_with_no_other(tasks_setting, name):
    tasks_setting(name)
    assert len({alone.enqueue(1).id, alone.enqueue(1).id}) == 2


# --- ImmediateBackend


def test_the_immediate_backend_runs_a_job_when_it_is_enqueued(tasks_setting, signals):
    tasks_setting(IMMEDIATE)
    result = tasks.add.enqueue(2, 3)
    assert (result.status, result.return_value, result.attempts) == (TaskResultStatus.SUCCESSFUL, 5, 1)
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert signals == [("enqueued", IMMEDIATE, result.id, "READY"), ("finished", IMMEDIATE, result.id, "SUCCESSFUL")]


def test_the_immediate_backend_runs_async_tasks_from_sync_and_async_code(tasks_setting):
    tasks_setting(IMMEDIATE)
    assert tasks.async_add.enqueue(2, 3).return_value == 5
    assert async_to_sync(tasks.async_add.aenqueue)(2, 3).return_value == 5
    assert async_to_sync(tasks.add.aenqueue)(2, 3).return_value == 5


def test_the_immediate_backend_retries_without_a_delay(tasks_setting):
    tasks_setting(IMMEDIATE)
    result = tasks.flaky.enqueue(2)
    assert (result.return_value, result.attempts, len(result.errors)) == (3, 3, 2)
    assert result.errors[1].exception_class_path == "django_faktory.errors.Retry"


def test_the_immediate_backend_stops_after_the_last_attempt(tasks_setting, signals):
    tasks_setting(IMMEDIATE)
    result = tasks.fails_with_backoff.enqueue()
    assert (result.status, len(result.errors), result.attempts) == (TaskResultStatus.FAILED, 3, 3)
    assert [what for what, *_ in signals] == ["enqueued", "finished"]
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value


@pytest.mark.parametrize(
    ("make", "attempts"),
    [
        (lambda: tasks.retries_only_connection_errors.enqueue("value"), 1),
        (tasks.discards_lookup_errors.enqueue, 1),
        (tasks.asks_for_kill.enqueue, 1),
        (tasks.asks_for_discard.enqueue, 1),
        (tasks.returns_unserializable.enqueue, 1),
        (lambda: tasks.retries_only_connection_errors.enqueue("connection"), 26),
    ],
)
def test_the_immediate_backend_does_not_retry_final_failures(tasks_setting, make, attempts):
    tasks_setting(IMMEDIATE)
    result = make()
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, attempts)


def test_the_immediate_backend_does_not_run_scheduled_jobs(tasks_setting):
    tasks_setting(IMMEDIATE)
    result = tasks.fails.using(run_after=timedelta(hours=1)).enqueue()
    assert (result.status, result.attempts) == (TaskResultStatus.READY, 0)


def test_the_immediate_backend_stops_after_100_attempts(tasks_setting):
    tasks_setting(IMMEDIATE)
    with override_settings(FAKTORY={"MAX_ATTEMPTS": 2**31 - 1}):
        result = tasks.fails.enqueue()
    assert (result.status, result.attempts) == (TaskResultStatus.READY, 100)


def test_the_immediate_backend_propagates_keyboard_interrupt(tasks_setting):
    tasks_setting(IMMEDIATE)
    with pytest.raises(KeyboardInterrupt):
        tasks.interrupts.enqueue()
    assert tasks.exits.using().enqueue().status == TaskResultStatus.FAILED


def test_the_immediate_backend_does_not_support_get_result(tasks_setting):
    backend = tasks_setting(IMMEDIATE)
    with pytest.raises(NotImplementedError):
        backend.get_result("no such job")
    with pytest.raises(NotImplementedError):
        async_to_sync(backend.aget_result)("no such job")


def test_the_immediate_backend_passes_the_task_context(tasks_setting):
    tasks_setting(IMMEDIATE)
    result = tasks.takes_context.enqueue(7)
    assert result.return_value == {"attempt": 1, "id": result.id, "value": 7}


@pytest.mark.django_db
def test_the_immediate_backend_runs_atomic_tasks_in_a_transaction(tasks_setting):
    tasks_setting(IMMEDIATE)
    assert tasks.writes_mark_atomically.enqueue("written").return_value == "written"
    result = tasks.writes_mark_atomically_and.enqueue("not written", "fails")
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 2)
    assert [mark.text for mark in Mark.objects.all()] == ["written"]
