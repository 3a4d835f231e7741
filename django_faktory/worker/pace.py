"""How many jobs a worker may hold: its threads' number, and as many more as they finish in a moment. Pure.

A job that waits here while another worker is idle is late, so only fast jobs are read ahead. A worker begins with one
job and doubles: if a job kills the process, the next process meets it alone, and no other is blamed for it (W20).
"""

from __future__ import annotations

HORIZON_S = 0.05
"""Read ahead what the threads finish in this time."""

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

    def ended(self, ran_s: float) -> None:
        """A job ended that ran so long."""
        self._mean_s += (ran_s - self._mean_s) * SHARE
        if self._window < self._concurrency + self._most_ahead:
            self._window *= 2

    def got_stuck(self) -> None:
        """Jobs read ahead were not begun in time: expect slow ones."""
        self._mean_s = SLOW_S

    def room(self, held: int) -> int:
        """How many jobs to fetch by one who holds so many; 0 as well where a few more are not worth a fetch."""
        ahead = min(self._most_ahead, int(HORIZON_S * self._concurrency / max(self._mean_s, 1e-6)))
        room = min(self._window, self._concurrency + ahead) - held
        is_idle = held < self._concurrency
        return room if room >= (1 if is_idle else max(1, ahead // 2)) else 0
