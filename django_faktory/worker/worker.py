"""One worker process from its registration to its unregistration (`Worker`).

Threads: one fetches, `concurrency` run jobs, one monitors timeouts, one reports, one sends BEATs, one renews
locks; the thread that calls `run` acts on orders. Sources: the protocol's worker lifecycle, W15, W20, W21;
`docs/workers.md`. Independent of SQL, FWP and retry rules.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from queue import Empty, SimpleQueue

from ..brokers.base import WorkerBroker
from ..core.logs import get_logger
from ..core.payloads import WorkerIdentity
from ..errors import BrokerUnavailable, FaktoryError
from ..store.notifier import Listener
from . import interrupt, job_log
from .fetcher import Fetcher
from .heartbeat import LOST, QUIET, TERMINATE, Heartbeat
from .job_buffer import JobBuffer
from .job_monitor import DEFAULT_MONITOR_LIMITS, MonitorLimits
from .lock_renewal import LockRenewer
from .outage_pause import OutagePause
from .process import CLEAN, CRASHED, RECYCLE, new_wid
from .queue_order import QueueOrder
from .recycling import RecyclePolicy
from .reporter import Reporter
from .suspects import DEFAULT_SUSPECT_LIMITS, SuspectLimits
from .thread_pool import ThreadPool, build_interruption

logger = get_logger(__name__)

MAX_PREFETCH = 50
"""Maximum number of prefetched jobs, however fast they are. Empty jobs per second with 5 threads on PostgreSQL, two
cores: 3,700 without prefetch, 6,000 with 25, 7,900 with 50, 7,500 with 100. None with a `blocking` broker: it
takes no jobs back, so no job may wait here for a thread.
"""

FLUSH_S = 2.0
"""Seconds for the last reports, after the time for running jobs is over."""

INTERRUPT_S = 0.5
"""Seconds that tasks get to end after an interruption. Tasks that wait in C code run until the process ends."""

DRAINED, STUCK, REPLACE = "drained", "stuck", "replace"
"""Orders from threads of this process. `heartbeat` defines the orders of the broker."""

SIGNAL_CHECK_S = 0.5
"""Longest sleep of the main thread. Python runs signal handlers between two bytecodes, so a signal that arrives just
before the sleep, or in another thread, is handled only after the sleep.
"""

LEAVING_CHECK_S = 0.05
"""Interval at which a worker that is about to be replaced checks whether all its jobs are reported."""

REPORTED_CHARACTERS = 2000
"""Maximum length of the queue names in HELLO, whose line has at most 4 KiB."""


class Worker:
    """Run the jobs of `queues`, `concurrency` at a time, until stopped. `run` may be called once.

    A wid that counts as lost, because the process was suspended for too long, is not used again: other workers have its
    jobs. The worker finishes its running jobs and ends; its supervisor starts another one.

    `queue_limits` maps queues to the number of their jobs that this worker has at a time. `recycle_policy` bounds the
    work of the process; None means no bound. `has_signal_thread`: a thread handles signals (`install_signals`), so that
    the main thread need not wake up for them.
    """

    is_stuck: bool
    """True once a job that cannot be stopped occupies a thread: the process ends when its other jobs have ended."""
    is_recycled: bool
    """True once the bound of `recycle_policy` is reached: the process ends after its jobs, and is replaced."""

    def __init__(
        self,
        broker: WorkerBroker,
        *,
        queues: Sequence[str],
        concurrency: int = 5,
        wid: str | None = None,
        listen: Callable[[], Listener] | None = None,
        poll_interval: float = 1.0,
        beat_interval: float = 15.0,
        shutdown_timeout: float = 25.0,
        flush_s: float = FLUSH_S,
        max_prefetch: int = MAX_PREFETCH,
        drain: bool = False,
        limits: MonitorLimits = DEFAULT_MONITOR_LIMITS,
        suspect_limits: SuspectLimits = DEFAULT_SUSPECT_LIMITS,
        queue_limits: Mapping[str, int] | None = None,
        recycle_policy: RecyclePolicy | None = None,
        has_signal_thread: bool = False,
    ) -> None:
        # The supervisor chooses the wid of its children, to report it as lost if the process dies.
        self.wid = wid or new_wid()
        self._broker = broker
        self._order, self._concurrency = QueueOrder(queues), concurrency
        self._shutdown_timeout_s, self._flush_s = shutdown_timeout, flush_s
        self._has_signal_thread = has_signal_thread
        self._orders: SimpleQueue[str] = SimpleQueue()
        self._is_quiet = self._is_running = False
        self.is_stuck = self.is_recycled = False
        self._recycle_policy = recycle_policy or RecyclePolicy()
        self._buffer = JobBuffer(concurrency=concurrency, max_prefetch=0 if broker.blocking else max_prefetch)
        on_order, on_stuck = self._orders.put, partial(self._orders.put, STUCK)
        self._thread_pool = ThreadPool(
            broker, self._buffer, concurrency=concurrency, on_stuck=on_stuck, on_end=self._count_job, limits=limits
        )
        self._heartbeat = Heartbeat(
            broker, wid=self.wid, interval_s=beat_interval, on_order=on_order, held_attempts=self._buffer.held_attempts
        )
        self._fetcher = self._make_fetcher(
            listen=listen,
            poll_interval_s=poll_interval,
            drain=drain,
            queue_limits=queue_limits or {},
            suspect_limits=suspect_limits,
        )
        self._reporter = self._make_reporter()
        self._lock_renewer = LockRenewer(broker, self._buffer)
        self._loops = self._make_threads()

    def _make_fetcher(
        self,
        *,
        listen: Callable[[], Listener] | None,
        poll_interval_s: float,
        drain: bool,
        queue_limits: Mapping[str, int],
        suspect_limits: SuspectLimits,
    ) -> Fetcher:
        return Fetcher(
            self._broker,
            self._buffer,
            wid=self.wid,
            order=self._order,
            listen=listen,
            poll_interval_s=poll_interval_s,
            may_fetch=self._may_fetch,
            on_drained=(lambda: self._orders.put(DRAINED)) if drain else None,
            queue_limits=queue_limits,
            is_reported=self._is_reported,
            suspect_limits=suspect_limits,
        )

    def _make_reporter(self) -> Reporter:
        return Reporter(
            self._broker,
            self._buffer.finished,
            more_soon=self._buffer.has_waiting,
            acknowledge=self._fetcher.acknowledge,
            write_progress=self._thread_pool.write_progress,
            on_reported=self._buffer.forget_reports,
        )

    def _make_threads(self) -> dict[str, threading.Thread]:
        loops = {
            "fetch": self._fetcher, "report": self._reporter, "beat": self._heartbeat, "locks": self._lock_renewer
        }  # fmt: skip
        return {
            name: threading.Thread(target=self._run_loop, args=(loop,), name=f"faktory-{name}", daemon=True)
            for name, loop in loops.items()
        }

    def stop(self) -> None:
        """Stop as SIGTERM does. Safe from any thread and from a signal handler."""
        self._orders.put(TERMINATE)  # SimpleQueue.put is reentrant; an Event's lock is not

    def quiet(self) -> None:
        """Stop fetching for good; running jobs continue. Safe from any thread and from a signal handler."""
        self._orders.put(QUIET)

    def wake(self) -> None:
        """Fetch at once, because a job has just become ready. Safe from any thread."""
        self._fetcher.wake()

    def broken_loops(self) -> list[str]:
        """Return the names of loops that ended although the worker runs. Safe from any thread."""
        if not self._is_running:
            return []
        # A quiet worker has ended its fetch loop itself.
        return [name for name, thread in self._loops.items() if not thread.is_alive() and not self._is_quiet]

    def has_recent_beat(self) -> bool:
        """Return whether the broker has recently answered a BEAT of this worker. Safe from any thread."""
        return self._heartbeat.is_fresh()

    def exit_code(self) -> int:
        """Return the exit code of the process: CRASHED if stuck, RECYCLE if recycled, else CLEAN.

        A stuck or recycled process is replaced, even during a drain.
        """
        if self.is_stuck:
            return CRASHED
        return RECYCLE if self.is_recycled else CLEAN

    def run(self) -> bool:
        """Work until stopped, stuck or recycled. Returns False if user code keeps a thread running.

        Raises FaktoryError if the broker refuses this worker, such as for a wrong password or address.
        """
        if not self._register():
            return True
        if self._broker.keeps_results:  # other brokers cannot store the lines of a job
            job_log.install()
        interrupt.install()
        self._recycle_policy.begin()
        self._thread_pool.start()
        for thread in self._loops.values():
            thread.start()
        self._is_running = True
        # QUIET may have come during the registration.
        if self._is_quiet:
            self._become_quiet()
        while (order := self._next_order()) in (QUIET, STUCK, REPLACE):
            self.is_stuck |= order == STUCK
            self.is_recycled |= order == REPLACE
            if not self._is_quiet:
                self._become_quiet()
            if self._is_leaving():
                self._thread_pool.end_walks()
        if order == LOST:
            logger.error("worker counts as lost, other workers have its jobs: ending wid=%s", self.wid)
        return self._shut_down()

    def _next_order(self) -> str:
        while not (self._is_leaving() and self._has_no_work()):
            with suppress(Empty):
                check_s = None if self._has_signal_thread else SIGNAL_CHECK_S
                return self._orders.get(timeout=LEAVING_CHECK_S if self._is_leaving() else check_s)
        return TERMINATE

    def _is_leaving(self) -> bool:
        return self.is_stuck or self.is_recycled

    def _has_no_work(self) -> bool:
        """Return whether no job is here or can arrive, and the broker has recorded every end.

        A worker that leaves without an order has no deadline, so it waits for all of this.
        """
        is_reported = self._buffer.is_empty() and self._is_reported()
        return not self._loops["fetch"].is_alive() and is_reported

    def _is_reported(self) -> bool:
        # Interruptions of `_release_running` are sent without being counted, so there may be more.
        return self._reporter.settled_count >= self._buffer.report_count

    def _may_fetch(self) -> bool:
        """Return whether to claim jobs: not while their ends could not be reported, nor with a wid that may be lost."""
        unreported = self._buffer.report_count - self._reporter.settled_count
        return self._heartbeat.is_fresh() and (unreported <= self._concurrency or not self._reporter.is_late())

    def _count_job(self) -> None:
        """Count an ended job and order the replacement of this process if a bound of the recycle policy is reached."""
        if reason := self._recycle_policy.count_job():
            logger.info("worker will be replaced reason=%s wid=%s pid=%d", reason, self.wid, os.getpid())
            self._orders.put(REPLACE)

    def _register(self) -> bool:
        """Register, retrying while the broker is unavailable; return False if stopped before.

        Sends the first BEAT before any job is fetched: a wid without a BEAT is never counted as lost (W20).
        """
        identity = WorkerIdentity(
            wid=self.wid,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            labels=("python", "django"),
            queues=_first_that_fit(self._order.names),
            threads=self._concurrency,
        )
        outage_pause = OutagePause("hello")
        while True:
            try:
                self._broker.hello(identity)
                break
            except BrokerUnavailable as error:
                pause_s = outage_pause.record_failure(error)
            with suppress(Empty):
                if self._orders.get(timeout=pause_s) == TERMINATE:
                    return False
                # QUIET: the threads that send the other orders are not started yet.
                self._is_quiet = True
        outage_pause.record_success()
        self._heartbeat.beat()
        # The loops run in threads with connections of their own.
        self._broker.close()
        logger.info("worker started wid=%s pid=%d", self.wid, identity.pid)
        return True

    def _run_loop(self, loop: Fetcher | Reporter | Heartbeat | LockRenewer) -> None:
        """Run a loop as the target of a thread. If it raises, end the worker.

        A worker that lost one of its loops must not look alive.
        """
        try:
            loop.run()
        except Exception:
            logger.exception("a loop of the worker broke, ending wid=%s loop=%s", self.wid, type(loop).__name__)
            self._orders.put(TERMINATE)

    def _become_quiet(self) -> None:
        self._is_quiet = True
        logger.info("worker is quiet wid=%s", self.wid)
        self._heartbeat.set_state(QUIET)
        self._fetcher.stop()

    def _shut_down(self) -> bool:
        """Stop fetching, wait for running jobs, interrupt them, report, unregister, in this order.

        A job that is released may start elsewhere at once. Its task is interrupted before that, and the process ends
        soon after for tasks that cannot be interrupted.
        """
        deadline = time.monotonic() + self._shutdown_timeout_s
        # From here on loops end as intended, and probes must not report them.
        self._is_running = False
        # BEATs continue until all reports are sent: the worker must not count as lost before that.
        self._heartbeat.set_state(TERMINATE)
        self._fetcher.stop()
        self._thread_pool.end_walks()
        logger.info("worker stops wid=%s", self.wid)
        # A running fetch may still return jobs: the wait for running jobs must include them.
        self._loops["fetch"].join(self._shutdown_timeout_s)
        if not self._buffer.wait_empty(deadline - time.monotonic()):
            self._thread_pool.interrupt(self._interruption_reason())
            self._buffer.wait_empty(INTERRUPT_S)
        # Threads that the interruption did not reach will not end: keep the remaining time for the reports.
        has_ended = self._thread_pool.close(time.monotonic() + (0.5 if self._buffer.is_empty() else 0.1))
        self._release_running()
        are_reports_sent = self._flush(max(deadline, time.monotonic()) + self._flush_s)
        # Only now: until here the worker may have jobs, and their locks must not expire.
        self._heartbeat.stop()
        self._lock_renewer.stop()
        if are_reports_sent:
            self._loops["locks"].join(0.5)
            self._loops["beat"].join(0.5)
            self._unregister()
        logger.info("worker stopped wid=%s", self.wid)
        return has_ended

    def _flush(self, deadline: float) -> bool:
        """Wait until the reports are sent, or until `deadline`. Jobs that ended early leave it more time.

        Returns False if they could not be sent: unregistering would fail too, after a timeout.
        """
        report_thread = self._loops["report"]
        self._reporter.close(deadline)
        # The loop ends at `deadline` itself; the extra 0.5 s is for a running call of the broker.
        report_thread.join(max(0.0, deadline - time.monotonic()) + 0.5)
        if report_thread.is_alive():
            logger.error(
                "jobs ended and could not be reported in time: they may run again wid=%s jobs=%d at least",
                self.wid,
                1 + self._buffer.finished.qsize(),
            )
        return not report_thread.is_alive()

    def _interruption_reason(self) -> str:
        return f"the worker stopped, and the job did not end within {self._shutdown_timeout_s:g} s"

    def _release_running(self) -> None:
        """Report interruptions for jobs that did not end. Their later reports are dropped."""
        for job in self._buffer.abandon():
            self._buffer.finished.put(build_interruption(job, self._interruption_reason(), self._broker))

    def _unregister(self) -> None:
        try:
            self._broker.bye([self.wid])
        except FaktoryError as error:
            logger.warning("could not unregister the worker, it will count as lost wid=%s error=%s", self.wid, error)
        with suppress(FaktoryError):
            self._broker.close()


def _first_that_fit(queues: Sequence[str]) -> tuple[str, ...]:
    """Return the first of these names, as many as one HELLO can report."""
    lengths = accumulate(len(name) + 3 for name in queues)  # with two quotes and a comma, as in JSON
    return tuple(name for name, length in zip(queues, lengths, strict=True) if length <= REPORTED_CHARACTERS)
