"""Cap the total memory buffered for incomplete command lines across all connections.

Beyond the cap the oldest incomplete line is rejected: a client that sends its line without pauses is rarely the oldest,
a client that keeps lines open to block other clients is. Small lines do not count.
"""

from __future__ import annotations

from collections.abc import Callable

SMALL_BYTES = 64 * 1024
"""Bytes of a line that are not counted."""

LONGEST_AT_ONCE = 16
"""The cap, as a number of lines of MAX_COMMAND_BYTES."""


class Unfinished:
    """Buffered bytes of each incomplete line, oldest first. `most` is the cap in bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Callable[[], None], int] = {}
        self._sum = 0

    def holds(self, turn_away: Callable[[], None], size: int) -> None:
        """Set the size of an incomplete line; reject the oldest lines, with their `turn_away`, while over the cap."""
        self._sum += size - self._held.get(turn_away, 0)
        # An update keeps the position in the dict, so the order is that of the first bytes.
        self._held[turn_away] = size
        while self._sum > self._most:
            first = next(iter(self._held))
            self.forgets(first)  # before the callback, which closes the connection and so calls `forgets` again
            first()

    def forgets(self, turn_away: Callable[[], None]) -> None:
        """Remove a line that has ended or lost its connection; idempotent."""
        self._sum -= self._held.pop(turn_away, 0)
