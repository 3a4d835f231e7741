"""Stops a task from another thread: a coroutine by cancelling it, a function by an exception in its thread.

Python delivers that exception between two bytecodes of the thread. One that waits inside C (a socket, a query, a long
computation of an extension) goes on until it returns: who stops it must look whether it worked. Docs: `docs/tasks.md`.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ..control import Control
from ..errors import FaktoryError, TaskTimeout
from ..payloads import TrackUpdate


class Stopped(BaseException):
    """Raised in the thread of a task that is stopped; no Exception, so that `except Exception` lets it pass."""


class Stoppable(Control):
    """One attempt at one job, and the means to stop it."""

    __slots__ = (
        "_lock", "_loop", "_task", "_thread", "began_at", "cancelled_at", "reason", "stopped_at", "take_progress",
        "was_hit",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.began_at = time.monotonic()
        self.cancelled_at = self.stopped_at = float("inf")
        self.reason: FaktoryError | None = None
        """Why it was stopped."""
        self.was_hit = False
        """Whether its thread was interrupted, and may have left anything half done."""
        self.take_progress: Callable[[], TrackUpdate | None] = _nothing_to_write
        """Returns progress of the job that is not written yet."""
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        """Note that somebody wants the job cancelled; the task can read it from now on."""
        if not self.is_cancelled:
            self.is_cancelled, self.cancelled_at = True, time.monotonic()

    def stop(self, reason: FaktoryError) -> None:
        """Stop it, once, if its task runs just now."""
        with self._lock:
            if self.reason is not None or (self._thread is None and self._loop is None):
                return
            self.reason, self.stopped_at = reason, time.monotonic()
            if self._thread is not None:
                _raise_in(self._thread)
            elif self._loop is not None:
                self._loop.call_soon_threadsafe(self._cancel_task)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call it so that `stop` from another thread ends it: then the reason is raised here."""
        try:
            try:
                self._thread = threading.get_ident()
                return function()
            finally:
                self._leave()
        except BaseException as error:
            self._leave()  # the first one may have been what was interrupted; there is one interruption only
            if self.reason is None:
                raise
            self.was_hit = True
            raise self.reason.with_traceback(error.__traceback__) from (None if _is_ours(error) else error)

    async def acall(self, make: Callable[[], Awaitable[Any]], *, timeout_s: float | None) -> Any:
        """Await it so that `stop` ends it, or the timeout; then the reason is raised here."""
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
            self._task.uncancel()
            raise self.reason from None
        finally:
            self._task = self._loop = None

    def _leave(self) -> None:
        """From here on no interruption comes; one that is under way is used up here."""
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
    """What a task is told that ran too long."""
    return TaskTimeout(f"the task did not end within its timeout of {timeout_s:g} s")


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, Stopped)


def _use_up() -> None:
    """Take what may be under way to this thread, by having it raised here.

    It could be taken back instead; but Python 3.11 and 3.12 go on looking for it then, at every jump of every thread,
    for as long as the process lives, and under a tracer at one place for ever.
    """
    with suppress(Stopped):
        _raise_in(threading.get_ident())
        while True:
            pass


def _raise_in(thread: int) -> None:
    """Have the thread raise Stopped at one of its next steps."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))
