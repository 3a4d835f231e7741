"""Statistics of the jobs that pass through one process: counts, waiting times and run times.

`Recorder` keeps sums and histograms by queue and task until a caller takes them and adds them to the database.
Imports no database code.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# bisect_left counts a time equal to a bound below it, as Prometheus' `le` requires.
BOUNDS_S = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0)
"""Upper bounds of the histogram buckets, in seconds; one more bucket has no bound."""

BUCKETS = len(BOUNDS_S) + 1
MAX_SERIES = 1000
"""Maximum pairs of queue and task between two calls of `take`: clients may send any number of different names."""

OTHER = "(other)"
"""Queue and task of the series that counts all further pairs."""


class JobTiming(NamedTuple):
    """A job that started or ended, with the seconds it waited or ran."""

    queue: str
    jobtype: str
    seconds: float


def _zero_counts() -> list[int]:
    return [0] * BUCKETS


@dataclass(slots=True)
class Series:
    """The sums of one queue and task."""

    started: int = 0
    succeeded: int = 0
    failed: int = 0
    waited_s: float = 0.0
    ran_s: float = 0.0
    waits: list[int] = field(default_factory=_zero_counts)
    """Number of jobs by waiting time: up to each of `BOUNDS_S`, and above the bound before it."""
    runs: list[int] = field(default_factory=_zero_counts)

    def add(self, other: Series) -> None:
        """Add the sums of another series."""
        self.started += other.started
        self.succeeded += other.succeeded
        self.failed += other.failed
        self.waited_s += other.waited_s
        self.ran_s += other.ran_s
        self.waits = [sum(pair) for pair in zip(self.waits, other.waits, strict=True)]
        self.runs = [sum(pair) for pair in zip(self.runs, other.runs, strict=True)]

    def subtract(self, other: Series) -> None:
        """Subtract the sums of another series; no sum becomes negative."""
        # The subtracted sums come from another query than these, so a difference may be below 0.
        self.started = max(0, self.started - other.started)
        self.succeeded = max(0, self.succeeded - other.succeeded)
        self.failed = max(0, self.failed - other.failed)
        self.waited_s = max(0.0, self.waited_s - other.waited_s)
        self.ran_s = max(0.0, self.ran_s - other.ran_s)
        self.waits = [max(0, count - subtracted) for count, subtracted in zip(self.waits, other.waits, strict=True)]
        self.runs = [max(0, count - subtracted) for count, subtracted in zip(self.runs, other.runs, strict=True)]


def estimate_quantile(counts: Sequence[int], quantile: float) -> float | None:
    """Return the time in seconds that this share of the jobs did not exceed; None without jobs.

    Estimated by linear interpolation within a bucket; for the last bucket, its lower bound is returned.
    """
    remaining = quantile * sum(counts)
    if not remaining:
        return None
    for place, count in enumerate(counts):
        if count and remaining <= count:
            lower = BOUNDS_S[place - 1] if place else 0.0
            upper = BOUNDS_S[place] if place < len(BOUNDS_S) else lower
            return lower + (upper - lower) * remaining / count
        remaining -= count
    return BOUNDS_S[-1]


class Recorder:
    """Thread-safe recorder; takes several jobs per call, to acquire its lock once."""

    def __init__(self, *, max_series: int = MAX_SERIES) -> None:
        self._max_series = max_series
        self._lock = threading.Lock()
        self._series: dict[tuple[str, str], Series] = {}

    def started(self, jobs: Iterable[JobTiming]) -> None:
        """Record jobs that were delivered to workers."""
        with self._lock:
            for job in jobs:
                series = self._series.get((job.queue, job.jobtype)) or self._find_or_add(job)
                series.started += 1
                series.waited_s += job.seconds
                series.waits[bisect_left(BOUNDS_S, job.seconds)] += 1

    def ended(self, jobs: Iterable[JobTiming], *, succeeded: bool) -> None:
        """Record jobs that their workers reported as ended."""
        with self._lock:
            for job in jobs:
                series = self._series.get((job.queue, job.jobtype)) or self._find_or_add(job)
                if succeeded:
                    series.succeeded += 1
                else:
                    series.failed += 1
                series.ran_s += job.seconds
                series.runs[bisect_left(BOUNDS_S, job.seconds)] += 1

    def take(self) -> dict[tuple[str, str], Series]:
        """Return and reset the sums since the last call, by queue and jobtype."""
        with self._lock:
            # Swapped, not copied: the caller writes to the database without this lock.
            series, self._series = self._series, {}
        return series

    def restore(self, series: dict[tuple[str, str], Series]) -> None:
        """Restore sums that could not be stored: the next `take` returns them, added to newer ones."""
        with self._lock:
            for (queue, jobtype), sums in series.items():
                self._find_or_add(JobTiming(queue, jobtype, 0.0)).add(sums)

    def _find_or_add(self, job: JobTiming) -> Series:
        key = job.queue, job.jobtype
        series = self._series.get(key)
        if series is None:
            # Queue and jobtype are chosen by clients, which could otherwise fill the memory.
            if len(self._series) >= self._max_series:
                key = OTHER, OTHER
            series = self._series.setdefault(key, Series())
        return series
