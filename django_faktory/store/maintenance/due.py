"""Time-based changes of jobs: `enqueue_due`, `expire` and `purge`.

Each function is safe to run on several nodes at once; there is no leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet
from django.db.models.functions import Now

from ...core.json.fields import later
from ...core.lifecycle import DELAYED, FINISHED, GONE, Event, State, sources
from ...models import Job, JobQuerySet
from ..batches import progress
from ..deletion import delete_locked
from ..limits import limiters
from ..locks import locks
from ..store import Store
from ..transactions import read, run
from . import retention
from .turns import LONG_AGO

CHUNK = 500
CLEAR_PORTION = 20
"""Sets of dead rows that lose their expiry before maintenance continues with its other steps."""


def enqueue_due(store: Store, *, limit: int = CHUNK, since: datetime | None = None) -> set[str]:
    """Enqueue at most `limit` jobs that are due, the earliest not before `since`; return their queues."""

    def verb(connection: BaseDatabaseWrapper) -> set[str]:
        rows: list[tuple[int, str, str | None]] = []
        for jobs in find_delayed_jobs(connection, using=store.alias):
            due = jobs.filter(run_at__gte=since or LONG_AGO, run_at__lte=store.clock() or Now()).select_for_update(
                skip_locked=True
            )
            rows += due.values_list("pk", "queue", "lock_key")[: limit - len(rows)]
        return enqueue(store, connection, rows)

    return run(store.alias, verb)


def enqueue(store: Store, connection: BaseDatabaseWrapper, rows: Sequence[tuple[int, str, str | None]]) -> set[str]:
    """Enqueue locked jobs, given by id, queue and lock key, that waited for their time; return their queues."""
    if rows:
        clock = store.now()
        # The state is checked again: on SQLite, without row locks, another node may have enqueued the same rows.
        store.jobs.filter(pk__in=[pk for pk, _, _ in rows]).in_state(*DELAYED).update(
            state=State.ENQUEUED, enqueued_at=clock, run_at=None, wid=""
        )
        locks.block_if_locked(connection, [pk for pk, _, key in rows if key])
    return {queue for _, queue, _ in rows}


def find_delayed_jobs(connection: BaseDatabaseWrapper, *, using: str) -> list[Any]:
    """Return queries of scheduled and retrying jobs, soonest first.

    One query, or one per state if the state is the first column of the index (databases without partial indexes). A
    single query over both states would there read, and lock, every due row to find the first.
    """
    jobs = Job.live.using(using).order_by("run_at")
    if connection.features.supports_partial_indexes:
        return [jobs.in_state(*DELAYED)]
    return [jobs.filter(state=str(state)) for state in sorted(DELAYED)]


def expire(store: Store, *, limit: int = CHUNK) -> int:
    """Expire at most `limit` jobs that no worker took in time; return how many.

    Jobs with a `result_ttl`, such as those of Django tasks, stay as expired for that time; other jobs are deleted.
    """
    all_jobs, expired = store.jobs, find_expired_jobs(store)
    if not _is_partial(store.alias):
        _clear_expiries(store)
    first_pk = expired.values_list("pk", flat=True)[:1]  # ordered by the index; `exists()` may scan the table
    if not read(first_pk):  # nearly always true
        return 0

    def verb(connection: BaseDatabaseWrapper) -> int:
        # Not `transitions.leave`, which would read these rows by id three times more.
        rows = list(expired.only(*progress.FIELDS, *_EXPIRY_FIELDS).select_for_update(skip_locked=True)[:limit])
        if not rows:
            return 0
        clock = store.now()
        ready = [job for job in rows if job.state == State.ENQUEUED]
        # Such a job keeps later jobs of its key and limiter blocked, so its expiry has to make another one ready.
        keys = {job.lock_key for job in rows if job.lock_key and locks.keeps_others_blocked(job)}
        locks.promote_waiters_later(connection, keys)
        limiters.promote_waiters_later(connection, {job.limiter for job in ready})
        ids = [job.pk for job in rows if job.result_ttl is None]
        delete_locked(all_jobs.filter(pk__in=ids), ids)
        for ttl in {job.result_ttl for job in rows if job.result_ttl is not None}:
            kept = [job.pk for job in rows if job.result_ttl == ttl]
            with connection.cursor() as cursor:
                store.dialect.keep(cursor, kept, State.EXPIRED, clock, purge_at=later(clock, ttl))
        members = sorted((job for job in rows if job.bid or job.callback_of), key=lambda job: job.pk)
        progress.record_changes(connection, [progress.Change(job, State.EXPIRED) for job in members], clock)
        return len(rows)

    return run(store.alias, verb)


_EXPIRY_FIELDS = ("state", "result_ttl", "lock_key", "limiter")


def find_expired_jobs(store: Store) -> QuerySet[Job]:
    """Return jobs that have waited past their `expires_in`, earliest expiry first."""
    jobs = find_expiring_jobs(using=store.alias).filter(expires_at__lte=store.clock() or Now())
    return jobs if _is_partial(store.alias) else jobs.in_state(*sources(Event.EXPIRE))


def find_expiring_jobs(*, using: str) -> JobQuerySet:
    """Return jobs with an expiry in the order of its index; the first shows whether `expire` has anything to do.

    A dead row keeps its expiry. If the index has no condition, the row is in it until `expire` clears the expiry.
    """
    jobs = Job.live.using(using).filter(expires_at__isnull=False).order_by("expires_at")
    return jobs.in_state(*sources(Event.EXPIRE)) if _is_partial(using) else jobs.exclude(state=State.WORKING)


def _is_partial(using: str) -> bool:
    return connections[using].features.supports_partial_indexes


def _clear_expiries(store: Store, *, chunk_size: int = CHUNK, max_chunks: int = CLEAR_PORTION) -> None:
    """Remove dead rows from the head of the expiry index (MariaDB), a bounded number at a time.

    The index has no condition there. Otherwise each read of the head would read past every dead row.
    """
    finished = find_expiring_jobs(using=store.alias).in_state(State.DEAD).filter(expires_at__lte=store.clock() or Now())

    def verb(_: BaseDatabaseWrapper) -> int:
        ids = list(finished.select_for_update(skip_locked=True).values_list("pk", flat=True)[:chunk_size])
        store.jobs.filter(pk__in=ids).update(expires_at=None)
        return len(ids)

    for _ in range(max_chunks):
        if run(store.alias, verb) < chunk_size:
            return


def purge(store: Store, *, limit: int = CHUNK) -> int:
    """Delete at most `limit` dead jobs after their retention, and `limit` ended ones that leave one by one.

    Return the larger of both numbers.
    """
    return max(_purge_dead(store, limit), retention.purge(store, limit=limit))


def _purge_dead(store: Store, limit: int) -> int:
    # All finished states; in this table they are dead. With that state alone, PostgreSQL may take the indexes of
    # failed jobs instead. MariaDB's index begins with the state.
    states = FINISHED if _is_partial(store.alias) else [State.DEAD]
    due = store.jobs.in_state(*states).filter(purge_at__lt=store.clock() or Now()).order_by("purge_at")
    # Without locks: MariaDB locks the row after the range too. After the last dead job in its index comes the oldest
    # job of a queue, and a FETCH would skip it.
    if not read(due.values_list("pk")[:1]):
        return 0

    def verb(_: BaseDatabaseWrapper) -> int:
        rows = list(due.only(*progress.FIELDS).select_for_update(skip_locked=True)[:limit])
        ids = [job.pk for job in rows]
        # The state is compared again where no row is locked: a dead job may have been requeued since.
        deleted = delete_locked(store.jobs.filter(pk__in=ids).in_state(State.DEAD), ids)
        # A batch waits for a dead member until it is deleted.
        members = sorted((job for job in rows if job.bid or job.callback_of), key=lambda job: job.pk)
        progress.record_all(store.alias, members, GONE)
        return deleted

    return run(store.alias, verb)
