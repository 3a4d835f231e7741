"""Run workers in threads of the test's process, over the test's database."""

import threading
from functools import partial

import pytest

from django_faktory.brokers.orm import OrmBroker
from django_faktory.models import Job
from django_faktory.store import notifier
from django_faktory.worker.worker import Worker
from tests.waiting import wait_until
from tests.worker.blocking import gates, left


class Running:
    """A worker that runs in a thread."""

    def __init__(self, worker):
        self.worker = worker
        self.has_ended_well = None
        self.error = None
        self._thread = threading.Thread(target=self._run, name="worker-under-test")
        self._thread.start()

    def _run(self):
        try:
            self.has_ended_well = self.worker.run()
        except Exception as error:  # noqa: BLE001  (for the test to look at)
            self.error = error

    def stop(self):
        self.worker.stop()

    def ended(self, timeout_s=60):
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


@pytest.fixture
def work(transactional_db):
    """Start workers. After the test every gate is opened, and all workers are stopped and joined."""
    running = []

    def start(broker=None, **options):
        options = {
            "queues": ["default"],
            "concurrency": 2,
            "listen": partial(notifier.listen, "default"),
            "poll_interval": 0.2,
            "beat_interval": 0.2,
            "shutdown_timeout": 10,
        } | options
        running.append(Running(Worker(broker or OrmBroker("default"), **options)))
        return running[-1]

    yield start
    for gate in gates.values():
        gate.opened.set()
    for one in running:
        one.stop()
    for one in running:
        assert one.ended(), "the worker did not stop"
        if (reporting := one.worker._loops["report"]).is_alive():
            reporting.join(60)  # a late report must not reach the next test's database
    gates.clear()
    left.clear()


@pytest.fixture
def state():
    """Wait until a task's job has one of these states, and return the job."""

    def wait_for(result, *states, timeout_s=60):
        return wait_until(
            lambda: found if (found := Job.objects.get(jid=result.id)).state in states else None,
            timeout_s,
            what=f"job in {states}",
        )

    return wait_for
