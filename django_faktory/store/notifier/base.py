"""The listener interface for notifications, and a listener that only polls.

Knows no database and no job rows. Notifications may be lost or arrive without reason, so polling remains the source of
truth.
"""

from __future__ import annotations

import select
import threading
import time
from abc import ABC, abstractmethod

ANY_QUEUE = ""
"""Announced instead of names: any queue may have got work."""

DEBOUNCE_S = 0.010
"""A process announces a queue at most once within this time; see `publisher`."""

SECOND_LOOK_S = 0.012
"""Delay of the second look; longer than `DEBOUNCE_S`.

By then, work with a dropped announcement is stored.
"""

POLL_FACTOR = 5
"""Factor of the poll interval while notifications arrive: polls then only find work after a lost notification."""


def wait_readable(descriptors: list[int], timeout_s: float) -> list[int]:
    """Wait until one of these descriptors is readable; return those that are, an empty list on timeout."""
    poll = select.poll()  # not select.select, which fails for descriptors above 1,023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(timeout_s * 1000)]


class Listener(ABC):
    """Waits for notifications of new work. One thread waits; any thread may close.

    Senders drop a notification that follows another too closely, so a woken receiver must look twice. `wait` does that:
    it returns True a second time `SECOND_LOOK_S` after a notification, whether or not another one arrived.
    """

    looks_twice = True

    receives_all = False
    """Whether notifications of every process arrive at present, as far as can be known."""

    def __init__(self) -> None:
        self._second_look_at: float | None = None

    def wait(self, timeout_s: float) -> bool:
        """Wait for a notification; return True if one arrived. Never raises: without notifications it waits.

        A notification since the last call counts. Returns False at once after `close`.
        """
        due = self._second_look_at
        if due is not None:
            # Wait no longer than until the second look.
            timeout_s = min(timeout_s, max(0.0, due - time.monotonic()))
        if self._wait_for_notification(timeout_s):
            # A notification restarts the delay: its own second look covers the earlier one.
            self._second_look_at = time.monotonic() + SECOND_LOOK_S if self.looks_twice else None
            return True
        if due is None or time.monotonic() < due:
            return False
        self._second_look_at = None
        return True

    def poll_s(self, poll_interval_s: float) -> float:
        """Return how long to wait for a notification before looking without one."""
        return poll_interval_s * POLL_FACTOR if self.receives_all else poll_interval_s

    def wake(self) -> None:
        """Notify this listener from its own process, in any thread. Does nothing if it already sees each commit."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release its resources; a wait in another thread returns soon."""

    @abstractmethod
    def _wait_for_notification(self, timeout_s: float) -> bool:
        """Wait for one notification; return False on timeout or when closed."""


class PollingListener(Listener):
    """Listener for databases without notifications: waits the whole time and relies on polling."""

    # `wake` is called for every announcement, without debouncing.
    looks_twice = False

    def __init__(self) -> None:
        super().__init__()
        self._woken = threading.Event()
        self._is_closed = False

    def wake(self) -> None:
        """Wake the waiting thread of this process."""
        self._woken.set()

    def close(self) -> None:
        """End the current wait and all later ones at once."""
        self._is_closed = True
        self._woken.set()

    def _wait_for_notification(self, timeout_s: float) -> bool:
        is_woken = self._woken.wait(timeout_s) and not self._is_closed
        if is_woken:
            self._woken.clear()
        return is_woken
