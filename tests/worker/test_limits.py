"""Test time limits, cancellation and progress with whole workers."""

import sys
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
from tests.waiting import wait_until
from tests.worker import limited
from tests.worker.blocking import gates, passes

IMPATIENT = MonitorLimits(ask_every_s=0.2, cancel_grace_s=30, stop_grace_s=30)


class WritesLate(OrmBroker):
    """A broker that blocks the progress thread at its first write, until the test sets `may_go_on`."""

    def __init__(self, alias):
        super().__init__(alias)
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def track_set(self, updates):
        if threading.current_thread().name == "faktory-progress" and not self.began.is_set():
            self.began.set()
            self.may_go_on.wait(20)
        super().track_set(updates)


def told(task, result):
    """Return the status of a job's result and its errors, as bare class names."""
    found = task.get_result(result.id)
    return found.status, [error.exception_class_path.rpartition(".")[2] for error in found.errors]


class TestTimeout:
    def test_a_function_is_stopped_and_its_retries_are_kept(self, work, state):
        work()
        result = limited.spins.enqueue("a")
        job = state(result, "retries")
        assert job.errtype == "TaskTimeout"
        assert "within its timeout of 0.2 s" in job.failure
        assert "_spin" in job.failure, "where it was"
        Job.objects.update(state="enqueued")
        assert state(result, "dead").failures == 2
        assert told(limited.spins, result) == (TaskResultStatus.FAILED, ["TaskTimeout"] * 2)

    def test_a_coroutine_is_cancelled(self, work, state):
        work()
        assert state(limited.waits_async.enqueue("a"), "retries").errtype == "TaskTimeout"

    @pytest.mark.parametrize("task", [limited.spins_and_catches, limited.cleans_up_badly])
    def test_what_a_function_catches_or_raises_meanwhile_does_not_hide_it(self, work, state, task):
        work()
        assert state(task.enqueue("a"), "retries").errtype == "TaskTimeout"

    def test_an_atomic_function_leaves_nothing(self, work, state):
        work()
        assert state(limited.spins_atomically.enqueue("a"), "retries").errtype == "TaskTimeout"
        assert not Mark.objects.exists()

    def test_the_thread_works_on_with_a_new_connection(self, work, state):
        work(concurrency=1)
        state(limited.spins_in_the_database.enqueue("a"), "retries")
        state(noop.enqueue(), "succeeded")
        gates["b"].opened.set()
        state(limited.spins_in_the_database.enqueue("b"), "succeeded")

    def test_who_ends_in_time_is_left_alone(self, work, state):
        work()
        state(limited.is_quick.enqueue(), "succeeded")
        state(limited.is_quick_async.enqueue(), "succeeded")

    @pytest.mark.skipif(
        sys.version_info < (3, 12) and sys.gettrace() is not None,
        reason="Python 3.11 under a tracer stands still while an interruption waits for its thread",
    )
    @pytest.mark.parametrize("task", [limited.sits_in_c, limited.ignores_its_timeout])
    def test_what_cannot_be_stopped_is_failed_and_the_process_ends_when_the_others_have(
        self, work, state, task, caplog
    ):
        running = work(limits=MonitorLimits(stop_grace_s=0.2))
        passing = passes.enqueue("other")
        assert gates["other"].begun.acquire(timeout=10)
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
        assert gates[name].begun.acquire(timeout=10)
        assert get_broker().cancel([result.id]) == 1
        return result

    @pytest.mark.parametrize("task", [limited.runs_for_ever, limited.runs_for_ever_async, limited.looks_at_its_context])
    def test_a_running_job_ends_as_discarded(self, work, state, task):
        result = self.cancelled(task, work)
        job = state(result, "discarded")
        assert job.errtype == "Cancelled"
        assert told(task, result) == (TaskResultStatus.FAILED, ["Cancelled"])

    def test_who_takes_the_context_and_does_not_look_is_stopped_after_a_grace(self, work, state):
        result = self.cancelled(limited.never_looks, work, limits=MonitorLimits(ask_every_s=0.2, cancel_grace_s=0.2))
        assert state(result, "discarded").errtype == "Cancelled"

    def test_who_does_its_work_and_never_looks_has_done_it(self, work, state):
        result = self.cancelled(limited.never_looks, work)
        gates["a"].opened.set()
        state(result, "succeeded")

    def test_a_failure_meanwhile_is_not_retried(self, work, state):
        result = self.cancelled(limited.fails_when_cancelled, work)
        assert state(result, "discarded").errtype == "builtins.ValueError"

    def test_short_jobs_ask_nobody(self, work, state):
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
    def test_the_latest_is_written_now_and_then_and_the_last_always(self, work, state):
        work()
        result = limited.tells_progress.enqueue("a")
        first = wait_until(lambda: Tracking.objects.filter(jid=result.id).first())
        assert (first.percent, first.desc) == (33, "begun")
        began_at = time.monotonic()
        gates["a"].opened.set()
        state(result, "succeeded")
        wait_until(lambda: Tracking.objects.get(jid=result.id).desc == "2000 of 2000")
        assert time.monotonic() - began_at < 10
        progress = limited.tells_progress.get_result(result.id).progress
        assert (progress.percent, progress.desc, progress.state) == (100, "2000 of 2000", "success")

    @pytest.mark.parametrize(
        "task", [limited.tells_progress, limited.tells_progress_async, limited.tells_progress_atomically]
    )
    def test_a_job_that_succeeded_shows_no_earlier_progress(self, work, state, task):
        """Check the progress when the job ends, although updates in quick succession are written a second apart."""
        work()
        result = task.enqueue("a")
        if not (task.atomic and connection.vendor == "sqlite"):  # there others wait for the transaction
            wait_until(lambda: Tracking.objects.filter(jid=result.id).exists())
        assert gates["a"].begun.acquire(timeout=10)
        gates["a"].opened.set()
        state(result, "succeeded")
        assert task.get_result(result.id).progress.desc == "2000 of 2000"

    def test_an_earlier_word_that_is_being_written_does_not_come_last(self, work, state):
        """The task's transaction writes the last progress. An earlier write that waited must not replace it."""
        broker = WritesLate("default")
        running = work(broker)
        result = limited.tells_progress_atomically.enqueue("a")
        assert gates["a"].begun.acquire(timeout=10)
        assert broker.began.wait(10)
        gates["a"].opened.set()
        state(result, "succeeded")
        assert limited.tells_progress_atomically.get_result(result.id).progress.percent == 100
        broker.may_go_on.set()
        running.stop()
        assert running.ended()
        assert limited.tells_progress_atomically.get_result(result.id).progress.percent == 100

    def test_the_last_is_written_when_the_worker_stops(self, work, state):
        running = work()
        result = limited.tells_progress.enqueue("a")
        assert gates["a"].begun.acquire(timeout=10)
        gates["a"].opened.set()
        state(result, "succeeded")
        running.stop()
        assert running.ended()
        assert Tracking.objects.get(jid=result.id).percent == 100

    def test_a_coroutine_tells_it_too(self, work):
        work()
        result = limited.tells_progress_async.enqueue("a")
        wait_until(lambda: Tracking.objects.filter(jid=result.id, percent=100).exists())

    def test_it_is_seen_before_an_atomic_task_commits(self, work):
        work()
        result = limited.tells_progress_atomically.enqueue("a")
        if connection.vendor == "sqlite":  # one writer at a time: others wait for the transaction
            gates["a"].opened.set()
            wait_until(lambda: Tracking.objects.filter(jid=result.id, percent=100).exists())
            return
        wait_until(lambda: Tracking.objects.filter(jid=result.id, percent=50).exists())
        assert not Mark.objects.exists()
