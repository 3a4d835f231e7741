"""The broker that is this Django database: transaction, alias and mapping; no rules (they are the store's)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from django.db import connections, transaction

from .. import wakeups
from ..errors import BrokerUnavailable, FaktoryError
from ..payloads import Ack, Beat, Failure, FetchRequest, JobPayload, Reservation, WorkerIdentity
from ..store import failures, jobs, stats, workers
from .base import Broker


class OrmBroker(Broker):
    """Jobs are rows of the database `alias`. Inside a transaction push joins it; every other verb has its own."""

    transactional = True
    keeps_results = True

    def __init__(
        self,
        alias: str = "default",
        *,
        dead_for_s: int = 180 * 86_400,
        announce: Callable[[str, Collection[str]], None] = wakeups.announce,
    ) -> None:
        self.alias = alias
        self.dead_for_s = dead_for_s
        self._announce = announce
        self._known_queues: set[str] = set()

    def push(self, jobs_: Sequence[JobPayload]) -> list[FaktoryError | None]:
        """See Broker. The hint that work has come is sent after the commit: before, it would cost a lock there."""
        jobs.push(jobs_, using=self.alias)
        queues = {job.queue for job in jobs_}
        if queues:
            transaction.on_commit(lambda: self._after_push(queues), using=self.alias)
        return [None] * len(jobs_)

    def _after_push(self, queues: set[str]) -> None:
        self._announce(self.alias, queues)
        unknown = queues - self._known_queues
        if unknown:
            try:
                stats.add_queues(unknown, using=self.alias)
            except BrokerUnavailable:  # the jobs are stored; an empty queue's line in INFO can wait for the next push
                return
            self._known_queues |= unknown

    def fetch(self, requests: Sequence[FetchRequest]) -> list[list[Reservation]]:
        """See Broker."""
        return jobs.fetch(requests, using=self.alias)

    def ack(self, acks: Sequence[Ack]) -> list[bool]:
        """See Broker."""
        return jobs.ack(acks, using=self.alias)

    def fail(self, failures_: Sequence[Failure]) -> list[FaktoryError | bool]:
        """See Broker."""
        return failures.fail(failures_, using=self.alias, dead_for_s=self.dead_for_s)

    def release(self, reservations: Sequence[Reservation]) -> int:
        """See Broker."""
        released = jobs.release(reservations, using=self.alias)
        if released:
            self._announce(self.alias, {job.queue for job in reservations})
        return released

    def hello(self, worker: WorkerIdentity) -> None:
        """See Broker."""
        workers.hello(worker, using=self.alias)

    def beat(self, beats: Sequence[Beat]) -> list[FaktoryError | str]:
        """See Broker."""
        return workers.beat(beats, using=self.alias)

    def bye(self, wids: Sequence[str]) -> None:
        """See Broker."""
        workers.bye(wids, using=self.alias)

    def lost(self, wids: Sequence[str]) -> int:
        """See Broker."""
        return failures.lose(wids, using=self.alias, dead_for_s=self.dead_for_s)

    def info(self) -> dict[str, Any]:
        """See Broker."""
        return stats.snapshot(using=self.alias)

    def close(self) -> None:
        """Close this thread's database connection."""
        connections[self.alias].close()
