"""How many jobs a worker may hold: its threads' number, and as many more as they finish in a moment. Pure.

A job that waits here while another worker is idle is late, so only fast jobs are read ahead. A worker begins with one
job and doubles with each that ends: if a job kills the process, the next process meets it alone, and no other is
blamed for it (W20). That caution lasts a moment only, or one long job would keep all other threads idle.
"""

from __future__ import annotations

HORIZON_S = 0.05
"""Read ahead what the threads finish in this time."""

CAUTIOUS_S = 0.25
"""What kills a process mostly does so at once."""

SLOW_S = 1.0
SHARE = 0.1
"""What one job counts for in the running mean of their durations."""


class Pace:
    """Learns from each job that ends. `read_ahead` is the most ever held beyond `concurrency`."""

    def __init__(self, *, concurrency: int, read_ahead: int) -> None:
        self._concurrency = concurrency
        self._most_ahead = read_ahead
        self._mean_s = SLOW_S
        self._window = 1
        self._cautious_until: float | None = None

    def began(self, now: float) -> None:
        """Jobs were taken in."""
        if self._cautious_until is None:
            self._cautious_until = now + CAUTIOUS_S

    def ended(self, ran_s: float) -> None:
        """A job ended that ran so long."""
        self._mean_s += (ran_s - self._mean_s) * SHARE
        self._window = min(self._window * 2, self._concurrency + self._most_ahead)

    def got_stuck(self) -> None:
        """Jobs read ahead were not begun in time: expect slow ones."""
        self._mean_s = SLOW_S

    def room(self, held: int, *, now: float) -> int:
        """How many jobs to fetch by one who holds so many; 0 as well where a few more are not worth a fetch."""
        ahead = min(self._most_ahead, int(HORIZON_S * self._concurrency / max(self._mean_s, 1e-6)))
        most = self._concurrency + ahead
        if self._cautious_until is None or now < self._cautious_until:
            most = min(most, self._window)
        is_idle = held < self._concurrency
        room = most - held
        return room if room >= (1 if is_idle else max(1, ahead // 2)) else 0
