"""Stop a task from another thread: cancel a coroutine, raise an exception in a function's thread.

`InterruptibleControl` is the main class. Python raises that exception between two bytecodes of the thread. A thread
that waits in C (a socket, a query, a long computation of an extension) continues until it returns, so the caller of
`stop` must check whether the task has ended. See `docs/tasks.md`.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NoReturn

from ..core.job_control import Control
from ..core.payloads import TrackUpdate
from ..errors import FaktoryError, TaskTimeout
from .job_log import JobLog


class Interrupted(BaseException):
    """Raised in the thread of a stopped task. A BaseException, so that `except Exception` does not catch it."""

    control: InterruptibleControl | None = None
    """The control that stops the task, in a class of its own for each stop."""


class InterruptibleControl(Control):
    """The control of one attempt at one job, which can also stop it."""

    __slots__ = (
        "_has_ended_itself", "_lock", "_loop", "_task", "_thread", "began_at", "cancelled_at", "log", "stopped_at",
        "take_progress", "timeout_s", "was_dropped", "was_interrupted",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.began_at = time.monotonic()
        self.cancelled_at = self.stopped_at = float("inf")
        self.timeout_s: float | None = None
        """Seconds that the run may take; None means no limit."""
        self.was_dropped = False
        """True if Python has dropped the interruption; see `install`."""
        self.was_interrupted = False
        """True if its thread was interrupted, which may have left its resources in any state."""
        self.log: JobLog | None = None
        """The lines that the task has logged; None if there are none."""
        self.take_progress: Callable[[], TrackUpdate | None] = _nothing_to_write
        """Returns progress of the job that is not written yet."""
        self._lock = threading.Lock()
        self._has_ended_itself = False
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
                self._interrupt(self._thread)
            elif self._loop is not None:
                # asyncio tasks are not thread-safe: only their loop may cancel them.
                self._loop.call_soon_threadsafe(self._cancel_task)

    def end(self, reason: FaktoryError) -> NoReturn:
        """End the task from its own thread, with this reason; `except Exception` of the task does not catch it."""
        with self._lock:
            if self.reason is None:
                self.reason, self.stopped_at = reason, time.monotonic()
                self._has_ended_itself = True
        raise Interrupted

    def stop_again(self) -> None:
        """Interrupt the thread again if Python has dropped the interruption and the task still runs."""
        with self._lock:
            if self.was_dropped and self._thread is not None:
                self.was_dropped = False
                self._interrupt(self._thread)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call the function; if `stop` ends it, raise the reason of the stop."""
        try:
            try:
                # Inside the `try`: an interruption may come right after this assignment.
                self._thread = threading.get_ident()
                return function()
            finally:
                self._leave()
        except BaseException as error:
            self._leave()  # the interruption may have hit the first `_leave`; there is only one
            if self.reason is None:
                raise
            self.was_interrupted = not self._has_ended_itself
            raise self.reason.with_traceback(error.__traceback__) from (
                None if isinstance(error, Interrupted) else error
            )

    async def acall(self, make_coroutine: Callable[[], Awaitable[Any]]) -> Any:
        """Await `make_coroutine()`; if `stop` or the timeout ends it, raise the reason."""
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await make_coroutine()
        except TimeoutError:
            # A TimeoutError of the task itself, such as one of a socket.
            if not limit.expired():
                raise
            raise build_timeout_error(self.timeout_s) from None
        except Interrupted:  # by `end`, in the thread of a step
            if self.reason is None:
                raise
            raise self.reason from None
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
            was_interruptible, self._thread = self._thread is not None, None
        if was_interruptible and self.reason is not None:
            _consume_pending()

    def _interrupt(self, thread: int) -> None:
        # Python creates the exception itself, so only its class can name the control.
        _raise_in(thread, type(Interrupted.__name__, (Interrupted,), {"control": self}))

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _nothing_to_write() -> None:
    return None


def build_timeout_error(timeout_s: float | None) -> TaskTimeout:
    """Return the error for a task that exceeded its timeout."""
    return TaskTimeout(f"the task did not end within its timeout of {timeout_s:g} s")


def _consume_pending() -> None:
    """Consume an interruption that may be pending for this thread, by raising one here.

    Clearing it would be possible, but then Python 3.11 and 3.12 keep checking for it at every jump of every thread
    while the process lives, and under a tracer loop at one place endlessly.
    """
    with suppress(Interrupted):
        _raise_in(threading.get_ident())
        while True:
            pass


def _raise_in(thread: int, error: type[Interrupted] = Interrupted) -> None:
    """Make the thread raise this error at one of its next bytecodes."""
    # CPython offers this in its C API only.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


_original_hook: Any = None


def install() -> None:
    """Record interruptions that Python drops in this process. Further calls have no effect.

    Python ignores an exception in a finalizer or in a callback of a weak reference, and passes it to this hook.
    """
    global _original_hook
    if sys.unraisablehook is not _record_dropped:
        _original_hook, sys.unraisablehook = sys.unraisablehook, _record_dropped


def _record_dropped(unraisable: Any) -> None:
    control = getattr(unraisable.exc_type, "control", None)
    if isinstance(control, InterruptibleControl):
        # Not raised here, where it would be dropped again.
        control.was_dropped = True
    else:
        _original_hook(unraisable)
