"""Claims that were perhaps carried out and never answered: each has a number of its own, kept in the rows it took, by
which they are given back once the database can be asked again. Source: reliability class C4, ADR 0017.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

LOOK_AFTER_S = (0.0, 5.0, 30.0)
"""The database may be a while about a claim whose connection is gone: so it is asked more than once."""

AGAIN_S = 5.0
"""After a look that failed."""

DRAWN = 64
"""Numbers that are drawn at once: to ask the system for chance lets other threads have the interpreter."""

_BYTES = 8
_POSITIVE = 2**63 - 1

_drawn: list[int] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drawn.clear)  # no number may be two processes'


class Unanswered:
    """The numbers of one broker, until they have been looked for often enough. From any thread."""

    def __init__(self) -> None:
        self._due: dict[int, list[float]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def numbered(self) -> Iterator[int]:
        """The number of the claims that are made inside; what they took is looked for if this ends with an error."""
        number = self.number()
        try:
            yield number
        except BaseException:
            self.expect(number)
            raise

    def number(self) -> int:
        """For claims whose maker says by `expect` that they got no answer."""
        try:
            return _drawn.pop()
        except IndexError:
            chance = os.urandom(DRAWN * _BYTES)
            first, *others = (
                int.from_bytes(chance[at : at + _BYTES]) & _POSITIVE for at in range(0, len(chance), _BYTES)
            )
            _drawn.extend(others)
            return first

    def is_any_due(self) -> bool:
        """Whether there may be something to look for: numbers that nobody looked for often enough yet."""
        return bool(self._due)

    def take_due(self) -> list[int]:
        """Those to look for now: each is one caller's alone, who says by `look_again` that its look failed. Costs
        nothing where there are none."""
        if not self._due:
            return []
        with self._lock:
            now = time.monotonic()
            taken = [number for number, times in self._due.items() if times[0] <= now]
            for number in taken:
                if len(times := self._due[number]) > 1:
                    del times[0]
                else:
                    del self._due[number]
            return taken

    def look_again(self, numbers: Collection[int]) -> None:
        """They could not be looked for: once more, a while from now."""
        with self._lock:
            again_at = time.monotonic() + AGAIN_S
            for number in numbers:
                self._due[number] = [again_at, *self._due.get(number, [])]

    def expect(self, number: int) -> None:
        """What was claimed under this number may have to be given back."""
        with self._lock:
            now = time.monotonic()
            self._due[number] = [now + after_s for after_s in LOOK_AFTER_S]
