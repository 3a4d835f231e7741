"""Test time limits, cancellation and progress with whole workers."""

import threading
import time

import pytest
from django.db import connection

from django_faktory.brokers import get_broker
from django_faktory.brokers.orm import OrmBroker
from django_faktory.models import Job, Tracking
from django_faktory.tasks.compat import TaskResultStatus
from django_faktory.worker.job_monitor import MonitorLimits
from tests.project.models import Mark
from tests.project.tasks import noop
from tests.tracers import hangs_under_tracers
from tests.waiting import wait_until
from tests.worker import limited
from tests.worker.blocking import gates, passes

pytestmark = pytest.mark.once_if_quick

IMPATIENT = MonitorLimits(query_every_s=0.2, cancel_grace_s=600, stop_grace_s=600)


class WritesLate(OrmBroker):
    """A broker that blocks the progress thread at its first write, until the test sets `may_continue`."""

    def __init__(self, alias):
        super().__init__(alias)
        self.began, self.may_continue = threading.Event(), threading.Event()

    def track_set(self, updates):
        if threading.current_thread().name == "faktory-progress" and not self.began.is_set():
            self.began.set()
            self.may_continue.wait(60)
        super().track_set(updates)


def status_and_errors(task, result):
    """Return the status of a job's result and its errors, as bare class names."""
    found = task.get_result(result.id)
    return found.status, [error.exception_class_path.rpartition(".")[2] for error in found.errors]


class TestTimeout:
    def test_a_function_is_stopped_at_its_timeout_and_then_retried(self, work, state):
        work()
        result = limited.spins.enqueue("a")
        job = state(result, "retries")
        assert job.errtype == "TaskTimeout"
        assert "within its timeout of 0.2 s" in job.failure
        assert "_spin" in job.failure, "where it was"
        Job.objects.update(state="enqueued")
        assert state(result, "dead").failures == 2
        assert status_and_errors(limited.spins, result) == (TaskResultStatus.FAILED, ["TaskTimeout"] * 2)

    def test_a_job_has_the_timeout_of_using_in_place_of_its_task(self, work, state):
        work()
        result = limited.spins_without_timeout.using(timeout=0.2).enqueue("a")
        assert state(result, "dead").errtype == "TaskTimeout"
        longer = limited.spins.using(timeout=3600, max_attempts=1).enqueue("b")
        assert gates["b"].begun.acquire(timeout=60)
        # A later job of the same task ends by the task's timeout: by then the first has run for longer than that.
        assert state(limited.spins.enqueue("c"), "retries").errtype == "TaskTimeout"
        gates["b"].opened.set()
        assert state(longer, "succeeded").reserve_for == 3630

    def test_a_coroutine_is_cancelled_at_its_timeout(self, work, state):
        work()
        assert state(limited.waits_async.enqueue("a"), "retries").errtype == "TaskTimeout"

    @pytest.mark.parametrize("task", [limited.spins_and_catches, limited.cleans_up_badly])
    def test_exceptions_caught_or_raised_by_the_task_do_not_hide_its_timeout(self, work, state, task):
        work()
        assert state(task.enqueue("a"), "retries").errtype == "TaskTimeout"

    def test_an_atomic_function_is_rolled_back_at_its_timeout(self, work, state):
        work()
        assert state(limited.spins_atomically.enqueue("a"), "retries").errtype == "TaskTimeout"
        assert not Mark.objects.exists()

    @pytest.mark.each_database
    def test_the_thread_continues_with_working_connections_after_a_timeout(self, work, state):
        work(concurrency=1)
        state(limited.spins_in_the_database.enqueue("a"), "retries")
        state(noop.enqueue(), "succeeded")
        gates["b"].opened.set()
        state(limited.spins_in_the_database.enqueue("b"), "succeeded")

    def test_a_task_whose_interruption_python_drops_is_interrupted_again(self, work, state):
        running = work(concurrency=1)
        assert state(limited.is_interrupted_in_a_finalizer.enqueue("a"), "retries").errtype == "TaskTimeout"
        state(noop.enqueue(), "succeeded")
        assert not running.worker.is_stuck

    def test_a_task_that_ends_before_its_timeout_succeeds(self, work, state):
        work()
        state(limited.is_quick.enqueue(), "succeeded")
        state(limited.is_quick_async.enqueue(), "succeeded")

    @hangs_under_tracers
    @pytest.mark.parametrize("task", [limited.sits_in_c, limited.ignores_its_timeout])
    def test_an_unstoppable_task_fails_and_the_process_ends_after_its_other_jobs(self, work, state, task, caplog):
        running = work(limits=MonitorLimits(stop_grace_s=0.2))
        passing = passes.enqueue("other")
        assert gates["other"].begun.acquire(timeout=60)
        result = task.enqueue("stuck")
        assert state(result, "retries").errtype == "TaskTimeout"
        wait_until(lambda: running.worker.is_stuck)
        assert "this process will be replaced" in caplog.text
        later = noop.enqueue()
        gates["other"].opened.set()
        state(passing, "succeeded")
        assert running.ended()
        assert running.has_ended_well is False, "a thread is still there"
        assert Job.objects.get(jid=later.id).state == "enqueued"


class TestCancelling:
    def cancelled(self, task, work, name="a", limits=IMPATIENT):
        work(limits=limits)
        result = task.enqueue(name)
        assert gates[name].begun.acquire(timeout=60)
        assert get_broker().cancel([result.id]) == 1
        return result

    @pytest.mark.parametrize("task", [limited.never_ends, limited.never_ends_async, limited.looks_at_its_context])
    def test_a_cancelled_running_job_is_discarded(self, work, state, task):
        result = self.cancelled(task, work)
        job = state(result, "discarded")
        assert job.errtype == "Cancelled"
        assert status_and_errors(task, result) == (TaskResultStatus.FAILED, ["Cancelled"])

    def test_a_task_that_ignores_its_context_is_stopped_after_the_grace_period(self, work, state):
        result = self.cancelled(limited.never_looks, work, limits=MonitorLimits(query_every_s=0.2, cancel_grace_s=0.2))
        assert state(result, "discarded").errtype == "Cancelled"

    def test_a_cancelled_task_that_completes_within_the_grace_period_succeeds(self, work, state):
        result = self.cancelled(limited.never_looks, work)
        gates["a"].opened.set()
        state(result, "succeeded")

    def test_a_failure_after_cancellation_is_not_retried(self, work, state):
        result = self.cancelled(limited.fails_when_cancelled, work)
        assert state(result, "discarded").errtype == "builtins.ValueError"

    def test_short_jobs_never_query_the_broker_for_cancellation(self, work, state):
        asked = []

        class Asked(type(get_broker())):
            def cancelled(self, jids):
                asked.append(jids)
                return super().cancelled(jids)

        work(Asked("default"), limits=IMPATIENT)
        for _ in range(20):
            state(noop.enqueue(), "succeeded")
        assert not asked


class TestProgress:
    def test_progress_is_throttled_and_the_last_update_is_always_written(self, work, state):
        work()
        result = limited.reports_progress.enqueue("a")
        first = wait_until(lambda: Tracking.objects.filter(jid=result.id).first())
        assert (first.percent, first.desc) == (33, "begun")
        began_at = time.monotonic()
        gates["a"].opened.set()
        state(result, "succeeded")
        wait_until(lambda: Tracking.objects.get(jid=result.id).desc == "2000 of 2000")
        assert time.monotonic() - began_at < 10
        progress = limited.reports_progress.get_result(result.id).progress
        assert (progress.percent, progress.desc, progress.state) == (100, "2000 of 2000", "success")

    @pytest.mark.each_database
    @pytest.mark.parametrize(
        "task", [limited.reports_progress, limited.reports_progress_async, limited.reports_progress_atomically]
    )
    def test_a_succeeded_job_shows_its_last_progress(self, work, state, task):
        """Check the progress when the job ends, although updates in quick succession are written a second apart."""
        work()
        result = task.enqueue("a")
        if not (task.atomic and connection.vendor == "sqlite"):  # there others wait for the transaction
            wait_until(lambda: Tracking.objects.filter(jid=result.id).exists())
        assert gates["a"].begun.acquire(timeout=60)
        gates["a"].opened.set()
        state(result, "succeeded")
        assert task.get_result(result.id).progress.desc == "2000 of 2000"

    def test_a_delayed_write_of_earlier_progress_does_not_replace_the_last(self, work, state):
        """The task's transaction writes the last progress. An earlier write that waited must not replace it."""
        broker = WritesLate("default")
        running = work(broker)
        result = limited.reports_progress_atomically.enqueue("a")
        assert gates["a"].begun.acquire(timeout=60)
        assert broker.began.wait(60)
        gates["a"].opened.set()
        state(result, "succeeded")
        assert limited.reports_progress_atomically.get_result(result.id).progress.percent == 100
        broker.may_continue.set()
        running.stop()
        assert running.ended()
        assert limited.reports_progress_atomically.get_result(result.id).progress.percent == 100

    def test_progress_of_an_atomic_task_is_visible_before_its_commit(self, work):
        work()
        result = limited.reports_progress_atomically.enqueue("a")
        if connection.vendor == "sqlite":  # one writer at a time: others wait for the transaction
            gates["a"].opened.set()
            wait_until(lambda: Tracking.objects.filter(jid=result.id, percent=100).exists())
            return
        wait_until(lambda: Tracking.objects.filter(jid=result.id, percent=50).exists())
        assert not Mark.objects.exists()
