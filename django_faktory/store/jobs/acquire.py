"""Acquire the lock and the permits of claimed jobs, both in one transaction (ADR 0024).

On PostgreSQL only for what `faktory_acquire_1` could not give without waiting. A job that is refused becomes blocked in
the same transaction and keeps neither lock nor permits. With separate transactions, a sweep corrected a count that the
next transaction then decremented again: a limit of three let four jobs run.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.payloads import Reservation
from ..limits import limiters
from ..locks import locks
from ..store import Store


def acquire(store: Store, claimed: Sequence[Reservation], *, lease_s: float) -> list[Reservation]:
    """Return the claimed jobs that may run, with their locks and permits; block the remaining ones.

    Do not deliver a job before this has committed.
    """
    keyed = [job for job in claimed if job.lock_key is not None and job.lock_token is None]
    if not keyed:
        return limiters.acquire_permits(store, claimed)
    if all(job.permits != "" for job in claimed):
        locked = {job.jid: job for job in locks.acquire_locks(store, keyed, lease_s=lease_s)}
        return [
            locked.get(job.jid, job) for job in claimed if job.lock_key is None or job.lock_token or job.jid in locked
        ]
    return _acquire_both(store, claimed, keyed, lease_s)


def _acquire_both(
    store: Store, claimed: Sequence[Reservation], keyed: Sequence[Reservation], lease_s: float
) -> list[Reservation]:
    """Acquire locks, then permits, in the lock order of ADR 0024. A job without permits releases its lock again."""

    def verb(connection: BaseDatabaseWrapper) -> tuple[dict[str, int], list[Reservation]]:
        # Taking the locks also locks the rows of keyed jobs. Lock all claimed rows by id first: locking the remaining
        # ones afterwards would break the order of ids.
        if len(keyed) < len(claimed) and connection.features.has_select_for_update:
            rows = store.jobs.filter(jid__in=[job.jid for job in claimed]).order_by("pk")
            list(rows.select_for_update().values_list("pk", flat=True))
        tokens = locks.acquire_locks_in(connection, keyed, lease_s, store.clock())
        runnable = [msgspec.structs.replace(job, lock_token=tokens.get(job.jid, job.lock_token)) for job in claimed]
        runnable = [job for job in runnable if job.lock_key is None or job.lock_token is not None]
        return tokens, limiters.acquire_permits_in(connection, runnable, store.clock())

    tokens, acquired = limiters.run_with_limiters(store, verb)
    # Refused keys are checked once more after the commit: their holder may have released them meanwhile.
    locks.promote_waiters({job.lock_key for job in keyed if job.lock_key and job.jid not in tokens}, using=store.alias)
    return acquired
