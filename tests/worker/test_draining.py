"""A draining worker ends when no work is left, and not before."""

import pytest

from django_faktory import Batch, push
from django_faktory.brokers.orm import OrmBroker
from django_faktory.models import Job
from django_faktory.worker.fetcher import DRAINED_FETCHES
from tests.project import tasks
from tests.waiting import wait_until
from tests.worker.blocking import enqueues, gates

pytestmark = [pytest.mark.once, pytest.mark.django_db(transaction=True)]


def test_draining_includes_jobs_enqueued_by_other_jobs(work):
    enqueues.enqueue("chain", 3)
    running = work(drain=True)
    assert gates["chain"].begun.acquire(timeout=60), "the task did not begin"
    gates["chain"].opened.set()
    assert running.ended()
    assert list(Job.objects.values_list("state", flat=True)) == ["succeeded"] * 4


def test_one_empty_fetch_does_not_end_draining(work):
    """A FETCH skips a job if another transaction has just locked its row."""

    class PassesOver(OrmBroker):
        looks = 0

        def fetch(self, requests):
            self.looks += 1
            return [[] for _ in requests] if self.looks == 1 else super().fetch(requests)

    tasks.noop.enqueue()
    running = work(PassesOver("default"), drain=True)
    assert running.ended()
    assert Job.objects.get().state == "succeeded"


@pytest.mark.parametrize("follower", ["callback of a batch", "job of the same lock"])
def test_draining_includes_jobs_that_become_ready_with_a_report(work, follower):
    class AcksLate(OrmBroker):
        fetches = 0

        def fetch(self, requests):
            self.fetches += 1
            return super().fetch(requests)

        def ack(self, acks):
            # More fetches than an idle worker needs to end.
            wait_until(lambda until=self.fetches + 2 * DRAINED_FETCHES: self.fetches >= until)
            return super().ack(acks)

    if follower == "callback of a batch":
        with Batch(success=tasks.noop):
            tasks.add.enqueue(1, 2)
    else:
        for _ in range(2):
            push(tasks.noop.jobtype, custom={"lock": "shop 1"})
    running = work(AcksLate("default"), drain=True, concurrency=1)
    assert running.ended()
    # A pushed job has no result to keep, so its row is deleted.
    assert not Job.objects.exclude(state="succeeded").exists()
