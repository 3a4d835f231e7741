"""A `Store` is a database with jobs: the first parameter of functions that change jobs in transactions of their own.

Functions that run inside an open transaction take its connection instead, and reads of one query take an alias.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from datetime import date, datetime
from functools import cached_property, partial
from random import Random

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet

from ..core.histograms import JobTiming, Recorder
from ..core.lifecycle import DEAD_FOR_S
from ..core.payloads import Reservation
from ..models import History, Job, JobQuerySet
from . import notifier
from .dialects import clock_of, dialect_of
from .dialects.base import DELIVERY_LEASE_S, Dialect
from .dialects.bounds import Bounds
from .dialects.values import EndedRun
from .jobs.unanswered_claims import ClaimNumbers
from .transactions import after_commit

_RNG = Random()

Export = Callable[[date | None, QuerySet[History]], object]
"""Receives the rows of a day before they are deleted; without a day, rows that leave one by one."""


class Store:
    """A database with its clock, its periods of time, and the receivers of what happens to jobs.

    `now` is a fixed time for tests. Otherwise `clock` returns None, and each statement uses the database's own time.
    """

    def __init__(
        self,
        alias: str = "default",
        *,
        now: datetime | None = None,
        rng: Random = _RNG,
        dead_for_s: int = DEAD_FOR_S,
        max_interruptions: int | None = None,
        worker_timeout_s: float = 60.0,
        lock_lease_s: float = 35.0,
        delivery_lease_s: float = DELIVERY_LEASE_S,
        commit_within_s: float = 1800.0,
        announce: Callable[[str, Collection[str]], None] = notifier.announce,
        recorder: Recorder | None = None,
        export: Export | None = None,
        result_ttl_s: float = 86_400,
    ) -> None:
        self.alias = alias
        self.clock: Callable[[], datetime | None] = lambda: now
        self.rng = rng
        self.dead_for_s = dead_for_s
        self.max_interruptions = max_interruptions
        self.worker_timeout_s = worker_timeout_s
        self.lock_lease_s = lock_lease_s
        self.delivery_lease_s = delivery_lease_s
        self.commit_within_s = commit_within_s
        self.claim_numbers = ClaimNumbers()
        self.bounds = Bounds()
        self._announce = announce
        self._recorder = recorder
        self.export = export
        self.result_ttl_s = result_ttl_s

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connections[self.alias]

    @cached_property
    def dialect(self) -> Dialect:
        return dialect_of(self.connection)

    @property
    def jobs(self) -> JobQuerySet:
        return Job.live.using(self.alias)

    def now(self) -> datetime:
        """Return the time: `clock`, or the database's."""
        return clock_of(self.connection, self.clock())

    def announce(self, queues: Collection[str]) -> None:
        """Wake workers that wait for jobs of these queues, after the commit: one that wakes earlier finds no job."""
        if queues:
            after_commit(self.alias, self._announce, self.alias, queues)

    def record_started(self, fetched: Iterable[Iterable[Reservation]], *, from_buffer: bool = False) -> None:
        """Record that the fetched jobs were delivered; prefetched ones start when they leave the buffer."""
        if not self._recorder:
            return
        timings = [
            JobTiming(job.queue, job.jobtype, job.waited_s)
            for jobs in fetched
            for job in jobs
            if from_buffer or not job.is_prefetched
        ]
        if timings:
            self._recorder.started(timings)

    def record_ended(self, runs: Collection[EndedRun], *, succeeded: bool = True) -> None:
        """Record the ends of these runs, once the transaction commits."""
        if self._recorder and runs:
            transaction.on_commit(partial(self._recorder.ended, _timings_of(runs), succeeded=succeeded), self.alias)

    def record_ended_now(self, runs: Collection[EndedRun]) -> None:
        """Record the ends of successful runs, of a transaction that Django's commit hooks do not know."""
        if self._recorder and runs:
            self._recorder.ended(_timings_of(runs), succeeded=True)


def _timings_of(ended: Collection[EndedRun]) -> list[JobTiming]:
    return [JobTiming(job.queue, job.jobtype, job.ran_s) for job in ended]
