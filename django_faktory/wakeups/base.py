"""What a listener for hints promises, and the one that hears none. Knows no database and no job rows.

A hint is a favour, a poll is the truth: hints get lost, and come for nothing.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod

DEBOUNCE_S = 0.010
"""A process announces a queue once in this time; see `announcing`."""

SECOND_LOOK_S = 0.012
"""Longer than DEBOUNCE_S: whatever was not announced because something just was is stored by then."""

SELDOM = 5
"""Where hints come, polls are for those that got lost only: so many times as seldom as where none do."""


class Listener(ABC):
    """Waits for hints that work has come. One thread waits; any thread may close.

    Senders leave out a hint that follows another too closely, so who was woken must look twice. `wait` sees to
    it: SECOND_LOOK_S after a hint it answers True once more, whether or not another one came.
    """

    looks_twice = True

    hears_all = False
    """Whether hints of every process come just now, as far as can be known."""

    def __init__(self) -> None:
        self._second_look_at: float | None = None

    def wait(self, timeout_s: float) -> bool:
        """Wait for a hint; True when one came. Never raises: while hints cannot come, it just waits.

        A hint that came since the last call counts. Once closed, it answers False at once.
        """
        due = self._second_look_at
        if due is not None:
            timeout_s = min(timeout_s, max(0.0, due - time.monotonic()))
        if self._hear(timeout_s):
            self._second_look_at = time.monotonic() + SECOND_LOOK_S if self.looks_twice else None
            return True
        if due is None or time.monotonic() < due:
            return False
        self._second_look_at = None
        return True

    def poll_s(self, poll_interval_s: float) -> float:
        """How long to wait for a hint before looking without one."""
        return poll_interval_s * SELDOM if self.hears_all else poll_interval_s

    def ring(self) -> None:
        """A hint of this process's own, from any thread. Does nothing where each commit is heard as it is."""
        return

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds; a wait that runs in another thread returns soon."""

    @abstractmethod
    def _hear(self, timeout_s: float) -> bool:
        """Wait for one hint; False when the time is over, or when closed."""


class PollingListener(Listener):
    """For where hints of others cannot come: waits the whole time, and leaves the rest to the poll."""

    looks_twice = False

    def __init__(self) -> None:
        super().__init__()
        self._woken = threading.Event()
        self._is_closed = False

    def ring(self) -> None:
        """See Listener."""
        self._woken.set()

    def close(self) -> None:
        """See Listener."""
        self._is_closed = True
        self._woken.set()

    def _hear(self, timeout_s: float) -> bool:
        heard = self._woken.wait(timeout_s) and not self._is_closed
        if heard:
            self._woken.clear()
        return heard
