"""Compute how many jobs a worker may have: one for each thread, plus a prefetch of fast jobs. Pure.

`PrefetchWindow` allows only jobs that the threads will finish within `HORIZON_S`, since a job must not wait here while
another worker is idle. A worker starts with one job and doubles the number with each job that ends: if a job kills the
process, the next process runs it alone, and no other job counts the loss (W20). This lasts `CAUTIOUS_S` only, because
otherwise one long job would keep all other threads idle.
"""

from __future__ import annotations

HORIZON_S = 0.05
"""Seconds of work that is prefetched."""

CAUTIOUS_S = 0.25
"""Seconds after the first job in which the number of jobs grows slowly. Jobs that kill their process mostly do so at
once.
"""

SLOW_S = 1.0
"""Initial mean duration of a job, and the one after a prefetched job was not begun in time."""

JOB_WEIGHT = 0.1
"""Weight of one job in the running mean of durations."""


class PrefetchWindow:
    """Track the durations of jobs and compute how many more to fetch.

    `max_prefetch` is the maximum number of jobs beyond `concurrency`.
    """

    def __init__(self, *, concurrency: int, max_prefetch: int) -> None:
        self._concurrency = concurrency
        self._max_prefetch = max_prefetch
        self._mean_s = SLOW_S
        # A job that kills the process at once should have few others in the same process.
        self._window = 1
        self._cautious_until: float | None = None

    def record_fetch(self, now: float) -> None:
        """Record that jobs were fetched; the first call starts the cautious time."""
        if self._cautious_until is None:
            self._cautious_until = now + CAUTIOUS_S

    def record_end(self, ran_s: float) -> None:
        """Record that a job ended after `ran_s` seconds."""
        self._mean_s += (ran_s - self._mean_s) * JOB_WEIGHT
        self._window = min(self._window * 2, self._concurrency + self._max_prefetch)

    def record_unbegun(self) -> None:
        """Record that prefetched jobs were not begun in time: expect slow jobs."""
        self._mean_s = SLOW_S

    def room(self, job_count: int, *, now: float) -> int:
        """Return how many jobs to fetch when `job_count` are here.

        Returns 0 also if all threads are busy and the room is less than half of the prefetch: a fetch for a few jobs is
        not worth its cost.
        """
        # A mean of 0 s is possible, for empty jobs on a coarse clock.
        prefetch = min(self._max_prefetch, int(HORIZON_S * self._concurrency / max(self._mean_s, 1e-6)))
        limit = self._concurrency + prefetch
        # The fewer jobs a dying process has, the fewer count a loss that they did not cause (W20).
        if self._cautious_until is None or now < self._cautious_until:
            limit = min(limit, self._window)
        has_idle_thread = job_count < self._concurrency
        room = limit - job_count
        return room if room >= (1 if has_idle_thread else max(1, prefetch // 2)) else 0
