"""Lines that have begun and not ended, of all connections together: they may hold so much memory and no more.

Where more comes, the line that began first goes. A client that sends its line and is done is never the one that began
first for long; who holds lines open, to keep others out, is. A small line needs no room here.
"""

from __future__ import annotations

from collections.abc import Callable

SMALL_BYTES = 64 * 1024
"""A line is not counted before it has so much."""

LONGEST_AT_ONCE = 16
"""So many of the longest command lines."""


class Unfinished:
    """How much each has, in the order in which they began. `most` is in bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Callable[[], None], int] = {}
        self._sum = 0

    def holds(self, turn_away: Callable[[], None], size: int) -> None:
        """A line has so much now; `turn_away` ends it, and forgets it here."""
        self._sum += size - self._held.get(turn_away, 0)
        self._held[turn_away] = size
        while self._sum > self._most:
            first = next(iter(self._held))
            self.forgets(first)
            first()

    def forgets(self, turn_away: Callable[[], None]) -> None:
        """It has ended, or its client is gone."""
        self._sum -= self._held.pop(turn_away, 0)
