"""One event loop, in one thread, for the tasks that are `async def`. Knows no broker.

It starts with the first of them, and a second thread with it, which logs a warning when a coroutine blocks the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections

from ..event_loops import new_event_loop
from ..logs import get_logger
from ..payloads import Reservation
from .held import Report
from .loop_watch import LoopWatch

logger = get_logger(__name__)

CHECK_EVERY_S = 0.5
"""Between two checks whether the loop is blocked; none is made while no coroutine runs."""

MOST_NAMED = 5


class EventLoop:
    """Runs coroutines that end in a report."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._running: dict[asyncio.Task[Report], Reservation] = {}
        self._is_busy = threading.Event()
        self._is_closed = threading.Event()

    def submit(
        self,
        job: Reservation,
        make: Callable[[], Coroutine[Any, Any, Report]],
        done: Callable[[Report | BaseException], None],
    ) -> None:
        """Run `make()` for this job as an asyncio task; `done` gets its report, or what it raised, on the loop."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="faktory-async", daemon=True)
                self._thread.start()
                threading.Thread(target=self._watch, name="faktory-async-watch", daemon=True).start()
        self._started.wait()
        self._loop.call_soon_threadsafe(self._begin, job, make, done)

    def cancel(self) -> None:
        """Cancel every task that runs."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._running])

    def close(self, timeout_s: float) -> bool:
        """End the loop and what still runs there. False where a task that ignores its cancellation keeps it."""
        if self._thread is None:
            return True
        self._is_closed.set()
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
        # The ORM of async tasks lives in asgiref's thread: its connections end with this loop.
        await sync_to_async(connections.close_all)()

    def _watch(self) -> None:
        self._started.wait()
        thread = self._thread.ident if self._thread else None
        watch = LoopWatch("tasks", lambda: (self._loop, thread), describe=self._describe)
        while not self._is_closed.is_set():
            self._is_busy.wait()
            self._is_busy.clear()  # before the look at what runs: a task that begins after the look sets it again
            while self._running and not self._is_closed.is_set():
                watch.check()
                self._is_closed.wait(CHECK_EVERY_S)

    def _describe(self, task: asyncio.Task[Any] | None) -> str:
        job = self._running.get(task) if task else None
        if job is not None:
            return f"jobtype={job.jobtype} jid={job.jid} "
        # An asyncio task that one of the jobs has started, or a callback.
        return f"jids={','.join([job.jid for job in list(self._running.values())[:MOST_NAMED]])} "

    def _begin(
        self,
        job: Reservation,
        make: Callable[[], Coroutine[Any, Any, Report]],
        done: Callable[[Report | BaseException], None],
    ) -> None:
        task = self._loop.create_task(make())
        self._running[task] = job
        if not self._is_busy.is_set():
            self._is_busy.set()
        task.add_done_callback(lambda task: self._ended(task, done))

    def _ended(self, task: asyncio.Task[Report], done: Callable[[Report | BaseException], None]) -> None:
        self._running.pop(task, None)
        if task.cancelled():
            done(asyncio.CancelledError("the task was cancelled"))
        else:
            done(task.exception() or task.result())
