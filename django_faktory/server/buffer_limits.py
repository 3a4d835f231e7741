"""Cap the total memory of long command lines across all connections, from their first bytes to their answers.

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
    """Bytes of each long line, oldest first. `limit` is the cap in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[Callable[[], None], int] = {}
        self._complete: dict[Callable[[], None], int] = {}
        self._sum = 0

    def update(self, reject: Callable[[], None], size: int) -> None:
        """Set the size of an incomplete line; reject the oldest lines, with their `reject`, while over the cap."""
        self._sum += size - self._held.get(reject, 0)
        # An update keeps the position in the dict, so the order is that of the first bytes.
        self._held[reject] = size
        while self._sum > self._limit and self._held:
            oldest = next(iter(self._held))
            self.forget(oldest)  # before the callback, which closes the connection and so calls `forget` again
            oldest()

    def forget(self, reject: Callable[[], None]) -> None:
        """Remove an incomplete line that has ended or lost its connection; idempotent."""
        self._sum -= self._held.pop(reject, 0)

    def hold(self, reject: Callable[[], None], size: int) -> None:
        """Count a complete line until `release`. It is not rejected any more."""
        self._complete[reject] = size
        self._sum += size

    def release(self, reject: Callable[[], None]) -> None:
        """Remove a complete line that was answered; idempotent."""
        self._sum -= self._complete.pop(reject, 0)
