"""One event loop, in one thread, for the tasks that are `async def`; starts with the first of them. Knows no broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections

from ..event_loops import new_event_loop
from ..logs import get_logger
from .held import Report

logger = get_logger(__name__)


class EventLoop:
    """Runs coroutines that end in a report."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._running: set[asyncio.Task[Report]] = set()

    def submit(
        self, make: Callable[[], Coroutine[Any, Any, Report]], done: Callable[[Report | BaseException], None]
    ) -> None:
        """Run `make()` as an asyncio task of its own; `done` hears its report, or what it raised, on the loop."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="faktory-async", daemon=True)
                self._thread.start()
        self._started.wait()
        self._loop.call_soon_threadsafe(self._begin, make, done)

    def cancel(self) -> None:
        """Cancel every task that runs."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._running])

    def close(self, timeout_s: float) -> bool:
        """End the loop and what still runs there. False where a task that ignores its cancellation keeps it."""
        if self._thread is None:
            return True
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

    def _begin(
        self, make: Callable[[], Coroutine[Any, Any, Report]], done: Callable[[Report | BaseException], None]
    ) -> None:
        task = self._loop.create_task(make())
        self._running.add(task)
        task.add_done_callback(lambda task: self._ended(task, done))

    def _ended(self, task: asyncio.Task[Report], done: Callable[[Report | BaseException], None]) -> None:
        self._running.discard(task)
        if task.cancelled():
            done(asyncio.CancelledError("the task was cancelled"))
        else:
            done(task.exception() or task.result())
