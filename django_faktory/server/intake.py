"""Connections that send long lines are read in turns, a few in each step of the event loop.

Otherwise sixty of them are read between two commands of another client: 256 KiB each, some 15 ms for all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

READS_A_STEP = 3
FULL_S = 0.01
"""Between two looks whether there is room again."""


class Intake:
    """Connections that wait until more of their line is read, in the order in which they came.

    None is read while `is_full`: then whole lines that wait to be carried out have all the memory that lines may have.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_full: Callable[[], bool] = lambda: False) -> None:
        self._loop, self._is_full = loop, is_full
        self._waiting: deque[Callable[[], None]] = deque()
        self._to_free: deque[Callable[[], None]] = deque()
        self._is_called = False

    def free(self, free: Callable[[], None]) -> None:
        """Call `free`, which frees the memory of a long line: some milliseconds for 16 MiB."""
        self._to_free.append(free)
        self._call()

    def wait(self, read_on: Callable[[], None]) -> None:
        """Call `read_on` once, when it is this connection's turn."""
        self._waiting.append(read_on)
        self._call()

    def _call(self) -> None:
        if self._is_called or not (self._waiting or self._to_free):
            return
        self._is_called = True
        if self._to_free or not self._is_full():
            self._loop.call_soon(self._next)
        else:
            self._loop.call_later(FULL_S, self._next)

    def _next(self) -> None:
        self._is_called = False
        if self._to_free:
            self._to_free.popleft()()
        elif not self._is_full():
            for _ in range(min(READS_A_STEP, len(self._waiting))):
                self._waiting.popleft()()
        self._call()
