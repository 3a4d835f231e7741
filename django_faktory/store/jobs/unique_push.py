"""Push jobs with a unique key or a batch: stored rows decide whether they are accepted. Rules: W10, W26, W27.

Plain jobs take this path only when pushed together with such a job (ADR 0023). The unique key is a column with a unique
constraint: deleting the row frees the key, and of two nodes that push the same key at the same time only one can
succeed. The second insert waits for the first transaction and then sees its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from operator import itemgetter

import msgspec
from django.db import IntegrityError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.lifecycle import FINISHED, LIVE, State
from ...errors import FaktoryError, NotUnique
from ...models import Job
from ..batches import membership
from ..chunks import chunks
from ..deletion import delete_locked
from ..dialects import clock_of, dialect_of
from ..dialects.base import OrderedJobs, insertion_key, unique_key_of
from ..dialects.job_columns import NewRow, new_row
from ..locks import locks

CHUNK = 500
MAX_ROUNDS = 4
"""Maximum attempts of the slow path: each retry means that another push committed between lookup and insert."""


def push(
    connection: BaseDatabaseWrapper,
    jobs: OrderedJobs,
    now: datetime | None,
    *,
    callback_of: str | None = None,
    chunk_size: int = CHUNK,
) -> dict[str, FaktoryError]:
    """Store jobs with different jids in one transaction, or in the caller's; return the refused jobs' errors by jid.

    `jobs` must be in `insertion_order`. If the dialect supports it, one statement inserts the jobs that conflict with
    no stored row; the remaining jobs take the slow path. Of several jobs with one key, the one with the lowest place
    wins. A stored job that has not finished stays unchanged, whatever its key (W10). With `callback_of` the jobs are
    callbacks of that batch.
    """
    if callback_of is not None or not _can_insert_directly(connection, jobs):
        return _push_slow_path(connection, jobs, now, callback_of, chunk_size=chunk_size)
    # A lone job is inserted by one statement, which needs no transaction of its own.
    is_atomic = len(jobs) == 1 or connection.in_atomic_block
    with nullcontext() if is_atomic else transaction.atomic(using=connection.alias):
        undecided, refusals, now = _insert_directly(connection, jobs, now, chunk_size)
        return refusals | _push_slow_path(connection, undecided, now, chunk_size=chunk_size) if undecided else refusals


def _can_insert_directly(connection: BaseDatabaseWrapper, jobs: OrderedJobs) -> bool:
    """Return True if one statement can insert the jobs that conflict with no stored row.

    Members of a batch are excluded: they are counted in the batch's row, which must be locked first.
    """
    return dialect_of(connection).stores_keyed and not any(job.options and job.options.bid for _, job in jobs)


def _insert_directly(
    connection: BaseDatabaseWrapper, jobs: OrderedJobs, now: datetime | None, chunk_size: int
) -> tuple[OrderedJobs, dict[str, FaktoryError], datetime | None]:
    """Insert the jobs that conflict with no stored row; return the undecided jobs, the refused jobs and the time."""
    dialect = dialect_of(connection)
    # Only the first job of each key: if the second were inserted because the first has the jid of a finished job, the
    # slow path would refuse the first (ADR 0023).
    first_jobs = list({unique_key_of(job) or (job.jid,): (place, job) for place, job in reversed(jobs)}.values())[::-1]
    # Several statements of one transaction: lock all rows they may meet before the first insert (ADR 0030).
    if len(first_jobs) > chunk_size or len(first_jobs) < len(jobs):
        now, _ = dialect.lock_stored(connection, jobs, now)
    decided_jids: set[str] = set()
    refusals: dict[str, FaktoryError] = {}
    for chunk in chunks(first_jobs, chunk_size):
        stored = dialect.insert_if_absent(connection, chunk, now)
        now = stored.now
        locks.promote_waiters_later(connection, stored.blocked)
        decided_jids.update(stored.jids, stored.alive)
        refusals |= {jid: NotUnique(jid) for jid in stored.refused}
    undecided = [(place, job) for place, job in jobs if job.jid not in decided_jids and job.jid not in refusals]
    return undecided, refusals, now


def _push_slow_path(
    connection: BaseDatabaseWrapper,
    jobs: OrderedJobs,
    now: datetime | None,
    callback_of: str | None = None,
    *,
    chunk_size: int = CHUNK,
) -> dict[str, FaktoryError]:
    """Store jobs by the slow path: look up conflicting rows, then insert; retry if another push came in between."""
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
    clock = clock_of(connection, now)
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
        old_row = stored.get(job.jid)
        # Keeps growing, so that late reports on the old job stay fenced.
        row.attempt = old_row.attempt if old_row else 0
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
    """Return True if the stored row must be kept: it has not finished (W10), or a batch still waits for it."""
    if stored is None:
        return False
    return stored.state in LIVE or (stored.state == State.DEAD and (stored.bid or stored.callback_of) is not None)


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

    Locks these jobs and the finished jobs to be `replaced`, ordered by id, before any batch is locked (ADR 0024).
    """
    jobs = Job.objects.using(connection.alias)
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
    jobs = Job.objects.using(connection.alias).only("jid", "state", "attempt", "bid", "callback_of")
    return {job.jid: job for chunk in chunks(jids, CHUNK) for job in jobs.filter(jid__in=chunk)}


def _find_holders(connection: BaseDatabaseWrapper, keys: Sequence[str]) -> dict[str, str]:
    """Map each unique key to the jid that holds it."""
    jid_by_key = Job.objects.using(connection.alias).values_list("unique_key", "jid")
    return {key: jid for chunk in chunks(keys, CHUNK) for key, jid in jid_by_key.filter(unique_key__in=chunk) if key}


def _replace(connection: BaseDatabaseWrapper, finished: Sequence[int], rows: Sequence[NewRow], chunk_size: int) -> None:
    """Delete the finished rows with the same jids, then insert the new rows in insertion order."""
    for chunk in chunks(sorted(finished), chunk_size):
        delete_locked(Job.objects.using(connection.alias).filter(pk__in=chunk).in_state(*FINISHED))
    if not rows:
        return
    # Not `bulk_create`: it takes 200 µs of CPU for each job, during which SQLite's other writers wait.
    ordered = sorted(rows, key=lambda row: insertion_key(row.jid, row.unique_key))
    with connection.cursor() as cursor:
        for portion in chunks(ordered, chunk_size):
            dialect_of(connection).write_rows(cursor, [msgspec.structs.astuple(row) for row in portion])
