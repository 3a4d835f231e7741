"""Run jobs in threads: at most `concurrency` at a time, sync and async together (`ThreadPool`).

Does not call the broker itself. Each job ends exactly once, whatever its task does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from queue import SimpleQueue

from django.db import connections

from ..brokers.base import WorkerBroker
from ..core import payloads
from ..core.logs import get_logger
from ..core.payloads import LATER, Ack, Failure, Interruption, Reservation
from ..core.steps import Parking
from ..errors import CannotBegin, ConnectionLost, FaktoryError, WorkerTrouble
from ..store import sharing
from ..store.outages import of_this_node
from .async_runner import EventLoop
from .db_cleanup import JOB_THREAD, NO_ALIASES
from .execution import Execution, prepare
from .job_buffer import JobBuffer, Report
from .job_monitor import JobMonitor, MonitorLimits
from .progress import ProgressWriter
from .readiness import Readiness
from .suspects import has_often_met

logger = get_logger(__name__)

OUTAGES = (CannotBegin, ConnectionLost)
"""Errors that hit the jobs of a worker together."""

End = Report | BaseException | None
"""How a job ended: the report to send, the exception that broke it outside its task, or None if the broker has already
recorded the end.
"""


class ThreadPool:
    """`concurrency` threads, plus an event loop that the first async task starts."""

    def __init__(
        self,
        broker: WorkerBroker,
        buffer: JobBuffer,
        *,
        concurrency: int,
        on_stuck: Callable[[], None],
        on_end: Callable[[], None],
        limits: MonitorLimits,
    ) -> None:
        self._broker = broker
        self._on_stuck = on_stuck
        self._on_end = on_end
        self._monitor = JobMonitor(broker, give_up=self._give_up, limits=limits)
        self._monitor_thread = threading.Thread(target=self._monitor.run, name="faktory-watch-jobs", daemon=True)
        self._progress = ProgressWriter(broker)
        self._buffer = buffer
        self._readiness = Readiness(broker, buffer)
        self._interruption_reason = ""
        self._is_ending = threading.Event()
        self._free_slots: SimpleQueue[None] = SimpleQueue()  # a semaphore: threading.Semaphore costs ten times as much
        for _ in range(concurrency):
            self._free_slots.put(None)
        self._loop = EventLoop()
        self._threads = [
            threading.Thread(target=self._run, name=f"{JOB_THREAD}-{number}", daemon=True)
            for number in range(concurrency)
        ]

    def start(self) -> None:
        """Start the threads that run and monitor jobs."""
        self._monitor_thread.start()
        for thread in self._threads:
            thread.start()

    def write_progress(self, jids: Collection[str]) -> None:
        """Write the latest progress of these jobs, before their ends are reported."""
        self._progress.settle(jids)

    def end_walks(self) -> None:
        """Release jobs that walk rows behind their open chunks, as the process is about to end."""
        self._is_ending.set()

    def interrupt(self, reason: str) -> None:
        """Stop all running tasks, so that their jobs are released. Does not wait for them."""
        self._interruption_reason = reason
        self._readiness.close()
        self._monitor.interrupt(reason)

    def close(self, deadline: float) -> bool:
        """End the threads and the loop; return False if user code keeps one running at `deadline`.

        `deadline` is a time of the monotonic clock. The event loop gets at least 0.1 s and the two helper threads 0.5 s
        each, even after it.
        """
        self._readiness.close()
        self._buffer.end_threads(len(self._threads))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # After the threads: coroutines have had the same time to end.
        self._loop.cancel()
        has_ended = self._loop.close(max(0.1, deadline - time.monotonic()))
        self._monitor.close()
        self._monitor_thread.join(max(0.5, deadline - time.monotonic()))
        self._progress.close(max(0.5, deadline - time.monotonic()))
        return has_ended and not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        try:
            while True:
                self._free_slots.get()
                # First a slot, then the job: a job that was taken without a slot could not be released as not begun.
                job = self._buffer.take_next()
                if job is None:
                    self._free_slots.put(None)
                    return
                self._perform(job)
        finally:
            # Django allows only the thread that opened a connection to close it.
            connections.close_all()

    def _perform(self, job: Reservation) -> None:
        began_at = time.monotonic()
        while True:
            try:
                execution = prepare(job)
            except Exception as error:  # noqa: BLE001  (the thread must survive)
                self._finish_unbegun(job, error, began_at)
                return
            if not isinstance(execution, Execution):
                self._finish(job, execution, began_at)
                return
            if self._execute(execution, began_at):
                return

    def _finish_unbegun(self, job: Reservation, error: Exception, began_at: float) -> None:
        """Finish a job that the worker's own code could not begin.

        It is interrupted if the worker lacks something, such as a thread or a file to import, but not again and again:
        then the job may be the cause.
        """
        lacks_something = isinstance(error, ImportError | MemoryError | OSError | RuntimeError)
        if not lacks_something or has_often_met(job, CannotBegin):
            self._finish(job, error, began_at)
            return
        self._finish(job, payloads.trouble(job, CannotBegin(f"{type(error).__name__}: {error}")), began_at)
        self._readiness.pause()

    def _execute(self, execution: Execution, began_at: float) -> bool:
        """Run the job and finish it; return False, with nothing done, if it could not begin and may begin now."""
        control, job = execution.control, execution.reservation
        control.report_progress = partial(self._progress.report_progress, job)
        # Only an atomic task writes its progress in its own transaction.
        if execution.task.atomic:
            control.take_progress = partial(self._progress.take, job.jid)
        control.lock_token = job.lock_token
        control.is_ending = self._is_ending.is_set
        # A shared set: the task sees a lost lock without a query.
        control.lost_locks = self._buffer.lost_locks
        self._monitor.add(execution)
        # The thread takes the next job at once; `_finish` frees the slot when the coroutine ends.
        if execution.is_async:
            try:
                self._loop.submit(
                    job,
                    partial(execution.arun, self._broker),
                    lambda end: self._end_execution(execution, end, began_at),
                )
            except RuntimeError as error:  # it could not start its thread
                self._monitor.remove(execution)
                self._finish_unbegun(job, error, began_at)
            return True
        # A plain task would fail where it opens a connection; the transaction of an atomic task opens it.
        needs_connection = sharing.until[0] and sharing.is_needed() and not execution.task.atomic
        if needs_connection and not self._readiness.wait_with_job(began_at):
            self._end_execution(execution, payloads.trouble(job, CannotBegin("no database connection")), began_at)
            return True
        try:
            end: End = execution.run(self._broker, outer_aliases=NO_ALIASES)
        except Exception as error:  # noqa: BLE001  (the thread must survive)
            end = error
        if isinstance(end, Interruption) and _is_trouble(end, CannotBegin):
            self._monitor.remove(execution)
            if self._readiness.wait_with_job(began_at):
                return False
        self._end_execution(execution, end, began_at)
        return True

    def _end_execution(self, execution: Execution, end: End, began_at: float) -> None:
        self._monitor.remove(execution)
        self._finish(execution.reservation, end, began_at, execution)
        # The next job could not begin either.
        if isinstance(end, Interruption) and _is_trouble(end, *OUTAGES):
            wait = self._readiness.wait_without_job
            threading.Thread(target=wait, daemon=True).start() if execution.is_async else wait()

    def _give_up(self, execution: Execution, reason: FaktoryError) -> None:
        """Report a job that cannot be stopped; its thread stays occupied until the process ends."""
        job = execution.reservation
        if self._buffer.finish(
            job, execution.build_stuck_report(reason), ran_s=time.monotonic() - execution.control.began_at
        ):
            logger.error(
                "job does not end although it was stopped, this process will be replaced jid=%s jobtype=%s",
                *(job.jid, execution.task.jobtype),
            )
            self._on_stuck()

    def _finish(self, job: Reservation, end: End, began_at: float, execution: Execution | None = None) -> None:
        ran_s = time.monotonic() - began_at
        # A job that was given up is reported already: `finish` then returns False and this end is dropped.
        report = end if isinstance(end, Ack) else self._build_report(job, end)
        if self._buffer.finish(job, report, ran_s=ran_s):
            if isinstance(end, BaseException) and isinstance(report, Failure):
                logger.error("job ended outside its task jid=%s error=%r", job.jid, end, exc_info=end)
            # Checked here: the line must cost nothing if its level is disabled.
            if logger.isEnabledFor(logging.INFO):
                _log_end(job, report, execution, ran_s)
            self._on_end()
        self._free_slots.put(None)

    def _build_report(self, job: Reservation, end: End) -> Report | None:
        if isinstance(end, Interruption):
            if not isinstance(end, Parking):
                _log_interruption(job, end, self._broker)
            return end
        if self._interruption_reason and isinstance(end, asyncio.CancelledError):  # outside of its task's own code
            return build_interruption(job, self._interruption_reason, self._broker)
        return _build_failure(job, end) if isinstance(end, BaseException) else end


def _is_trouble(report: Interruption, *errors: type[WorkerTrouble]) -> bool:
    return report.errtype in [error.__name__ for error in errors]


def _log_end(job: Reservation, report: Report | None, execution: Execution | None, ran_s: float) -> None:
    """Log one line for a run that ended; none for a job that another worker has or that waits for newer code."""
    if outcome := _name_outcome(report, execution):
        jobtype = execution.task.jobtype if execution else job.jobtype
        where = (job.jid, jobtype, job.queue, ran_s)
        logger.info("job %s jid=%s jobtype=%s queue=%s seconds=%.3f", outcome, *where)


def _name_outcome(report: Report | None, execution: Execution | None) -> str:
    # By the report: after a task has succeeded, an error outside it can still make the broker record a failure.
    if isinstance(report, Ack):
        return "succeeded"
    if report is None:  # an atomic task has reported its end already
        return "succeeded" if execution is not None and execution.has_succeeded else ""
    if isinstance(report, Interruption):
        ended = report.summary if isinstance(report, Parking) else "interrupted"
        return "" if _is_trouble(report, *OUTAGES) else ended
    if report.verdict == LATER:
        return ""
    if report.verdict == "discard":
        return "cancelled" if execution is not None and execution.control.is_cancelled else "discarded"
    return "runs again" if execution is not None and execution.runs_again else "failed"


def build_interruption(job: Reservation, reason: str, broker: WorkerBroker) -> Interruption:
    """Log that the worker's stop interrupted this job and return its Interruption."""
    report = payloads.interruption(job, reason)
    _log_interruption(job, report, broker)
    return report


def _log_interruption(job: Reservation, report: Interruption, broker: WorkerBroker) -> None:
    if _is_trouble(report, *OUTAGES):
        # One line for all jobs of all processes: an outage hits them together.
        of_this_node.record_failure("jobs", report.message, released=1)
        return
    logger.warning(
        "job interrupted jid=%s jobtype=%s reason=%r; %s",
        job.jid,
        job.jobtype,
        report.summary,
        "it goes back to its queue, no attempt is used up" if broker.supports_interrupt else "it is reported as failed",
    )


def _build_failure(job: Reservation, error: BaseException) -> Failure:
    errtype = f"{type(error).__module__}.{type(error).__qualname__}"
    return payloads.failure_of(job, errtype=errtype, message=str(error))
