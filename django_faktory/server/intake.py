"""Connections that send long lines are read in turns, a few in each step of the event loop.

Otherwise sixty of them are read between two commands of another client: 256 KiB each, some 15 ms for all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

READS_A_STEP = 3


class Intake:
    """Connections that wait until more of their line is read, in the order in which they came."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_called = False

    def wait(self, read_on: Callable[[], None]) -> None:
        """Call `read_on` once, when it is this connection's turn."""
        self._waiting.append(read_on)
        self._call()

    def _call(self) -> None:
        if self._waiting and not self._is_called:
            self._is_called = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._is_called = False
        for _ in range(min(READS_A_STEP, len(self._waiting))):
            self._waiting.popleft()()
        self._call()
