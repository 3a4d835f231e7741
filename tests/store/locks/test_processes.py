"""Locks of real worker processes that are paused or killed: cases L22, L23."""

import os
import signal

import pytest

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.locket import Locket, locket
from django_faktory.core.payloads import Ack, FetchRequest
from django_faktory.models import Job, JobLock
from tests.runtime.processes.conftest import address, meeting, runfaktory  # noqa: F401  (fixtures)
from tests.runtime.processes.test_nodes import kill
from tests.runtime.processes.test_runfaktory import reaches
from tests.standing import suspend_process
from tests.store.locks.tasks import waits_with_lock
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

WORKER = ("--worker-only", "--processes", "1", "--concurrency", "1", "--no-reload")


@pytest.fixture
def nodes(runfaktory, address):  # noqa: F811
    """Start a node that does the maintenance, and a worker process with leases of `lease_s` seconds."""

    def start(lease_s, **settings):
        settings |= {
            "LOCKET": {"HEARTBEAT_FREQUENCY": 0.2, "JOB_LOCK_DURATION": lease_s},
        }
        house = runfaktory("127.0.0.1:0", "--server-only", "--no-reload", **settings)
        address(house)
        return runfaktory(*WORKER, environment={"FAKTORY_TEST_APPS": "tests.store.locks"}, **settings)

    return start


class Other:
    """Another worker, in any language, with leases of 600 s."""

    broker = OrmBroker("default", locket=Locket(locket([], heartbeat_frequency=30, job_lock_duration=600)))

    def gets(self):
        """Return the jobs that it can fetch now."""
        [found] = self.broker.fetch([FetchRequest(queues=("default",), wid="other")])
        return found

    def ends(self, job):
        return self.broker.ack([Ack(jid=job.jid, wid=job.wid)])


def test_a_worker_suspended_beyond_its_lease_cannot_release_the_next_lock(nodes, meeting):  # noqa: F811
    """Check that the task sees the loss, and that its late end keeps the new lock (L22)."""
    first, second = waits_with_lock.enqueue(str(meeting)), waits_with_lock.enqueue(str(meeting))
    worker = nodes(1)
    pid = meeting.pid()
    stale = JobLock.objects.get()
    suspend_process(pid)
    try:
        [taken] = wait_until(Other().gets)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (stale.jid, taken.jid) == (first.id, second.id)
    assert taken.lock_token > stale.pk
    worker.wait_for_log("lock is lost", first.id)
    meeting.release_task()
    reaches(first, "succeeded")
    first.refresh()
    assert first.return_value is True, "the task saw it"
    assert len(worker.wait_for_log("lock is lost")) == 1
    assert JobLock.objects.get().pk == taken.lock_token
    assert Other().ends(taken) == [True]
    assert not JobLock.objects.exists()


def test_the_lock_of_a_killed_node_passes_to_the_next_at_expiry(nodes, meeting):  # noqa: F811
    """Check that the twin runs after the lease is over, and the lost job after its twin (L23)."""
    first, second = waits_with_lock.enqueue(str(meeting)), waits_with_lock.enqueue(str(meeting))
    worker = nodes(2, WORKER_TIMEOUT=6)
    meeting.pid()
    kill((None, worker))
    held_until = JobLock.objects.get().expires_at
    [taken] = wait_until(Other().gets)
    lock = JobLock.objects.get()
    assert (taken.jid, lock.pk) == (second.id, taken.lock_token)
    assert lock.acquired_at >= held_until
    reaches(first, "blocked")  # released with its worker, it waits for its twin
    assert JobLock.objects.get().pk == taken.lock_token
    assert Other().ends(taken) == [True]
    assert [job.jid for job in wait_until(Other().gets)] == [first.id]


def test_the_lock_of_a_killed_worker_is_released_early_by_its_node(nodes, meeting):  # noqa: F811
    """Check that the supervisor reports the loss, which releases the lock long before its lease is over."""
    first = waits_with_lock.enqueue(str(meeting))
    nodes(600)
    pid = meeting.pid()
    token = JobLock.objects.get().pk
    os.kill(pid, signal.SIGKILL)
    meeting.pid(but=pid)
    assert JobLock.objects.get().pk > token
    meeting.release_task()
    reaches(first, "succeeded")
    assert (Job.objects.get().claims, JobLock.objects.count()) == (2, 0)
