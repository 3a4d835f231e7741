"""get_result: the states of stored jobs as statuses of Django's Tasks."""

from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction
from django.test import override_settings
from django.utils import timezone

from django_faktory import errors
from django_faktory.brokers import get_broker
from django_faktory.core.lifecycle import FINISHED, State
from django_faktory.core.payloads import Ack, TrackUpdate, failure
from django_faktory.models import Job
from django_faktory.tasks.compat import TaskResultDoesNotExist, TaskResultStatus, task_backends
from django_faktory.tasks.results import Attempt, task_error
from tests.factories import JobFactory, end_all
from tests.project import tasks
from tests.project.models import Mark
from tests.tasks.work import fetched, work

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]


def test_a_waiting_job_has_status_ready():
    sent = tasks.add.enqueue(1, 2)
    result = tasks.add.get_result(sent.id)
    assert result == sent
    assert (result.status, result.args, result.task, result.attempts) == (TaskResultStatus.READY, [1, 2], tasks.add, 0)
    assert result.enqueued_at is not None
    assert (result.started_at, result.last_attempted_at, result.finished_at) == (None, None, None)
    with pytest.raises(ValueError, match=r"^Task has not finished yet.*call \.wait\(timeout=…\)"):
        _ = result.return_value


def test_a_working_job_has_status_running():
    sent = tasks.noop.enqueue()
    fetched("w7")
    sent.refresh()
    assert (sent.status, sent.worker_ids) == (TaskResultStatus.RUNNING, ["w7"])
    assert sent.started_at == sent.last_attempted_at is not None
    assert sent.finished_at is None


def test_a_succeeded_job_has_its_return_value():
    sent = tasks.add.enqueue(1, 2)
    work("w7")
    sent.refresh()
    assert (sent.status, sent.return_value, sent.worker_ids, sent.errors) == (
        TaskResultStatus.SUCCESSFUL, 3, ["w7"], [],
    )  # fmt: skip
    assert sent.enqueued_at <= sent.started_at <= sent.finished_at


def test_a_result_cancels_its_job():
    waits, runs, done = tasks.noop.enqueue(), tasks.noop.enqueue(), tasks.noop.enqueue()
    Job.objects.filter(jid=waits.id).update(queue="low")
    fetched()
    end_all(Job.live.filter(jid=done.id), state=State.SUCCEEDED, finished_at=timezone.now(), purge_at=timezone.now())
    assert (waits.cancel(), async_to_sync(runs.acancel)(), done.cancel()) == (True, True, False)
    assert Job.objects.get(jid=waits.id).state == State.DISCARDED
    assert Job.objects.get(jid=runs.id).is_cancelled


@contextmanager
def work_after_the_first_query():
    """Run a job in another thread, once this thread has sent a query."""
    has_read = Event()

    def run():
        try:
            has_read.wait()
            work()
        finally:
            connections.close_all()

    def record(execute, *args):
        try:
            return execute(*args)
        finally:
            has_read.set()

    thread = Thread(target=run)
    thread.start()
    try:
        with connection.execute_wrapper(record):
            yield
    finally:
        has_read.set()
        thread.join()


@pytest.mark.parametrize("wait", [lambda sent: sent.wait(60), lambda sent: async_to_sync(sent.wait_async)(60)])
def test_wait_returns_the_result_when_the_job_has_ended(wait):
    sent = tasks.add.enqueue(1, 2)
    with work_after_the_first_query():
        assert wait(sent) is sent
    assert (sent.status, sent.return_value) == (TaskResultStatus.SUCCESSFUL, 3)


def test_wait_returns_the_result_of_a_failed_job():
    sent = tasks.fails.using(max_attempts=1).enqueue("out of paper")
    work()
    assert sent.wait().status is TaskResultStatus.FAILED


def test_wait_raises_a_timeout_error_if_the_job_does_not_end_in_time():
    sent = tasks.noop.enqueue()
    with pytest.raises(TimeoutError, match=f"not ended within 0.05 s: READY id={sent.id}"):
        sent.wait(0.05)
    with pytest.raises(errors.ResultTimeout):
        async_to_sync(sent.wait_async)(0)


def test_wait_refuses_a_transaction_in_which_no_worker_sees_the_job():
    with transaction.atomic():
        sent = tasks.noop.enqueue()
        with pytest.raises(errors.FaktoryError, match="no open transaction"):
            sent.wait(60)


@pytest.mark.parametrize(("backend", "is_finished"), [("DummyBackend", False), ("ImmediateBackend", True)])
def test_jobs_of_the_test_backends_are_waited_for_and_not_cancelled(backend, is_finished):
    with override_settings(TASKS={"default": {"BACKEND": f"django_faktory.testing.backends.{backend}", "QUEUES": []}}):
        sent = tasks.add.enqueue(1, 2)
        if is_finished:
            assert sent.wait(0).return_value == 3
        else:
            with pytest.raises(errors.ResultTimeout):
                sent.wait(0)
        assert not sent.cancel()


def test_wait_returns_an_ended_job_inside_a_transaction():
    sent = tasks.add.enqueue(1, 2)
    work()
    with transaction.atomic():
        assert sent.wait(60).return_value == 3


def test_a_job_waiting_for_a_retry_is_ready_and_lists_its_errors():
    sent = tasks.fails.enqueue("out of paper")
    work("w7")
    sent.refresh()
    assert (sent.status, sent.worker_ids, sent.finished_at) == (TaskResultStatus.READY, ["w7"], None)
    [error] = sent.errors
    assert error.exception_class is ValueError
    assert error.traceback.endswith("ValueError: out of paper\n")


def test_a_dead_job_has_status_failed_and_is_kept():
    sent = tasks.fails_for_good.enqueue()
    work()
    sent.refresh()
    assert (sent.status, len(sent.errors), sent.attempts) == (TaskResultStatus.FAILED, 1, 1)
    assert sent.finished_at is not None
    with pytest.raises(ValueError, match=r"^Task failed: builtins\.ValueError; see \.errors$"):
        _ = sent.return_value


def test_a_result_lists_the_worker_and_error_of_each_attempt():
    sent = tasks.flaky.enqueue(2)
    for wid in ("w1", "w2", "w3"):
        Job.objects.filter(state="retries").update(state="enqueued", run_at=None)
        work(wid)
    sent.refresh()
    assert (sent.status, sent.return_value) == (TaskResultStatus.SUCCESSFUL, 3)
    assert sent.worker_ids == ["w1", "w2", "w3"]
    assert [error.exception_class_path for error in sent.errors] == ["django_faktory.errors.Retry"] * 2


def test_a_result_can_be_read_from_async_code():
    sent = tasks.writes_mark.enqueue("written")
    work()
    async_to_sync(sent.arefresh)()
    assert sent.status == TaskResultStatus.SUCCESSFUL
    assert Mark.objects.get().text == "written"
    assert async_to_sync(tasks.writes_mark.aget_result)(sent.id).is_finished


@pytest.mark.parametrize("state", list(State))
def test_every_job_state_maps_to_a_result_status(state):
    trait = {} if state == State.ENQUEUED else {str(state): True}
    if state in FINISHED:
        trait["purge_at"] = timezone.now() + timedelta(hours=1)
    job = JobFactory(jobtype=tasks.noop.jobtype, **trait)
    wanted = {
        "working": TaskResultStatus.RUNNING,
        "succeeded": TaskResultStatus.SUCCESSFUL,
        "dead": TaskResultStatus.FAILED,
        "discarded": TaskResultStatus.FAILED,
        "expired": TaskResultStatus.FAILED,
    }
    assert tasks.noop.get_result(job.jid).status == wanted.get(str(state), TaskResultStatus.READY)


def test_a_result_restores_the_task_with_its_enqueue_options():
    sent = tasks.charge.using(priority=50, queue_name="low", run_after=timedelta(hours=1)).enqueue(1)
    found = task_backends["default"].get_result(sent.id)
    assert found.task == sent.task
    assert (found.task.priority, found.task.queue_name) == (50, "low")


def test_a_result_is_found_even_if_its_queue_left_the_backend_settings():
    sent = tasks.noop.using(queue_name="gone").enqueue()
    with override_settings(
        TASKS={"default": {"BACKEND": "django_faktory.backend.FaktoryBackend", "QUEUES": ["default"]}}
    ):
        assert tasks.noop.get_result(sent.id).task is tasks.noop


@pytest.mark.parametrize(
    "jid", ["0" * 32, "", "short", "x" * 300, "nul\x00nul\x00nul", "\ud800" * 8, 5, None, "' OR 1=1 --"]
)
def test_an_unknown_id_raises_task_result_does_not_exist(jid):
    with pytest.raises(TaskResultDoesNotExist, match=r"no job has the id .*result_ttl"):
        tasks.noop.get_result(jid)


def test_a_job_with_an_unregistered_jobtype_has_no_result():
    job = JobFactory(jobtype="SomeRubyJob")
    with pytest.raises(TaskResultDoesNotExist, match="SomeRubyJob"):
        task_backends["default"].get_result(job.jid)


def test_a_job_with_damaged_json_has_no_result():
    job = JobFactory(jobtype=tasks.noop.jobtype, payload='{"jobtype":')
    with pytest.raises(TaskResultDoesNotExist, match="invalid JSON"):
        tasks.noop.get_result(job.jid)


def test_get_result_refuses_a_job_of_another_task():
    sent = tasks.noop.enqueue()
    with pytest.raises(Exception, match="Task does not match"):
        tasks.add.get_result(sent.id)


def test_get_result_with_a_remote_broker_refers_to_the_faktory_server():
    with override_settings(FAKTORY={"BROKER": "remote"}), pytest.raises(NotImplementedError, match="Faktory server"):
        task_backends["default"].get_result("0" * 32)


def test_a_job_acknowledged_over_the_wire_has_no_return_value():
    """An ACK over the wire carries no result."""
    sent = tasks.add.enqueue(1, 2)
    reservation = fetched()
    get_broker().ack([Ack(jid=reservation.jid, wid=reservation.wid)])
    sent.refresh()
    assert (sent.status, sent.return_value) == (TaskResultStatus.SUCCESSFUL, None)


def test_a_failure_from_another_language_keeps_its_error_and_backtrace():
    sent = tasks.add.enqueue(1, 2)
    job = fetched()
    get_broker().fail([failure(jid=job.jid, wid="w1", errtype="Net::Timeout", message="slow", backtrace=["a.rb:1"])])
    sent.refresh()
    assert sent.errors[0].exception_class_path == "Net::Timeout"
    assert sent.errors[0].traceback == "Net::Timeout: slow\na.rb:1\n"


@pytest.mark.parametrize("name", ["UnknownJobType", "ReservationExpired", "WorkerLost", "InvalidPayload"])
def test_protocol_error_types_map_to_importable_exception_classes(name):
    assert task_error(Attempt(errtype=name, message="x")).exception_class is getattr(errors, name)


def test_a_damaged_history_does_not_hide_the_result():
    job = JobFactory(
        jobtype=tasks.noop.jobtype, history='[{"wid":"w1","errtype":"E","message":"m","failed_at":"never"}]'
    )
    found = tasks.noop.get_result(job.jid)
    assert (found.worker_ids, found.last_attempted_at) == (["w1"], None)
    Job.objects.filter(jid=job.jid).update(history="[{")
    assert tasks.noop.get_result(job.jid).errors == []


def test_started_at_of_a_retried_job_is_its_first_attempt():
    first = "2026-05-01T11:00:00Z"
    job = JobFactory(
        working=True, jobtype="tests.project.tasks.noop", attempt=2, history=f'[{{"wid":"w0","started_at":"{first}"}}]'
    )
    result = tasks.noop.get_result(job.jid)
    assert result.started_at.isoformat() == "2026-05-01T11:00:00+00:00"
    assert result.last_attempted_at == job.started_at


def test_a_result_is_readable_for_its_result_ttl():
    """Its row may stay until its day leaves."""
    sent = tasks.charge.enqueue(5)  # result_ttl=60
    work()
    row = Job.objects.get()
    assert abs(row.purge_at - row.finished_at - timedelta(seconds=60)) < timedelta(milliseconds=2)  # SQLite rounds
    assert tasks.charge.get_result(sent.id).return_value == 5
    Job.objects.update(purge_at=timezone.now() - timedelta(seconds=1))
    with pytest.raises(TaskResultDoesNotExist):
        tasks.charge.get_result(sent.id)


def test_progress_is_available_before_and_after_the_first_update():
    sent = tasks.add.enqueue(1, 2)
    assert (sent.progress.percent, sent.progress.state) == (None, "enqueued")
    get_broker().track_set([TrackUpdate(jid=sent.id, percent=30, desc="soon")])
    found = tasks.add.get_result(sent.id)
    assert (found.progress.percent, found.progress.desc) == (30, "soon")
