"""Log a warning while an event loop is blocked: the task, its stack, and the duration (`LoopWatch`)."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ..core.logs import Lines, get_logger

logger = get_logger(__name__)

BLOCKED_S = 1.0
"""Seconds without an answer after which an event loop counts as blocked."""

BACKOFF = 3
"""Factor by which the time of each further warning grows while the loop stays blocked."""


class LoopWatch:
    """Check one event loop from another thread.

    `name` is the name of the loop in the log. `find_loop` returns the loop and the identifier of its thread, or None
    while there is no loop. `describe` returns the owner of the loop's current asyncio task as `name=value` pairs.
    """

    def __init__(
        self,
        name: str,
        find_loop: Callable[[], tuple[asyncio.AbstractEventLoop, int | None] | None],
        *,
        describe: Callable[[asyncio.Task[Any] | None], str] = lambda _: "",
    ) -> None:
        self._name = name
        self._find_loop = find_loop
        self._describe = describe

    def check(self) -> None:
        """Return once the loop has answered or has ended; log warnings with backoff until then."""
        loop_and_thread = self._find_loop()
        if loop_and_thread is None:
            return
        loop, thread = loop_and_thread
        answered = threading.Event()
        called_at = time.monotonic()
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # the loop is closed
            return
        warn_after_s, has_warned, blocker = BLOCKED_S, False, ""
        while not answered.wait(called_at + warn_after_s - time.monotonic()):
            if loop.is_closed():
                return
            # The current task may have changed since the call; it is the best guess available from outside.
            has_warned, blocker = True, self._describe(asyncio.current_task(loop))
            self._warn(blocker, time.monotonic() - called_at, thread)
            warn_after_s *= BACKOFF
        if has_warned:
            blocked_s = time.monotonic() - called_at
            logger.warning("event loop answers again loop=%s %sblocked=%.1f s", self._name, blocker, blocked_s)

    def _warn(self, blocker: str, blocked_s: float, thread: int | None) -> None:
        frame = sys._current_frames().get(thread or 0)  # noqa: SLF001  (documented, and the only way)
        stack = "".join(traceback.format_stack(frame)).rstrip() if frame else "its thread has ended"
        logger.warning(
            "event loop is blocked, its other coroutines wait loop=%s %sblocked=%.1f s%s",
            *(self._name, blocker, blocked_s, Lines(stack)),
        )
