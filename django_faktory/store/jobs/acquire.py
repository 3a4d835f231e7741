"""Acquire the lock and the permits of claimed jobs, both in one transaction (ADR 0024).

A job that is refused becomes blocked in the same transaction and keeps neither lock nor permits. With separate
transactions, a sweep corrected a count that the next transaction then decremented again: a limit of three let four jobs
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.payloads import Reservation
from ...models import Job
from ..limits import limiters
from ..locks import locks


def acquire(
    claimed: Sequence[Reservation], *, using: str, lease_s: float, now: datetime | None = None
) -> list[Reservation]:
    """Return the claimed jobs that may run, with their locks and permits; block the remaining ones.

    Do not deliver a job before this has committed.
    """
    keyed = [job for job in claimed if job.lock_key is not None and job.lock_token is None]
    if not keyed:
        return limiters.acquire_permits(claimed, using=using, now=now)
    if all(job.permits != "" for job in claimed):
        locked = {job.jid: job for job in locks.acquire_locks(keyed, using=using, lease_s=lease_s, now=now)}
        return [
            locked.get(job.jid, job) for job in claimed if job.lock_key is None or job.lock_token or job.jid in locked
        ]
    return _acquire_both(claimed, keyed, using, lease_s, now)


def _acquire_both(
    claimed: Sequence[Reservation], keyed: Sequence[Reservation], using: str, lease_s: float, now: datetime | None
) -> list[Reservation]:
    """Acquire locks, then permits, in the lock order of ADR 0024. A job without permits releases its lock again."""

    def verb(connection: BaseDatabaseWrapper) -> tuple[dict[str, int], list[Reservation]]:
        # Taking the locks also locks the rows of keyed jobs. Lock all claimed rows by id first: locking the remaining
        # ones afterwards would break the order of ids.
        if len(keyed) < len(claimed) and connection.features.has_select_for_update:
            rows = Job.objects.using(using).filter(jid__in=[job.jid for job in claimed]).order_by("pk")
            list(rows.select_for_update().values_list("pk", flat=True))
        tokens = locks.acquire_locks_in(connection, keyed, lease_s, now)
        runnable = [msgspec.structs.replace(job, lock_token=tokens.get(job.jid, job.lock_token)) for job in claimed]
        runnable = [job for job in runnable if job.lock_key is None or job.lock_token is not None]
        return tokens, limiters.acquire_permits_in(connection, runnable, now)

    tokens, acquired = limiters.run_with_limiters(verb, using=using)
    # Refused keys are checked once more after the commit: their holder may have released them meanwhile.
    locks.promote_waiters({job.lock_key for job in keyed if job.lock_key and job.jid not in tokens}, using=using)
    return acquired
