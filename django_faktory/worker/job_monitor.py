"""Monitor running jobs: stop them after timeouts and cancellations, give up stuck ones (`JobMonitor`).

One thread, which sleeps until an action is due. `interrupt` implements the stop itself. Rules: `docs/tasks.md`, "Time
limits".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ..brokers.base import WorkerBroker
from ..core.logs import get_logger
from ..errors import Cancelled, FaktoryError, WorkerShutdown
from .execution import Execution
from .interrupt import build_timeout_error
from .outage_pause import OutagePause

logger = get_logger(__name__)


class MonitorLimits(NamedTuple):
    """Time limits of the monitor, in seconds."""

    query_every_s: float = 2.0
    """Interval of the query for cancelled jobs. It leaves out jobs that have run for less than half of this time."""
    cancel_grace_s: float = 10.0
    """Time for a function that takes the context to see its cancellation before it is stopped."""
    stop_grace_s: float = 5.0
    """Time for a stopped task to end. After that it is stuck, and its process is replaced."""


DEFAULT_MONITOR_LIMITS = MonitorLimits()
"""The limits of a worker in production; tests use shorter ones."""

SHORTEST_PAUSE_S = 0.05
"""Pause while a due action is not possible, because the job's thread is not in its task at that moment."""

DROPPED_CHECK_S = 0.2
"""Interval of checks whether Python has dropped the interruption of a stopped job."""


class JobMonitor:
    """Monitor of one worker process. `give_up` is called once for each stuck job."""

    def __init__(
        self,
        broker: WorkerBroker,
        *,
        give_up: Callable[[Execution, FaktoryError], None],
        limits: MonitorLimits = DEFAULT_MONITOR_LIMITS,
    ) -> None:
        self._broker = broker
        self._give_up = give_up
        self._limits = limits
        self._running: dict[int, Execution] = {}
        self._queried_at = time.monotonic()
        self._has_connection = False
        self._outage_pause = OutagePause("cancelled")
        self._due = threading.Event()
        self._is_used = False
        self._is_asleep = False
        self._is_closed = False

    def add(self, execution: Execution) -> None:
        """Start to monitor this job. Safe from any thread."""
        # Keyed by id(): a worker may have two attempts of one jid.
        self._running[id(execution)] = execution
        self._is_used = True
        # While it is awake it finds the job within `query_every_s`; only a timeout may be due sooner.
        if self._is_asleep or execution.control.timeout_s is not None:
            self._due.set()

    def remove(self, execution: Execution) -> None:
        """Stop monitoring this job. Safe from any thread."""
        self._running.pop(id(execution), None)

    def interrupt(self, reason: str) -> None:
        """Stop all running jobs with WorkerShutdown, since their worker stops."""
        # A copy: threads remove jobs that end meanwhile.
        for execution in list(self._running.values()):
            execution.control.stop(WorkerShutdown(reason))

    def close(self) -> None:
        """End the loop; does not wait for it."""
        self._is_closed = True
        self._due.set()

    def run(self) -> None:
        """Check jobs until closed; `run` is the target of a thread."""
        while not self._is_closed:
            self._due.wait(self._pause_s())
            self._is_asleep = False
            # Before the checks: a job that begins during them sets it again.
            self._due.clear()
            self._query_cancelled()
            # A copy: other threads add and remove jobs meanwhile.
            for execution in list(self._running.values()):
                self._check_job(execution, time.monotonic())
        self._broker.close()

    def _pause_s(self) -> float | None:
        """Return the seconds until an action is due; None to sleep until a job begins.

        A cancellation may come at any time, so the pause is at most `query_every_s`. It is None when no job has run for
        a while: a wake-up for each short job would cost more than the checks do.
        """
        self._is_asleep = True  # before `_running` is read: a job that begins after that wakes the thread
        was_used, self._is_used = self._is_used, False
        if not (was_used or self._running or self._has_connection):
            return None
        self._is_asleep = False
        now = time.monotonic()
        due_times = [self._next_due(execution) for execution in list(self._running.values())]
        return max(SHORTEST_PAUSE_S, min([*due_times, now + self._limits.query_every_s]) - now)

    def _next_due(self, execution: Execution) -> float:
        control = execution.control
        if control.stopped_at != float("inf"):
            return min(control.stopped_at + self._limits.stop_grace_s, time.monotonic() + DROPPED_CHECK_S)
        return min(self._timeout_at(execution), self._cancel_at(execution))

    def _check_job(self, execution: Execution, now: float) -> None:
        control = execution.control
        if now >= control.stopped_at + self._limits.stop_grace_s and control.reason is not None:
            self._give_up_job(execution, control.reason)
        elif control.was_dropped:
            # Only if it was dropped: a second interruption could hit the task's clean-up.
            control.stop_again()
        elif control.reason is None and now >= self._cancel_at(execution):
            control.stop(Cancelled("cancelled while it ran"))
        elif control.reason is None and now >= self._timeout_at(execution):
            control.stop(build_timeout_error(control.timeout_s))

    def _give_up_job(self, execution: Execution, reason: FaktoryError) -> None:
        self.remove(execution)
        self._give_up(execution, reason)

    def _timeout_at(self, execution: Execution) -> float:
        """Return when to stop the job for its timeout.

        A coroutine has its own timeout; it is stopped 0.5 s later if it ignores that.
        """
        control = execution.control
        if control.timeout_s is None:
            return float("inf")
        return control.began_at + control.timeout_s + (0.5 if execution.is_async else 0.0)

    def _cancel_at(self, execution: Execution) -> float:
        """Return when to stop the job for its cancellation: at once, unless its task can see it."""
        can_see_cancel = execution.task.takes_context and not execution.is_async
        return execution.control.cancelled_at + (self._limits.cancel_grace_s if can_see_cancel else 0.0)

    def _query_cancelled(self) -> None:
        """Query which jobs are cancelled: one statement, for jobs that have run for a while."""
        now = time.monotonic()
        if not self._broker.cancels or now < self._queried_at + self._limits.query_every_s:
            return
        # Before the query, so that errors are not repeated at each round.
        self._queried_at = now
        long_running = {
            execution.reservation.jid: execution
            for execution in list(self._running.values())
            if now >= execution.control.began_at + self._limits.query_every_s / 2 and not execution.control.is_cancelled
        }
        if not long_running:
            self._close_connection()
            return
        self._has_connection = True
        cancelled = self._outage_pause.call(self._broker, lambda: self._broker.cancelled(list(long_running)))
        for jid in cancelled or ():
            logger.info("job is cancelled jid=%s", jid)
            long_running[jid].control.cancel()

    def _close_connection(self) -> None:
        """Close the connection while all jobs are short."""
        if self._has_connection:
            self._broker.close()
            self._has_connection = False
