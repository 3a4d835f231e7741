"""What one process sees of the jobs that pass through it: how many, how long they waited, how long they ran.

Sums and histograms by queue and task, until somebody takes them and adds them to the database's. Knows no database.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

BOUNDS_S = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0)
"""Upper ends of the histograms' buckets; a last one takes the rest."""

BUCKETS = len(BOUNDS_S) + 1
MOST_SERIES = 1000
"""Pairs of queue and task a process tells apart between two takes: their names are the clients' to choose."""

OTHER = "(other)"


class Passed(NamedTuple):
    """A job that began, or ended: after so many seconds of waiting, or of running."""

    queue: str
    jobtype: str
    seconds: float


def _none() -> list[int]:
    return [0] * BUCKETS


@dataclass(slots=True)
class Series:
    """The sums of one queue and task."""

    started: int = 0
    succeeded: int = 0
    failed: int = 0
    waited_s: float = 0.0
    ran_s: float = 0.0
    waits: list[int] = field(default_factory=_none)
    """How many waited up to each of `BOUNDS_S`, and no less than the bound before it."""
    runs: list[int] = field(default_factory=_none)

    def add(self, other: Series) -> None:
        """Add what another one has."""
        self.started += other.started
        self.succeeded += other.succeeded
        self.failed += other.failed
        self.waited_s += other.waited_s
        self.ran_s += other.ran_s
        self.waits = [sum(pair) for pair in zip(self.waits, other.waits, strict=True)]
        self.runs = [sum(pair) for pair in zip(self.runs, other.runs, strict=True)]

    def subtract(self, other: Series) -> None:
        """Take away what another one has; no sum becomes negative."""
        self.started = max(0, self.started - other.started)
        self.succeeded = max(0, self.succeeded - other.succeeded)
        self.failed = max(0, self.failed - other.failed)
        self.waited_s = max(0.0, self.waited_s - other.waited_s)
        self.ran_s = max(0.0, self.ran_s - other.ran_s)
        self.waits = [max(0, mine - theirs) for mine, theirs in zip(self.waits, other.waits, strict=True)]
        self.runs = [max(0, mine - theirs) for mine, theirs in zip(self.runs, other.runs, strict=True)]


class Recorder:
    """Takes note, from any thread; a set of jobs at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[tuple[str, str], Series] = {}

    def started(self, jobs: Iterable[Passed]) -> None:
        """These were handed to workers."""
        with self._lock:
            for job in jobs:
                series = self._series.get((job.queue, job.jobtype)) or self._of(job)
                series.started += 1
                series.waited_s += job.seconds
                series.waits[bisect_left(BOUNDS_S, job.seconds)] += 1

    def ended(self, jobs: Iterable[Passed], *, well: bool) -> None:
        """These were reported by the workers that held them."""
        with self._lock:
            for job in jobs:
                series = self._series.get((job.queue, job.jobtype)) or self._of(job)
                if well:
                    series.succeeded += 1
                else:
                    series.failed += 1
                series.ran_s += job.seconds
                series.runs[bisect_left(BOUNDS_S, job.seconds)] += 1

    def take(self) -> dict[tuple[str, str], Series]:
        """What was noted since the last time, by queue and jobtype."""
        with self._lock:
            taken, self._series = self._series, {}
        return taken

    def give_back(self, taken: dict[tuple[str, str], Series]) -> None:
        """These could not be kept: they are taken again, with what was noted since."""
        with self._lock:
            for (queue, jobtype), series in taken.items():
                self._of(Passed(queue, jobtype, 0.0)).add(series)

    def _of(self, job: Passed) -> Series:
        key = job.queue, job.jobtype
        found = self._series.get(key)
        if found is None:
            if len(self._series) >= MOST_SERIES:
                key = OTHER, OTHER
            found = self._series.setdefault(key, Series())
        return found
