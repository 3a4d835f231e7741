"""Run `async def` tasks on one event loop in one thread (`EventLoop`). Independent of the broker.

The first async task starts the loop's thread and a second thread, which logs a warning when a coroutine blocks the
loop. Processes without async tasks have neither.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections

from ..core.event_loop import new_event_loop
from ..core.logs import get_logger
from ..core.payloads import Reservation
from .db_cleanup import ASYNC_THREAD
from .job_buffer import Report
from .loop_watch import LoopWatch

logger = get_logger(__name__)

CHECK_EVERY_S = 0.5
"""Seconds between two checks whether the loop is blocked; no check runs while there is no coroutine."""

MAX_NAMED = 5
"""Maximum number of jids in the warning about a blocked loop."""


class EventLoop:
    """Run coroutines, each of which returns the report of one job."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._running: dict[asyncio.Task[Report | None], Reservation] = {}
        self._is_busy = threading.Event()
        self._is_closed = threading.Event()

    def submit(
        self,
        job: Reservation,
        make_coroutine: Callable[[], Coroutine[Any, Any, Report | None]],
        on_done: Callable[[Report | BaseException | None], None],
    ) -> None:
        """Run `make_coroutine()` for this job as an asyncio task; call `on_done` on the loop with its result.

        `on_done` receives the report, or the exception that the coroutine raised. Starts the loop at the first call and
        blocks until it runs. Thread-safe.
        """
        with self._starting:
            if self._thread is None:
                # Daemon threads: a coroutine that does not end must not keep the process from ending.
                thread = threading.Thread(target=self._run, name=ASYNC_THREAD, daemon=True)
                thread.start()  # before the assignment: if there can be no thread, the next job tries again
                self._thread = thread
                threading.Thread(target=self._watch, name=f"{ASYNC_THREAD}-watch", daemon=True).start()
        self._started.wait()
        # `_loop` exists only after `_started` is set.
        self._loop.call_soon_threadsafe(self._begin, job, make_coroutine, on_done)

    def cancel(self) -> None:
        """Cancel all running tasks. Safe from any thread; does not wait."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._running])

    def close(self, timeout_s: float) -> bool:
        """End the loop, cancel its tasks and wait up to `timeout_s`.

        Returns False if the thread still runs, because a task ignores its cancellation.
        """
        if self._thread is None:
            return True
        self._is_closed.set()
        # Wakes the second thread if it still waits for a first coroutine.
        self._is_busy.set()
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._closing.wait()
        # Async tasks use the ORM in a thread of asgiref's, so only code run there can close these connections.
        await sync_to_async(connections.close_all)()

    def _watch(self) -> None:
        self._started.wait()
        thread = self._thread.ident if self._thread else None
        watch = LoopWatch("tasks", lambda: (self._loop, thread), describe=self._describe)
        while not self._is_closed.is_set():
            self._is_busy.wait()
            self._is_busy.clear()  # before `_running` is read: a task that starts after that sets the event again
            while self._running and not self._is_closed.is_set():
                watch.check()
                self._is_closed.wait(CHECK_EVERY_S)

    def _describe(self, task: asyncio.Task[Any] | None) -> str:
        job = self._running.get(task) if task else None
        if job is not None:
            return f"jobtype={job.jobtype} jid={job.jid} "
        # A callback, or an asyncio task that a job started, blocks the loop: any running job may be its owner.
        return f"jids={','.join([job.jid for job in list(self._running.values())[:MAX_NAMED]])} "

    def _begin(
        self,
        job: Reservation,
        make_coroutine: Callable[[], Coroutine[Any, Any, Report | None]],
        on_done: Callable[[Report | BaseException | None], None],
    ) -> None:
        task = self._loop.create_task(make_coroutine())
        # Also keeps the task alive: asyncio has only weak references to its tasks.
        self._running[task] = job
        # `set` takes a lock, `is_set` does not: short tasks would pay for it each time.
        if not self._is_busy.is_set():
            self._is_busy.set()
        task.add_done_callback(lambda task: self._finish(task, on_done))

    def _finish(
        self, task: asyncio.Task[Report | None], on_done: Callable[[Report | BaseException | None], None]
    ) -> None:
        self._running.pop(task, None)
        if task.cancelled():
            on_done(asyncio.CancelledError("the task was cancelled"))
        else:
            on_done(task.exception() or task.result())
