"""Serve demanding connections in turn, a few in each iteration of the event loop.

The server has an `Intake` for connections that send long lines, and one for connections that sent many commands in a
row. Otherwise 60 such connections would be served between two commands of another client: 256 KiB each, about 15 ms
together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

CONNECTIONS_A_STEP = 3
"""Connections that continue in one iteration of the event loop."""

REST_S = 0.001
"""Rest after many commands in a row. Without it a flood keeps the event loop busy, and threads wait for the GIL."""

FULL_S = 0.01
"""Seconds between checks whether memory for more lines is free."""


class Intake:
    """Queue of connections that wait to continue, in order of arrival; a few continue every `pause_s` seconds.

    Pauses while `is_full()`: then complete lines that wait for execution use all the memory allowed for lines. Also
    frees memory, one block in each iteration, as that takes milliseconds too.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, pause_s: float = 0.0, is_full: Callable[[], bool] = lambda: False
    ) -> None:
        self._loop, self._pause_s, self._is_full = loop, pause_s, is_full
        self._waiting: deque[Callable[[], None]] = deque()
        self._to_free: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def free(self, free: Callable[[], None]) -> None:
        """Call `free` later, which frees the memory of a long line: some milliseconds for 16 MiB."""
        self._to_free.append(free)
        self._schedule()

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` once, when it is the turn of this connection."""
        self._waiting.append(resume)
        self._schedule()

    def _schedule(self) -> None:
        if self._is_scheduled or not (self._waiting or self._to_free):
            return
        self._is_scheduled = True
        if self._to_free or not self._is_full():
            self._loop.call_later(self._pause_s, self._next) if self._pause_s else self._loop.call_soon(self._next)
        else:
            # Poll: no event reports that memory has become free.
            self._loop.call_later(FULL_S, self._next)

    def _next(self) -> None:
        self._is_scheduled = False
        if self._to_free:  # first, and one per iteration: it makes room, but takes milliseconds
            self._to_free.popleft()()
        elif not self._is_full():
            for _ in range(min(CONNECTIONS_A_STEP, len(self._waiting))):
                self._waiting.popleft()()
        self._schedule()
