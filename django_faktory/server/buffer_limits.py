"""Cap the total memory buffered for incomplete command lines across all connections.

Beyond the cap, `LineBufferLimit` rejects the oldest incomplete line. An attacker that keeps lines open to block other
clients has the oldest ones; a client that sends its line without pauses rarely has. Small lines do not count.
"""

from __future__ import annotations

from collections.abc import Callable

SMALL_BYTES = 64 * 1024
"""Bytes of a line that are not counted."""

LONGEST_AT_ONCE = 16
"""The cap, as a number of lines of MAX_COMMAND_BYTES."""


class LineBufferLimit:
    """Buffered bytes of each incomplete line, oldest first. `limit` is the cap in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[Callable[[], None], int] = {}
        self._sum = 0

    def update(self, reject: Callable[[], None], size: int) -> None:
        """Set the size of an incomplete line; reject the oldest lines, with their `reject`, while over the cap."""
        self._sum += size - self._held.get(reject, 0)
        # An update keeps the position in the dict, so the order is that of the first bytes.
        self._held[reject] = size
        while self._sum > self._limit:
            oldest = next(iter(self._held))
            self.forget(oldest)  # before the callback, which closes the connection and so calls `forget` again
            oldest()

    def forget(self, reject: Callable[[], None]) -> None:
        """Remove a line that has ended or lost its connection; idempotent."""
        self._sum -= self._held.pop(reject, 0)
