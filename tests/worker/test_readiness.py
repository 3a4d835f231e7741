"""Test what a worker does with jobs that it cannot begin: it waits, and the job loses no attempt."""

import threading

import pytest

from django_faktory.brokers.orm import OrmBroker
from django_faktory.errors import CannotBegin
from django_faktory.models import Job, WorkerProcess
from django_faktory.worker.db_cleanup import ASYNC_THREAD
from django_faktory.worker.job_buffer import JobBuffer
from tests.project import tasks
from tests.project.models import Mark
from tests.waiting import wait_until
from tests.worker.blocking import Unreliable

pytestmark = pytest.mark.once_if_quick


class WithoutConnections(OrmBroker):
    """A broker that has no connection for the first transactions of tasks."""

    refusals = 5

    def atomic(self):
        self.refusals -= 1
        if self.refusals >= 0:
            raise CannotBegin("database unavailable: too many connections")
        return super().atomic()


def test_jobs_that_cannot_begin_wait_and_run_once(work):
    tasks.writes_mark_atomically.enqueue_many([(str(number),) for number in range(4)])
    broker = WithoutConnections("default")
    work(broker)
    wait_until(lambda: not Job.objects.exclude(state="succeeded").exists())
    assert broker.refusals < 0
    assert sorted(Mark.objects.values_list("text", flat=True)) == ["0", "1", "2", "3"]
    assert set(Job.objects.values_list("failures", "interruptions")) <= {(0, 0)}


def test_a_job_that_waits_for_a_connection_is_released_when_its_worker_stops(work):
    result = tasks.writes_mark_atomically.enqueue("0")
    broker = WithoutConnections("default")
    broker.refusals = 1_000_000
    running = work(broker, shutdown_timeout=0.2)
    wait_until(lambda: broker.refusals < 1_000_000)
    running.stop()
    assert running.ended()
    job = Job.objects.get(jid=result.id)
    assert (job.state, job.failures, job.interruptions) == ("enqueued", 0, 1)


@pytest.mark.core
def test_a_blocked_thread_leaves_no_room_for_jobs():
    buffer = JobBuffer(concurrency=2, max_prefetch=50)
    with buffer.blocked_thread():
        assert buffer.wait_for_room(0) == 1
        with buffer.blocked_thread():
            assert buffer.wait_for_room(0) == 0
    assert buffer.wait_for_room(0) > 0


def test_a_process_that_can_start_no_thread_interrupts_its_async_job(work, monkeypatch):
    start, refused = threading.Thread.start, []

    def refuse_once(thread):
        if thread.name == ASYNC_THREAD and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    result = tasks.async_add.enqueue(1, 2)
    work()
    wait_until(lambda: Job.objects.filter(jid=result.id, state="succeeded").exists())
    job = Job.objects.get(jid=result.id)
    assert (job.failures, job.interruptions) == (0, 1)
    assert refused


def test_a_worker_whose_reports_are_late_claims_no_more_jobs(work):
    broker = Unreliable()
    broker.unavailable = {"ack"}
    tasks.noop.enqueue_many([()] * 10)
    running = work(broker, concurrency=2)
    wait_until(running.worker._reporter.is_late)
    tasks.noop.enqueue_many([()] * 500)  # more than a claim that has begun can take
    for _ in range(3):  # so long that a worker that may fetch has taken them
        seen = WorkerProcess.objects.get().beat_at
        wait_until(lambda seen=seen: WorkerProcess.objects.get().beat_at > seen)
    assert Job.objects.filter(state="enqueued").count() > 400
    broker.unavailable = set()
    wait_until(lambda: not Job.objects.exclude(state="succeeded").exists())
