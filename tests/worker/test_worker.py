"""Run a worker from registration to its end, over a real database."""

import contextlib
import logging
import signal
import threading
from unittest import mock

import pytest
from django.db import connection
from django.test import override_settings
from msgspec import structs

from django_faktory.brokers.orm import OrmBroker
from django_faktory.errors import AuthenticationFailed, BrokerUnavailable, CommandRefused
from django_faktory.models import Job, WorkerProcess
from django_faktory.store import workers
from django_faktory.store.jobs import claims
from django_faktory.store.transactions import run
from django_faktory.worker.worker import Worker
from tests.factories import JobFactory
from tests.project import tasks
from tests.project.models import Mark
from tests.tracers import hangs_under_tracers
from tests.waiting import wait_until
from tests.worker.blocking import (
    BrokerWithoutInterrupt,
    Unreliable,
    cancels_itself,
    gates,
    ignores_cancellation,
    left,
    passes,
    passes_async,
    sleeps,
    writes_and_sleeps,
)

pytestmark = [pytest.mark.once, pytest.mark.django_db(transaction=True)]


def begun(name, times=1):
    for _ in range(times):
        assert gates[name].begun.acquire(timeout=60), "the task did not begin"


def listed(running):
    return WorkerProcess.objects.filter(wid=running.worker.wid).first()


class TestWork:
    @override_settings(FAKTORY={"UNKNOWN_JOBTYPE_GRACE": 0})
    def test_a_job_of_unknown_type_fails_and_the_next_job_runs(self, work, state):
        JobFactory(jid="unknown-1", jobtype="unknown.task")
        result = tasks.add.enqueue(1, 1)
        work()
        state(result, "succeeded")
        wait_until(lambda: Job.objects.get(jid="unknown-1").errtype == "UnknownJobType")

    def test_a_job_that_breaks_the_worker_code_fails_and_the_next_job_runs(self, work, state, caplog):
        class Garbled(OrmBroker):
            def fetch(self, requests):
                return [
                    [structs.replace(job, text=None) if "garbled" in job.text else job for job in jobs]
                    for jobs in super().fetch(requests)
                ]

        garbled, result = tasks.echo.enqueue("garbled"), tasks.add.enqueue(1, 1)
        work(Garbled("default"))
        state(result, "succeeded")
        state(garbled, "retries")
        assert "ended outside its task" in caplog.text

    def test_an_async_task_that_cancels_itself_fails(self, work, state):
        result = cancels_itself.enqueue()
        work()
        assert "Cancelled" in state(result, "retries").errtype

    def test_threads_and_the_event_loop_share_the_concurrency_limit(self, work, state):
        for _ in range(2):
            tasks.noop.enqueue()
        results = [passes_async.enqueue("gate"), passes_async.enqueue("gate"), passes.enqueue("gate")]
        work(concurrency=2)
        begun("gate", 2)
        assert not gates["gate"].begun.acquire(timeout=0.3)
        gates["gate"].opened.set()
        for result in results:
            state(result, "succeeded")

    def test_a_long_first_job_does_not_keep_the_other_threads_idle(self, work, state):
        first = passes.enqueue("long")
        work(concurrency=2)
        begun("long")
        state(tasks.noop.enqueue(), "succeeded")
        gates["long"].opened.set()
        state(first, "succeeded")

    def test_queues_are_served_in_their_order(self, work, state):
        first = passes.enqueue("first")
        low, high = passes.using(queue_name="low").enqueue("low"), passes.using(queue_name="high").enqueue("high")
        work(queues=["default", "high", "low"], concurrency=1)
        begun("first")
        gates["first"].opened.set()
        begun("high")
        assert Job.objects.get(jid=low.id).state == "enqueued"
        gates["high"].opened.set()
        gates["low"].opened.set()
        for result in (first, low, high):
            state(result, "succeeded")

    def test_all_of_many_fast_jobs_are_executed(self, work):
        results = tasks.add.enqueue_many([(number, 0) for number in range(300)])
        work(concurrency=3)
        wait_until(lambda: Job.objects.filter(state="succeeded").count() == len(results))
        assert {job.claims for job in Job.objects.all()} <= {1, 2}  # 2: read ahead, released, fetched again

    def test_prefetched_jobs_are_released_if_no_thread_starts_them(self, work):
        """Another worker may be idle, so it must get them."""
        tasks.noop.enqueue_many([()] * 200)
        running = work(concurrency=1)
        wait_until(lambda: not Job.objects.exclude(state="succeeded").exists())
        passes.enqueue_many([("slow",)] * 5)
        begun("slow")
        wait_until(lambda: Job.objects.filter(state="enqueued").count() == 4)
        assert listed(running)


class TestOrders:
    def test_a_worker_registers_sends_heartbeats_and_unregisters(self, work):
        running = work(queues=["default:2", "mail"])
        process = wait_until(lambda: WorkerProcess.objects.filter(beat_at__isnull=False).first())
        assert (process.wid, process.labels) == (running.worker.wid, ["python", "django"])
        assert process.rss_kb > 1000
        assert (process.queues, process.threads) == (["default", "mail"], 2)
        running.stop()
        assert running.ended()
        assert listed(running) is None

    def test_quiet_by_signal_is_permanent_and_reported_to_the_broker(self, work):
        running = work()
        wait_until(lambda: listed(running))
        running.worker.quiet()
        running.worker.quiet()
        wait_until(lambda: listed(running).state == "quiet")
        result = tasks.noop.enqueue()
        running.stop()
        assert running.ended()
        assert Job.objects.get(jid=result.id).state == "enqueued"

    def test_an_external_quiet_order_allows_running_jobs_to_finish(self, work, state):
        """Check the order "quiet" (W15)."""
        result = passes.enqueue("quiet")
        running = work()
        begun("quiet")
        workers.advance([running.worker.wid], "quiet", using="default")
        wait_until(lambda: running.worker._is_quiet)
        gates["quiet"].opened.set()
        state(result, "succeeded")
        assert listed(running).state == "quiet"

    def test_an_external_terminate_order_ends_the_worker(self, work):
        """Check the order "terminate" (W21)."""
        running = work()
        wait_until(lambda: listed(running))
        workers.advance([running.worker.wid], "terminate", using="default")
        assert running.ended()
        assert listed(running) is None

    def test_a_worker_declared_lost_finishes_its_job_and_ends(self, work, state, caplog):
        """Check W20: other workers have its jobs, so it neither fetches nor registers its wid again."""
        caplog.set_level(logging.INFO, "django_faktory")
        passes.enqueue("lost")
        running = work(concurrency=1, max_prefetch=0)  # it has no room until it learns that it is lost
        begun("lost")
        OrmBroker("default").lost([running.worker.wid])
        wait_until(lambda: "worker stops" in caplog.text)
        assert "worker counts as lost" in caplog.text
        gates["lost"].opened.set()
        assert running.ended()
        assert "came too late" in caplog.text
        assert Job.objects.get().state == "enqueued"


class TestStopping:
    def test_running_jobs_finish_during_shutdown(self, work):
        result = passes.enqueue("running")
        running = work()
        begun("running")
        running.stop()
        wait_until(lambda: listed(running).state == "terminate")
        gates["running"].opened.set()
        assert running.ended()
        assert running.has_ended_well is True
        assert Job.objects.get(jid=result.id).state == "succeeded"

    @pytest.mark.parametrize(
        ("task", "ends"),
        [
            pytest.param(passes, False, marks=hangs_under_tracers),
            (sleeps, True),
            (passes_async, True),
            (ignores_cancellation, False),
        ],
    )
    def test_a_job_past_the_shutdown_timeout_is_requeued_without_a_failure(self, work, caplog, task, ends):
        """Check this for tasks that can be interrupted and for others."""
        result = task.enqueue("stuck")
        running = work(shutdown_timeout=0.2)
        begun("stuck")
        running.stop()
        assert running.ended()
        assert running.has_ended_well is ends
        job = Job.objects.get(jid=result.id)
        assert (job.state, job.errtype, job.failures, job.losses, job.interruptions) == ("enqueued", "", 0, 0, 1)
        assert f"job interrupted jid={result.id}" in caplog.text
        work()
        begun("stuck")
        gates["stuck"].opened.set()
        wait_until(lambda: Job.objects.get(jid=result.id).state == "succeeded")
        found = task.get_result(result.id)
        assert (found.attempts, found.errors) == (1, [])

    def test_an_interrupted_task_ends_before_its_job_is_released(self, work):
        """Otherwise both runs would overlap for a moment."""
        result = sleeps.enqueue("left")
        running = work(shutdown_timeout=0.1)
        begun("left")
        running.stop()
        wait_until(lambda: Job.objects.get(jid=result.id).state == "enqueued")
        assert left == ["left"]
        assert running.ended()

    def test_an_interrupted_atomic_task_is_rolled_back_and_requeued(self, work):
        result = writes_and_sleeps.enqueue("rolled back")
        running = work(shutdown_timeout=0.1)
        begun("rolled back")
        running.stop()
        assert running.ended()
        assert not Mark.objects.exists()
        assert Job.objects.get(jid=result.id).state == "enqueued"
        gates["rolled back"].opened.set()
        work()
        wait_until(lambda: Job.objects.get(jid=result.id).state == "succeeded")
        assert Mark.objects.count() == 1

    def test_an_interruption_report_is_retried_while_the_broker_is_unavailable(self, work):
        broker = Unreliable()
        result = sleeps.enqueue("later")
        running = work(broker, shutdown_timeout=0.1)
        begun("later")
        broker.unavailable = {"interrupt"}
        running.stop()
        wait_until(lambda: broker.tried.count("interrupt") >= 2)
        broker.unavailable = set()
        assert running.ended()
        assert (Job.objects.get(jid=result.id).state, Job.objects.get(jid=result.id).interruptions) == ("enqueued", 1)

    def test_interrupted_jobs_are_failed_if_the_broker_cannot_requeue_them(self, work, caplog):
        result = sleeps.enqueue("failed")
        running = work(BrokerWithoutInterrupt("default"), shutdown_timeout=0.1)
        begun("failed")
        running.stop()
        assert running.ended()
        job = Job.objects.get(jid=result.id)
        assert (job.state, job.errtype, job.failures) == ("retries", "WorkerShutdown", 1)
        assert "it is reported as failed" in caplog.text

    def test_prefetched_jobs_are_requeued_at_shutdown(self, work):
        tasks.noop.enqueue_many([()] * 100)
        running = work(concurrency=1)
        wait_until(lambda: not Job.objects.exclude(state="succeeded").exists())
        passes.enqueue_many([("last",)] * 5)
        begun("last")
        running.stop()
        gates["last"].opened.set()
        assert running.ended()
        left = Job.objects.exclude(state="succeeded")
        assert set(left.values_list("state", "wid")) <= {("enqueued", "")}

    def test_jobs_that_could_not_be_released_are_requeued_at_unregistration(self, work):
        broker = Unreliable()
        tasks.noop.enqueue_many([()] * 100)
        running = work(broker, concurrency=1)
        wait_until(lambda: not Job.objects.exclude(state="succeeded").exists())
        broker.unavailable = {"release"}
        passes.enqueue_many([("last",)] * 5)
        begun("last")
        running.stop()
        wait_until(lambda: "release" in broker.tried)
        gates["last"].opened.set()
        assert running.ended()
        assert set(Job.objects.exclude(state="succeeded").values_list("state", "wid")) <= {("enqueued", "")}

    def test_a_signal_that_does_not_wake_the_main_thread_is_still_handled(self):
        """Python handles the signal later, like one that arrives just before the thread goes to sleep."""
        worker = Worker(OrmBroker("default"), queues=["default"], concurrency=1)
        rescue = threading.Timer(15, worker.stop)

        def signal_another_thread():
            with contextlib.closing(connection):
                wait_until(lambda: WorkerProcess.objects.filter(wid=worker.wid).exists())
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, lambda *_: worker.stop())
        another = threading.Thread(target=signal_another_thread)
        another.start()
        rescue.start()
        try:
            assert worker.run()
            assert rescue.is_alive(), "the signal was not noticed"
        finally:
            rescue.cancel()
            another.join()
            signal.signal(signal.SIGUSR1, before)


class SlowToTake(OrmBroker):
    """Delay each report for 1 s, or until the worker unregisters."""

    def __init__(self):
        super().__init__("default")
        self.has_gone = threading.Event()
        self.came_after = []

    def ack(self, acks):
        if self.has_gone.wait(1.0):
            self.came_after += [ack.jid for ack in acks]
        return super().ack(acks)

    def bye(self, wids):
        self.has_gone.set()
        super().bye(wids)


class TestReports:
    @pytest.mark.parametrize("drain", [True, False], ids=["drained", "stopped"])
    def test_reports_of_ended_jobs_are_sent_before_the_worker_unregisters(self, work, drain):
        broker = SlowToTake()
        passes.enqueue("gate")
        running = work(broker, drain=drain, flush_s=0.01)
        begun("gate")
        gates["gate"].opened.set()
        if not drain:
            running.stop()
        assert running.ended()
        assert broker.came_after == []
        assert Job.objects.get().state == "succeeded"

    def test_reports_that_miss_the_shutdown_timeout_are_logged(self, work, caplog):
        broker = SlowToTake()
        passes.enqueue("gate")
        running = work(broker, shutdown_timeout=0.0, flush_s=0.01)
        begun("gate")
        gates["gate"].opened.set()
        wait_until(running.worker._buffer.is_empty)
        running.stop()
        assert running.ended()
        assert "jobs ended and could not be reported in time" in caplog.text


class LosesAnswers(OrmBroker):
    """Execute two fetches and lose their replies."""

    def __init__(self):
        super().__init__("default")
        self.lost = []

    def fetch(self, requests):
        with mock.patch.object(claims, "run", self._run):
            return super().fetch(requests)

    def _run(self, *args, **kwargs):
        found = run(*args, **kwargs)
        if found and len(self.lost) < 2:
            self.lost += [job.jid for job in found]
            raise BrokerUnavailable("the connection broke")
        return found


class TestOutages:
    def test_jobs_reserved_by_a_lost_fetch_reply_are_released_and_run(self, work, state):
        """Check W14: while its wid is alive, only the worker itself can release the jobs before they expire."""
        broker = LosesAnswers()
        first = passes.enqueue("first")
        work(broker, poll_interval=0.05)
        begun("first")
        second = passes.enqueue("second")
        begun("second")
        gates["first"].opened.set()
        gates["second"].opened.set()
        for result in (first, second):
            state(result, "succeeded")
        assert set(broker.lost) <= {first.id, second.id}

    def test_reports_are_kept_until_the_broker_is_available(self, work, state):
        broker = Unreliable()
        broker.unavailable = {"ack", "fail"}
        results = [tasks.noop.enqueue(), tasks.fails.enqueue()]
        work(broker)
        wait_until(lambda: broker.tried.count("ack") > 1 and broker.tried.count("fail") > 1)
        broker.unavailable = set()
        state(results[0], "succeeded")
        state(results[1], "retries")

    @pytest.mark.parametrize("verb", ["hello", "fetch"])
    def test_a_worker_waits_for_a_broker_that_is_unavailable(self, work, state, verb):
        broker = Unreliable()
        broker.unavailable = {verb}
        result = tasks.noop.enqueue()
        work(broker)
        wait_until(lambda: broker.tried.count(verb) > 1)
        broker.unavailable = set()
        state(result, "succeeded")

    def test_a_worker_without_acknowledged_heartbeats_does_not_fetch(self, work, state):
        """Its wid may have been given up (W20), and the heartbeat of an unknown wid is not missed."""
        broker = Unreliable()
        broker.unavailable = {"beat"}
        result = tasks.noop.enqueue()
        work(broker)
        wait_until(lambda: broker.tried.count("beat") > 3)
        assert "fetch" not in broker.tried
        broker.unavailable = set()
        state(result, "succeeded")

    def test_quiet_is_kept_while_the_broker_is_unavailable_at_startup(self, work):
        broker = Unreliable()
        broker.unavailable = {"hello"}
        running = work(broker)
        wait_until(lambda: broker.tried)
        running.worker.quiet()
        wait_until(lambda: running.worker._is_quiet)
        broker.unavailable = set()
        wait_until(lambda: (process := listed(running)) and process.state == "quiet")

    def test_a_worker_can_stop_while_the_broker_is_unavailable_at_startup(self, work):
        broker = Unreliable()
        broker.unavailable = {"hello"}
        running = work(broker)
        wait_until(lambda: broker.tried)
        running.stop()
        assert running.ended(5)
        assert running.has_ended_well is True

    def test_an_authentication_failure_ends_the_worker_with_its_error(self, work):
        class Locked(OrmBroker):
            def hello(self, worker):
                raise AuthenticationFailed("the server refused HELLO: Invalid password")

        running = work(Locked("default"))
        assert running.ended()
        assert isinstance(running.error, AuthenticationFailed)

    @pytest.mark.slow
    def test_jobs_that_cannot_be_reported_at_shutdown_are_logged_by_jid(self, work, caplog):
        broker = Unreliable()
        broker.unavailable = {"ack", "bye"}
        result = tasks.noop.enqueue()
        running = work(broker)
        wait_until(lambda: "ack" in broker.tried)
        running.stop()
        assert running.ended()
        assert any(result.id in record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
        assert "could not unregister the worker" in caplog.text

    def test_unexpected_errors_do_not_stop_the_worker_loops(self, work, state, caplog):
        class Buggy(OrmBroker):
            fetched = threading.Event()
            beaten = threading.Event()

            def fetch(self, requests):
                if not self.fetched.is_set():
                    self.fetched.set()
                    raise RuntimeError("a bug in fetch")
                return super().fetch(requests)

            def beat(self, beats):
                if not self.beaten.is_set():
                    self.beaten.set()
                    raise RuntimeError("a bug in beat")
                return super().beat(beats)

        result = tasks.noop.enqueue()
        running = work(Buggy("default"))
        state(result, "succeeded")
        wait_until(lambda: (process := listed(running)) and process.beat_at)
        assert "a bug in fetch" in caplog.text
        assert "a bug in beat" in caplog.text

    def test_a_rejected_heartbeat_is_logged_and_the_worker_continues(self, work, state, caplog):
        class Refusing(OrmBroker):
            def beat(self, beats):
                return [CommandRefused("not today") for _ in beats]

        work(Refusing("default"))
        wait_until(lambda: "not today" in caplog.text)
        state(tasks.noop.enqueue(), "succeeded")

    def test_a_worker_ends_if_one_of_its_loops_breaks(self, work, caplog):
        def listen():
            raise RuntimeError("cannot listen")

        running = work(listen=listen)
        assert running.ended()
        assert "a loop of the worker broke" in caplog.text
