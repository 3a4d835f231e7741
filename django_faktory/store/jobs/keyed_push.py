"""Push jobs of a batch, and jobs with keys that `Dialect.insert` does not take. Rules: W10, W26, W27.

Other jobs take this path only when pushed together with such a job. The unique key is a column with a unique
constraint: deleting the row frees the key, and of two nodes that push the same key at the same time only one can
succeed. The second insert waits for the first transaction and then sees its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from operator import itemgetter

import msgspec
from django.db import IntegrityError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.lifecycle import State
from ...errors import FaktoryError, NotUnique
from ...models import Job
from ..batches import membership
from ..chunks import chunks
from ..deletion import delete_locked
from ..dialects import dialect_of
from ..dialects.base import OrderedJobs, insertion_key, unique_key_of
from ..dialects.job_columns import NewRow, new_row
from ..locks import locks

CHUNK = 500
MAX_ROUNDS = 4
"""Maximum attempts: each retry means that another push committed between lookup and insert."""


def push(
    connection: BaseDatabaseWrapper,
    jobs: OrderedJobs,
    now: datetime | None,
    callback_of: str | None = None,
    *,
    chunk_size: int = CHUNK,
) -> dict[str, FaktoryError]:
    """Store jobs with different jids in one transaction, or in the caller's; return the refused jobs' errors by jid.

    `jobs` must be in `insertion_order`. Of several jobs with one key, the one with the lowest place wins. A stored job
    that has not finished stays unchanged, whatever its key (W10). With `callback_of` the jobs are callbacks of that
    batch. Looks up conflicting rows, then inserts; repeats both if another push came in between.
    """
    push_these = partial(_push_once, connection, now=now, callback_of=callback_of, chunk_size=chunk_size)
    for _ in range(MAX_ROUNDS):
        try:
            with transaction.atomic(using=connection.alias):
                return push_these(jobs)
        except IntegrityError:  # another push took a key or jid meanwhile: the next attempt sees its row
            continue
    # In a caller's transaction with snapshot isolation the conflicting row stays invisible to every retry. Insert the
    # jobs one by one: the constraint then shows which of them conflict.
    with transaction.atomic(using=connection.alias):
        return _push_one_by_one(connection, jobs, push_these)


def _push_once(
    connection: BaseDatabaseWrapper,
    placed_jobs: OrderedJobs,
    *,
    now: datetime | None,
    callback_of: str | None,
    chunk_size: int,
) -> dict[str, FaktoryError]:
    with connection.cursor() as cursor:
        clock = now or dialect_of(connection).time_of_write(cursor)
    jobs = [job for _, job in placed_jobs]
    # Lock order (ADR 0024): existing jobs, then batches, then lock rows, and new jobs last.
    keys = sorted({key for job in jobs if (key := unique_key_of(job))})
    stored = _find_stored(connection, [job.jid for job in jobs])
    replaced = [old_row.pk for old_row in stored.values() if not _must_keep(old_row)]
    _clear_expired_keys(connection, keys, clock, replaced=replaced, chunk_size=chunk_size)
    fresh = [(place, job) for place, job in placed_jobs if not _must_keep(stored.get(job.jid))]
    refusals = membership.admit(connection, [job for _, job in fresh], clock)
    holders = _find_holders(connection, keys)
    rows: list[NewRow] = []
    adapt = connection.ops.adapt_datetimefield_value
    created_at = adapt(clock)
    lock_queue = locks.LockQueue(
        connection, {job.options.lock_key for _, job in fresh if job.options and job.options.lock_key}
    )
    for place, job in sorted(fresh, key=itemgetter(0)):  # the first of each key wins
        if job.jid in refusals:
            continue
        row = new_row(job, clock, created_at, place, adapt)
        if row.unique_key and holders.setdefault(row.unique_key, job.jid) != job.jid:
            refusals[job.jid] = NotUnique(job.jid)
            continue
        row.callback_of = callback_of
        if (
            row.lock_key
            and row.state == State.ENQUEUED
            and not lock_queue.try_add_ready(row.lock_key, row.queue, row.sort_priority)
        ):
            row.state = str(State.BLOCKED)
        rows.append(row)
    locks.promote_waiters_later(
        connection, {row.lock_key for row in rows if row.lock_key and row.state == State.BLOCKED}
    )
    membership.count_new_members(connection, [row.bid for row in rows if row.bid])
    _replace(connection, [stored[row.jid].pk for row in rows if row.jid in stored], rows, chunk_size)
    return refusals


def _must_keep(stored: Job | None) -> bool:
    """Return True if the stored row must be kept: it is not dead (W10), or a batch still waits for it."""
    return stored is not None and (stored.state != State.DEAD or (stored.bid or stored.callback_of) is not None)


def _push_one_by_one(
    connection: BaseDatabaseWrapper,
    jobs: OrderedJobs,
    push_these: Callable[[OrderedJobs], dict[str, FaktoryError]],
) -> dict[str, FaktoryError]:
    refusals: dict[str, FaktoryError] = {}
    for place, job in jobs:
        try:
            with transaction.atomic(using=connection.alias):
                refusals |= push_these([(place, job)])
        except IntegrityError:
            if unique_key_of(job):
                refusals[job.jid] = NotUnique(job.jid)
    return refusals


def _clear_expired_keys(
    connection: BaseDatabaseWrapper, keys: Sequence[str], now: datetime, *, replaced: Sequence[int], chunk_size: int
) -> None:
    """Clear expired unique keys of other jobs, so that new jobs can use them.

    Locks these jobs and the dead jobs to be `replaced`, ordered by id, before any batch is locked (ADR 0024).
    """
    jobs = Job.live.using(connection.alias)
    overdue = [
        pk
        for chunk in chunks(keys, chunk_size)
        for pk in jobs.filter(unique_key__in=chunk, unique_expires_at__lte=now).values_list("pk", flat=True)
    ]
    for ids in chunks(sorted({*overdue, *replaced}), chunk_size):
        if connection.features.has_select_for_update:
            list(jobs.filter(pk__in=ids).order_by("pk").select_for_update().values_list("pk", flat=True))
    for ids in chunks(overdue, chunk_size):
        jobs.filter(pk__in=ids, unique_key__in=keys, unique_expires_at__lte=now).update(unique_key=None)


def _find_stored(connection: BaseDatabaseWrapper, jids: Sequence[str]) -> dict[str, Job]:
    jobs = Job.live.using(connection.alias).only("jid", "state", "bid", "callback_of")
    return {job.jid: job for chunk in chunks(jids, CHUNK) for job in jobs.filter(jid__in=chunk)}


def _find_holders(connection: BaseDatabaseWrapper, keys: Sequence[str]) -> dict[str, str]:
    """Map each unique key to the jid that holds it."""
    jid_by_key = Job.live.using(connection.alias).values_list("unique_key", "jid")
    return {key: jid for chunk in chunks(keys, CHUNK) for key, jid in jid_by_key.filter(unique_key__in=chunk) if key}


def _replace(connection: BaseDatabaseWrapper, dead: Sequence[int], rows: Sequence[NewRow], chunk_size: int) -> None:
    """Delete the dead rows with the same jids, then insert the new rows in insertion order."""
    for chunk in chunks(sorted(dead), chunk_size):
        delete_locked(Job.live.using(connection.alias).filter(pk__in=chunk).in_state(State.DEAD))
    if not rows:
        return
    # Not `bulk_create`: it takes 200 µs of CPU for each job, during which SQLite's other writers wait.
    ordered = sorted(rows, key=lambda row: insertion_key(row.jid, row.unique_key))
    with connection.cursor() as cursor:
        for portion in chunks(ordered, chunk_size):
            dialect_of(connection).write_rows(cursor, [msgspec.structs.astuple(row) for row in portion])
