"""Give connections that take much of the event loop's time their turns, so that other clients are served in between.

The server has a queue of turns for long lines, one for connections that sent many commands in a row, and one for checks
of passwords.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from ..core.logs import get_logger
from ..errors import FaktoryError

logger = get_logger(__name__)


RESTING_S = 1.0
"""Seconds after a command of another client in which the queue rests after each piece."""


class Turns:
    """Queue of work: one piece in an iteration of the event loop, in order of arrival.

    After a piece it rests: `least_rest_s`, or as long as the piece took if others' commands were executed lately. While
    it rests, threads get the GIL, which a command of another client needs several times.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        commands: Callable[[], int],
        *,
        least_rest_s: float = 0.0,
        budget_bytes: int = 0,
    ) -> None:
        self._loop, self._count_commands, self._least_rest_s = loop, commands, least_rest_s
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_scheduled = False
        self._last_count = 0
        self._others_at = float("-inf")
        self._budget_bytes = self._free_bytes = budget_bytes
        self._lines: deque[tuple[int, Callable[[], object]]] = deque()

    def wait(self, call: Callable[[], object]) -> None:
        """Call `call` when it is its turn."""
        self._waiting.append(call)
        if not self._is_scheduled:
            self._is_scheduled = True
            # Not now: the caller may be in the middle of changing its state.
            self._loop.call_later(self._least_rest_s, self._next)

    def run(self, steps: Generator[None, None, Any], size: int, done: Callable[[Any], object]) -> None:
        """Run one step in each turn, then call `done` with the result or FaktoryError; None if `steps` was closed.

        The jobs of a line take several times its memory, so lines of `budget_bytes` are parsed and executed at a time,
        or a single longer one. Others wait as bytes for the `release` of earlier ones.
        """
        self._lines.append((size, partial(self._step, steps, done)))
        self._admit()

    def release(self, size: int) -> None:
        """Return the memory of a line that was answered, or whose client has disconnected."""
        self._free_bytes += size
        self._admit()

    def _admit(self) -> None:
        # In order of arrival: if shorter lines overtook it, a long one could wait indefinitely.
        while self._lines and (self._lines[0][0] <= self._free_bytes or self._free_bytes == self._budget_bytes):
            size, step = self._lines.popleft()
            self._free_bytes -= size
            self.wait(step)

    def _step(self, steps: Generator[None, None, Any], done: Callable[[Any], object]) -> None:
        try:
            next(steps)
        except StopIteration as end:
            done(end.value)
        except FaktoryError as error:
            done(error)
        except Exception:  # affects this line only, and its client gets a reply
            logger.exception("command failed item=%s", "long line")
            done(FaktoryError("internal error"))
        else:
            self.wait(partial(self._step, steps, done))

    def _next(self) -> None:
        begun = self._loop.time()
        if self._count_commands() != self._last_count:
            self._others_at = begun
        call = self._waiting.popleft()
        try:
            call()
        finally:  # also after an error in a callback, or no further call would be made
            self._last_count = self._count_commands()
            took_s = self._loop.time() - begun
            rest_s = took_s if begun - self._others_at < RESTING_S else 0.0
            self._is_scheduled = bool(self._waiting)
            if self._waiting:
                self._loop.call_later(max(rest_s, self._least_rest_s), self._next)
