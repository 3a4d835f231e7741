"""Stop a task from another thread: cancel a coroutine, raise an exception in a function's thread.

`InterruptibleControl` is the main class. Python raises that exception between two bytecodes of the thread. A thread
that waits in C (a socket, a query, a long computation of an extension) continues until it returns, so the caller of
`stop` must check whether the task has ended. See `docs/tasks.md`.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ..core.job_control import Control
from ..core.payloads import TrackUpdate
from ..errors import FaktoryError, TaskTimeout


class Interrupted(BaseException):
    """Raised in the thread of a stopped task. A BaseException, so that `except Exception` does not catch it."""


class InterruptibleControl(Control):
    """The control of one attempt at one job, which can also stop it."""

    __slots__ = (
        "_lock", "_loop", "_task", "_thread", "began_at", "cancelled_at", "reason", "stopped_at", "take_progress",
        "was_hit",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.began_at = time.monotonic()
        self.cancelled_at = self.stopped_at = float("inf")
        self.reason: FaktoryError | None = None
        """Why the job was stopped; None while it was not."""
        self.was_hit = False
        """True if its thread was interrupted, which may have left its resources in any state."""
        self.take_progress: Callable[[], TrackUpdate | None] = _nothing_to_write
        """Returns progress of the job that is not written yet."""
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        """Record that the job is cancelled; its task can read this from now on."""
        if not self.is_cancelled:
            self.is_cancelled, self.cancelled_at = True, time.monotonic()

    def stop(self, reason: FaktoryError) -> None:
        """Stop the task if it is running. Further calls have no effect. Safe from any thread."""
        with self._lock:
            # Outside its task the interruption would hit the worker's own code.
            if self.reason is not None or (self._thread is None and self._loop is None):
                return
            self.reason, self.stopped_at = reason, time.monotonic()
            if self._thread is not None:
                _raise_in(self._thread)
            elif self._loop is not None:
                self._loop.call_soon_threadsafe(self._cancel_task)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call the function; if `stop` ends it, raise the reason of the stop."""
        try:
            try:
                self._thread = threading.get_ident()
                return function()
            finally:
                self._leave()
        except BaseException as error:
            self._leave()  # the interruption may have hit the first `_leave`; there is only one
            if self.reason is None:
                raise
            self.was_hit = True
            raise self.reason.with_traceback(error.__traceback__) from (None if _is_ours(error) else error)

    async def acall(self, make: Callable[[], Awaitable[Any]], *, timeout_s: float | None) -> Any:
        """Await `make()`; if `stop` or the timeout ends it, raise the reason."""
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await make()
        except TimeoutError:
            if not limit.expired():
                raise
            raise timed_out(timeout_s) from None
        except asyncio.CancelledError:
            if self.reason is None or self._task is None:
                raise
            # The cancellation ends here: `Task.cancelling()` must not count it any longer.
            self._task.uncancel()
            raise self.reason from None
        finally:
            self._task = self._loop = None

    def _leave(self) -> None:
        """End the time in which `stop` may interrupt; consume an interruption that is pending."""
        with self._lock:
            was_open, self._thread = self._thread is not None, None
        if was_open and self.reason is not None:
            _use_up()

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _nothing_to_write() -> None:
    return None


def timed_out(timeout_s: float | None) -> TaskTimeout:
    """Return the error for a task that exceeded its timeout."""
    return TaskTimeout(f"the task did not end within its timeout of {timeout_s:g} s")


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, Interrupted)


def _use_up() -> None:
    """Consume an interruption that may be pending for this thread, by raising one here.

    Clearing it would be possible, but then Python 3.11 and 3.12 keep checking for it at every jump of every thread
    while the process lives, and under a tracer loop at one place endlessly.
    """
    with suppress(Interrupted):
        _raise_in(threading.get_ident())
        while True:
            pass


def _raise_in(thread: int) -> None:
    """Make the thread raise Stopped at one of its next bytecodes."""
    # CPython offers this in its C API only.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Interrupted))
