"""Serialize password checks so that they do not starve established connections (`HandshakeQueue`).

A check is up to 8,095 rounds of a hash, 2 to 4 ms in which the event loop does nothing else (W1). However many clients
connect at once, half of the event loop's time is left to the other connections.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class HandshakeQueue:
    """Queue of password checks: runs them one at a time, in order of arrival."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_resting = False

    def ask(self, check: Callable[[], None]) -> None:
        """Call `check` now, or in its turn if another check has just run."""
        self._waiting.append(check)
        if not self._is_resting:
            self._next()

    def _next(self) -> None:
        self._is_resting = bool(self._waiting)
        if not self._waiting:
            return
        started_at = self._loop.time()
        try:
            self._waiting.popleft()()
        finally:
            self._loop.call_later(self._loop.time() - started_at, self._next)  # pause for as long as the check took
