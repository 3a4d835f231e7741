"""Looks after the jobs that run: stops those whose time is over or that were cancelled, gives up on the unstoppable.

One thread; sleeps until something is due. What a stop is: `stopping`. Rules: `docs/tasks.md`, "Time limits".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ..brokers.base import Broker
from ..errors import Cancelled, FaktoryError, WorkerShutdown
from ..logs import get_logger
from .execute import Execution
from .patience import Patience
from .stopping import timed_out

logger = get_logger(__name__)


class Limits(NamedTuple):
    """How patient the worker is, in seconds."""

    ask_every_s: float = 2.0
    """Between two questions which jobs are cancelled; jobs that run half as long are not asked about."""
    cancel_grace_s: float = 10.0
    """What a function that takes the context gets to see its cancellation by itself."""
    stop_grace_s: float = 5.0
    """What a task gets to end after it was stopped. Then it is stuck, and its process is to be replaced."""


USUAL = Limits()

SHORTEST_PAUSE_S = 0.05
"""Where something is due that cannot be done just now: the job's thread is not in its task."""


class Watch:
    """Of one worker process. `give_up` hears of stuck jobs, once each."""

    def __init__(
        self, broker: Broker, *, give_up: Callable[[Execution, FaktoryError], None], limits: Limits = USUAL
    ) -> None:
        self._broker = broker
        self._give_up = give_up
        self._limits = limits
        self._running: dict[int, Execution] = {}
        self._asked_at = time.monotonic()
        self._has_connection = False
        self._patience = Patience("cancelled")
        self._due = threading.Event()
        self._is_used = False
        self._is_asleep = False
        self._is_closed = False

    def began(self, execution: Execution) -> None:
        """Look after this job."""
        self._running[id(execution)] = execution
        self._is_used = True
        if self._is_asleep or execution.task.timeout is not None:
            self._due.set()

    def ended(self, execution: Execution) -> None:
        """This job needs no looking after any more."""
        self._running.pop(id(execution), None)

    def interrupt(self, reason: str) -> None:
        """Stop all jobs that run, since their worker stops."""
        for execution in list(self._running.values()):
            execution.control.stop(WorkerShutdown(reason))

    def close(self) -> None:
        """End the loop."""
        self._is_closed = True
        self._due.set()

    def run(self) -> None:
        """Look until closed."""
        while not self._is_closed:
            self._due.wait(self._pause_s())
            self._is_asleep = False
            self._due.clear()
            self._ask()
            for execution in list(self._running.values()):
                self._look_at(execution, time.monotonic())
        self._broker.close()

    def _pause_s(self) -> float | None:
        """Until something is due; a cancellation may be known at any time, and so never long. None: until a job begins.

        That is where none has for a while: to be woken by each would cost short jobs more than looking does.
        """
        self._is_asleep = True  # before the look: a job that begins after it wakes us
        was_used, self._is_used = self._is_used, False
        if not (was_used or self._running or self._has_connection):
            return None
        self._is_asleep = False
        now = time.monotonic()
        dues = [self._next_due(execution) for execution in list(self._running.values())]
        return max(SHORTEST_PAUSE_S, min([*dues, now + self._limits.ask_every_s]) - now)

    def _next_due(self, execution: Execution) -> float:
        control = execution.control
        if control.stopped_at != float("inf"):
            return control.stopped_at + self._limits.stop_grace_s
        return min(self._time_over_at(execution), self._cancel_at(execution))

    def _look_at(self, execution: Execution, now: float) -> None:
        control = execution.control
        if now >= control.stopped_at + self._limits.stop_grace_s and control.reason is not None:
            self._leave_alone(execution, control.reason)
        elif control.reason is None and now >= self._cancel_at(execution):
            control.stop(Cancelled("cancelled while it ran"))
        elif control.reason is None and now >= self._time_over_at(execution):
            control.stop(timed_out(execution.task.timeout))

    def _leave_alone(self, execution: Execution, reason: FaktoryError) -> None:
        self.ended(execution)
        self._give_up(execution, reason)

    def _time_over_at(self, execution: Execution) -> float:
        """When to stop it for its timeout. A coroutine has a timeout of its own: this is for one that ignores it."""
        if execution.task.timeout is None:
            return float("inf")
        return execution.control.began_at + execution.task.timeout + (0.5 if execution.is_async else 0.0)

    def _cancel_at(self, execution: Execution) -> float:
        """When to stop it because it is cancelled: at once, unless it can see that by itself."""
        may_see = execution.task.takes_context and not execution.is_async
        return execution.control.cancelled_at + (self._limits.cancel_grace_s if may_see else 0.0)

    def _ask(self) -> None:
        """Learn which jobs are cancelled: one statement, for those that have run for a while."""
        now = time.monotonic()
        if not self._broker.cancels or now < self._asked_at + self._limits.ask_every_s:
            return
        self._asked_at = now
        long = {
            execution.reservation.jid: execution
            for execution in list(self._running.values())
            if now >= execution.control.began_at + self._limits.ask_every_s / 2 and not execution.control.is_cancelled
        }
        if not long:
            self._let_go()
            return
        self._has_connection = True
        try:
            cancelled = self._broker.cancelled(list(long))
        except FaktoryError as error:
            self._patience.after(error)
            return
        except Exception:  # a loop: timeouts are kept all the same
            logger.exception("could not ask which jobs are cancelled")
            self._broker.close()
            return
        self._patience.rewarded()
        for jid in cancelled:
            logger.info("job is cancelled jid=%s", jid)
            long[jid].control.cancel()

    def _let_go(self) -> None:
        """No connection is kept for jobs that end at once."""
        if self._has_connection:
            self._broker.close()
            self._has_connection = False
