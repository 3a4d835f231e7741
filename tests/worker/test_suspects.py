"""A job that lost its worker twice runs alone, so that a third loss blames one job (W20)."""

import json
from datetime import timedelta

import pytest
from django.db import transaction
from django.utils import timezone

from django_faktory.core.payloads import Ack, Reservation, rfc3339
from django_faktory.models import Job
from django_faktory.worker import suspects
from django_faktory.worker.job_buffer import JobBuffer
from django_faktory.worker.suspects import SuspectLimits
from tests.factories import T0
from tests.project.tasks import noop
from tests.waiting import wait_until
from tests.worker.blocking import gates, passes

pytestmark = pytest.mark.once_if_quick


def enqueue_lost(task, *args, losses=2):
    """Enqueue a job that has lost its worker `losses` times.

    One statement makes it ready: workers of the test already look for jobs.
    """
    result = task.using(run_after=timedelta(hours=1)).enqueue(*args)
    now = timezone.now()
    changed = Job.objects.filter(jid=result.id).update(
        state="enqueued", run_at=None, enqueued_at=now, losses=losses, attempt=losses, history=history(losses, now)
    )
    assert changed == 1
    return result


def history(losses, failed_at):
    loss = {"wid": "w", "errtype": "WorkerLost", "failed_at": rfc3339(failed_at)}
    return json.dumps([loss] * losses)


def begun(name):
    return gates[name].begun.acquire(timeout=60)


def reservation(number=1, *, losses=0, **fields):
    fields = {"jid": f"job-{number:05d}", "history": history(losses, T0) if losses else ""} | fields
    return Reservation(queue="default", text="{}", wid="w1", attempt=3, **fields)


@pytest.mark.django_db(transaction=True)
class TestWorker:
    def test_a_suspect_waits_for_running_jobs_and_blocks_further_fetches(self, work, state):
        first = passes.enqueue("first")
        work(concurrency=3)
        assert begun("first")
        suspect = enqueue_lost(passes, "suspect")
        wait_until(lambda: Job.objects.get(jid=suspect.id).state == "working")
        later = noop.enqueue()
        assert not gates["suspect"].begun.acquire(timeout=0.5)
        assert Job.objects.get(jid=later.id).state == "enqueued"
        gates["first"].opened.set()
        assert begun("suspect")
        assert state(first, "succeeded")
        assert Job.objects.get(jid=later.id).state == "enqueued"
        gates["suspect"].opened.set()
        state(suspect, "succeeded")
        state(later, "succeeded")

    def test_jobs_fetched_together_with_a_suspect_are_released(self, work, state):
        gate = passes.enqueue("gate")
        work(concurrency=4)
        assert begun("gate")
        gates["gate"].opened.set()
        state(gate, "succeeded")
        with transaction.atomic():
            suspect = enqueue_lost(passes, "suspect")
            others = passes.enqueue_many([("other",), ("other",)])
        assert begun("suspect")
        wait_until(lambda: Job.objects.filter(state="enqueued").count() == len(others))
        gates["suspect"].opened.set()
        gates["other"].opened.set()
        for result in (suspect, *others):
            state(result, "succeeded")

    def test_a_postponed_suspect_is_run_by_another_worker(self, work, state):
        limits = SuspectLimits(min_wait_s=0.1, wait_share=0.0)
        passes.enqueue("long")
        work(concurrency=2, suspect_limits=limits)
        assert begun("long")
        suspect = enqueue_lost(noop)
        state(suspect, "scheduled")
        work(concurrency=2, suspect_limits=limits)

        def has_succeeded():
            """Make the job due each time it was postponed: this test has no maintenance."""
            job = Job.objects.filter(jid=suspect.id)
            job.filter(state="scheduled").update(state="enqueued", run_at=None, enqueued_at=timezone.now())
            return job.get().state == "succeeded"

        wait_until(has_succeeded)

    def test_a_stopping_worker_releases_a_suspect_that_has_not_started(self, work):
        passes.enqueue("long")
        running = work(concurrency=2)
        assert begun("long")
        suspect = enqueue_lost(noop)
        wait_until(lambda: Job.objects.get(jid=suspect.id).state == "working")
        running.stop()
        wait_until(lambda: Job.objects.get(jid=suspect.id).state == "enqueued")
        gates["long"].opened.set()
        assert running.ended()


@pytest.mark.core
class TestHeld:
    @pytest.fixture
    def held(self):
        return JobBuffer(concurrency=2, max_prefetch=0)

    def test_a_suspect_starts_only_after_the_other_jobs_are_reported(self, held):
        """Otherwise a loss would be counted for work that is done."""
        other, suspect = reservation(1), reservation(2, losses=2)
        held.add([other])
        assert held.take_next() is other
        assert held.add_alone(suspect, wait_s=30)
        held.finish(other, Ack(jid=other.jid), ran_s=0.1)
        held.settle_alone(is_reported=False)
        assert not held.has_waiting()
        held.settle_alone(is_reported=True)
        assert held.take_next() is suspect

    def test_a_second_suspect_is_not_accepted(self, held):
        assert held.add_alone(reservation(1, losses=2), wait_s=30)
        assert not held.add_alone(reservation(2, losses=2), wait_s=30)

    @pytest.mark.parametrize(("losses", "is_suspect"), [(0, False), (1, False), (2, True), (3, True)])
    def test_a_job_with_two_or_more_losses_is_a_suspect(self, losses, is_suspect):
        assert suspects.is_suspect(reservation(losses=losses)) is is_suspect

    def test_the_wait_of_a_suspect_grows_with_the_age_of_its_latest_loss(self):
        def waits(minutes):
            return suspects.wait_s(reservation(losses=2, started_at=T0 + timedelta(minutes=minutes)))

        assert [waits(minutes) for minutes in (0, 10, 20)] == [10.0, 300.0, 600.0]
        assert suspects.wait_s(reservation(losses=2)) == 10.0
        assert suspects.wait_s(reservation(history='[{"errtype":"WorkerLost"},{"errtype":"WorkerLost"}]')) == 10.0
