"""Who waits at the door with a password: checked one at a time, so that those inside are served in between.

A check is up to 8,095 rounds of a hash, two to four milliseconds in which the event loop does nothing else (W1).
However many come at once, half of its time stays with the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Doorman:
    """Calls each check when its turn has come, in the order they came."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_resting = False

    def ask(self, check: Callable[[], None]) -> None:
        """Have this called: at once, unless another has just been."""
        self._waiting.append(check)
        if not self._is_resting:
            self._next()

    def _next(self) -> None:
        self._is_resting = bool(self._waiting)
        if not self._waiting:
            return
        begun = self._loop.time()
        try:
            self._waiting.popleft()()
        finally:
            self._loop.call_later(self._loop.time() - begun, self._next)  # as long as it took
