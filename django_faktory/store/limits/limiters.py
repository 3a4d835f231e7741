"""Limiters: give claimed jobs their permits, and block the jobs for which a limit has no room. ADR 0016.

Invariant at every commit: the `in_use` of a `Limiter` equals the number of jobs with its id in `permits`. Both
change in one transaction, `in_use` by the number of rows that the transaction changed. A claim marks jobs that need
permits; `acquire_permits` gives or refuses them, `repair` gives missing ones, and `release` returns them in the
transaction that ends the run. On PostgreSQL `faktory_acquire_1` gives permits if all jobs of a claim get theirs, and
`faktory_free_permits_1` returns those of a success; every refusal is here. Limiters are locked by id, after jobs and
lock rows (ADR 0024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

import msgspec
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.models import F, QuerySet
from django.db.models.functions import Now

from ...core.lifecycle import State
from ...core.limits import LimiterState, Scope, allocate_permits, family_of, format_permits, parse_permits
from ...core.logs import get_logger
from ...core.payloads import Reservation
from ...models import JobQuerySet, Limit, Limiter
from ..dialects import dialect_of
from ..dialects.base import Dialect
from ..locks import locks
from ..store import Store
from ..transactions import after_commit, read, retry_skipped, run
from . import sql

logger = get_logger(__name__)

CHUNK = 500
IDLE_S = 3600.0
"""Seconds that the limiter of an unused key is kept."""

T = TypeVar("T")


class _MissingLimiters(Exception):
    """Raised if keys have a limit and no limiter yet.

    The transaction is rolled back, the limiters are created, and it is retried.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__()
        self.keys = keys


def acquire_permits(store: Store, reservations: Sequence[Reservation]) -> list[Reservation]:
    """Give permits to jobs just claimed; return the jobs that may start.

    Jobs that no limit concerns are returned too. The other jobs become blocked; a job that only the limit of its queue
    refuses stays enqueued, and claims skip the queue. Do not deliver a job before this is committed. A set of jobs
    takes one transaction of a few statements.
    """
    limited_jobs = [job for job in reservations if job.permits == ""]
    if not limited_jobs:
        return list(reservations)
    permits = run_with_limiters(store, lambda connection: _acquire_permits(connection, limited_jobs, store.clock()))
    return _with_permits(reservations, permits)


def acquire_permits_in(
    connection: BaseDatabaseWrapper, reservations: Sequence[Reservation], now: datetime | None
) -> list[Reservation]:
    """Give permits inside a transaction of `run_with_limiters`. A job that is blocked releases its lock."""
    limited_jobs = [job for job in reservations if job.permits == ""]
    if not limited_jobs:
        return list(reservations)
    return _with_permits(reservations, _acquire_permits(connection, limited_jobs, now))


def _with_permits(reservations: Sequence[Reservation], permits: Mapping[str, str | None]) -> list[Reservation]:
    return [
        job if job.permits != "" else msgspec.structs.replace(job, permits=permits[job.jid])
        for job in reservations
        if job.permits != "" or job.jid in permits
    ]


def run_with_limiters(store: Store, verb: Callable[[BaseDatabaseWrapper], T]) -> T:
    """Run a function that calls `acquire_permits_in`; create the limiters of new keys first."""
    while True:
        try:
            # The caller's transaction needs a savepoint: `_MissingLimiters` must undo this attempt only.
            with transaction.atomic(using=store.alias) if store.connection.in_atomic_block else nullcontext():
                return run(store.alias, verb)
        except _MissingLimiters as error:
            create_limiters(error.keys, using=store.alias)


def _acquire_permits(
    connection: BaseDatabaseWrapper, reservations: Sequence[Reservation], now: datetime | None
) -> dict[str, str | None]:
    dialect = dialect_of(connection)
    jobs_by_jid = {job.jid: job for job in reservations}
    with connection.cursor() as cursor:
        rows = sql.lock_claimed(cursor, dialect, jobs_by_jid)
        claimed = {
            rows[jid][0]: job
            for jid, job in jobs_by_jid.items()
            if jid in rows and rows[jid][1:] == (job.wid, job.attempt)  # else it was taken from its worker
        }
        limiters = _lock_limiters(connection, cursor, claimed.values())
        clock = now or dialect.now(cursor)
        limiters_per_job = [
            [limiters[name] for name in _limiter_names(job) if name in limiters] for job in claimed.values()
        ]
        refusals = dict(zip(claimed, allocate_permits(limiters_per_job, clock), strict=True))
        permits = {
            row_id: format_permits(needed)
            for row_id, needed in zip(claimed, limiters_per_job, strict=True)
            if refusals[row_id] is None
        }
        sql.record_permits(cursor, permits)
        refused = {row_id: limiter for row_id, limiter in refusals.items() if limiter is not None}
        if refused:
            _block_refused(
                cursor, dialect, {row_id: (claimed[row_id].queue, limiter) for row_id, limiter in refused.items()}
            )
        for limiter in limiters.values():
            # Limiters without a rate use `filled_at` as the time of their last use, which `delete_idle` reads.
            limiter.filled_at = limiter.filled_at if limiter.has_rate else clock
        sql.save(cursor, [*limiters.values()])
    # A job that a limiter blocks must not keep its key locked (ADR 0024).
    locks.release(connection, [claimed[row_id] for row_id in refused])
    return {claimed[row_id].jid: permit_text for row_id, permit_text in permits.items()}


def _limiter_names(job: Reservation) -> list[tuple[str, str]]:
    names = [(str(Scope.TASK), job.jobtype), (str(Scope.QUEUE), job.queue)]
    return names if job.limit_key is None else [(str(Scope.KEY), job.limit_key), *names]


def _lock_limiters(
    connection: BaseDatabaseWrapper, cursor: CursorWrapper, jobs: Iterable[Reservation]
) -> dict[tuple[str, str], LimiterState]:
    """Return the limiters of these jobs, locked. Raises _MissingLimiters if a key has a limit and no limiter."""
    names = {name for job in jobs for name in _limiter_names(job)}
    if not names:
        return {}
    limiters = {
        (limiter.scope, limiter.name): limiter for limiter in sql.lock_by_name(cursor, dialect_of(connection), names)
    }
    unknown = sorted(name for scope, name in names if scope == Scope.KEY and (scope, name) not in limiters)
    # Not created here: that locks limits, which come before limiters (ADR 0024), and takes several transactions.
    if unknown and _limits_of(unknown, connection.alias).exists():
        raise _MissingLimiters(unknown)
    return limiters


def _limits_of(keys: Sequence[str], using: str) -> QuerySet[Limit]:
    """Return the limits of these keys: their own and those of their key families."""
    return Limit.objects.using(using).filter(scope=Scope.KEY, name__in={*keys, *map(family_of, keys)})


def lock_limits(connection: BaseDatabaseWrapper, limits: QuerySet[Limit]) -> QuerySet[Limit]:
    """Return these limits, to be locked in the order of their ids when they are read.

    Without their keys: a transaction that has changed a limiter twice locks the key of its limit at the commit.
    """
    no_key = connection.features.has_select_for_no_key_update
    return limits.order_by("pk").select_for_update(no_key=no_key)


def create_limiters(keys: Sequence[str], *, using: str) -> None:
    """Create limiters for keys that have a limit, and count the running jobs of these keys.

    The limit is that of the key or of its family.
    """

    def verb(connection: BaseDatabaseWrapper) -> None:
        limit_by_name = {limit.name: limit for limit in lock_limits(connection, _limits_of(keys, using))}
        limit_of = {key: limit_by_name.get(key) or limit_by_name.get(family_of(key)) for key in keys}
        rows = [build_limiter(limit, key) for key, limit in limit_of.items() if limit is not None]
        Limiter.objects.using(using).bulk_create(rows, ignore_conflicts=True)

    run(using, verb)
    # All paused limiters of these keys, including one that another process has inserted and not counted yet.
    paused = Limiter.objects.using(using).filter(scope=Scope.KEY, name__in=list(keys), is_paused=True)
    count_running(read(paused.values_list("pk", flat=True)), using=using)


def build_limiter(limit: Limit, name: str) -> Limiter:
    """Build a limiter of this limit without permits in use.

    It stays paused until `count_running` has counted the jobs that already run.
    """
    numbers = msgspec.structs.asdict(limit.allowance)
    tokens = limit.allowance.capacity if limit.rate else 0.0
    is_paused = limit.paused_at is not None or limit.concurrency is not None
    return Limiter(limit=limit, scope=limit.scope, name=name, is_paused=is_paused, tokens=tokens, **numbers)


def _block_refused(cursor: CursorWrapper, dialect: Dialect, refused: dict[int, tuple[str, LimiterState]]) -> None:
    """Block the refused jobs and similar jobs at the heads of their queues.

    Jobs refused by the limit of a queue stay enqueued: claims skip the whole queue.
    """
    sql.undo_claims(
        cursor,
        {row_id: None if limiter.scope == Scope.QUEUE else limiter.id for row_id, (_, limiter) in refused.items()},
    )
    full = {limiter.id: limiter for _, limiter in refused.values() if limiter.scope != Scope.QUEUE}
    if not full:
        return
    by_scope = {
        scope: {limiter.name: limiter.id for limiter in full.values() if limiter.scope == scope}
        for scope in (Scope.TASK, Scope.KEY)
    }
    for queue in sorted({queue for queue, limiter in refused.values() if limiter.scope != Scope.QUEUE}):
        # Otherwise the next claims would take and release the same kind of job again and again.
        sql.block_head(cursor, dialect, queue, tasks=by_scope[Scope.TASK], keys=by_scope[Scope.KEY])
    for limiter in full.values():
        limiter.is_awaited = True


def release(connection: BaseDatabaseWrapper, permits: Iterable[str | None]) -> None:
    """Return permits inside the transaction that ended the runs, and make blocked jobs ready that now fit."""
    counts = Counter(limiter for text in permits for limiter in parse_permits(text))
    if not counts:
        return
    dialect = dialect_of(connection)
    with connection.cursor() as cursor:
        limiters = sql.lock_by_id(cursor, dialect, counts)
        # Only buckets need the time; limits on concurrency alone save this statement.
        clock = dialect.now(cursor) if any(limiter.has_rate for limiter in limiters) else None
        ready_queues: set[str] = set()
        skipped: list[int] = []
        for limiter in limiters:
            was_full = limiter.room < 1
            # Never negative, even if rows were changed manually: `sweep` corrects the count.
            limiter.in_use = max(0, limiter.in_use - counts[limiter.id])
            if clock is not None:
                limiter.fill(clock)
            queues, has_skipped = _unblock_fitting(cursor, dialect, limiter, clock, was_full=was_full)
            ready_queues |= queues
            if has_skipped:
                skipped.append(limiter.id)
        sql.save(cursor, limiters)
    locks.notify_ready(connection, ready_queues)
    promote_waiters_later(connection, skipped)


def _unblock_fitting(
    cursor: CursorWrapper, dialect: Dialect, limiter: LimiterState, now: datetime | None, *, was_full: bool
) -> tuple[set[str], bool]:
    """Make as many blocked jobs ready as a limiter has room for.

    Returns the queues that got work, and whether a job was skipped that another transaction has locked. The caller
    must try again: if the last job in front of it has just ended, nothing else makes that job ready.
    """
    if limiter.scope == Scope.QUEUE:
        # Jobs of a queue with a full limiter were never blocked, so the waiting FETCHes only need a notification.
        return {limiter.name} if was_full and limiter.room else set(), False
    if not limiter.is_awaited:
        return set(), False
    unblocked: dict[str, int] = {}
    has_skipped = False
    if limiter.room:
        # The room applies to each queue: a queue without workers must not keep the jobs of other queues blocked. Claims
        # check the limiter again, so no limit is exceeded (ADR 0016).
        room = min(limiter.room, CHUNK)
        unblocked, limiter.is_awaited, has_skipped = sql.unblock_first(cursor, dialect, limiter.id, room)
    if limiter.is_awaited and now is not None and limiter.opens_at is None:
        if limiter.room:
            limiter.wait_for_next(now, has_released=bool(unblocked))
        else:
            limiter.wait_for_tokens(now)
    return set(unblocked), has_skipped


def find_due_limiters(*, using: str) -> list[int]:
    """Return the ids of at most `CHUNK` limiters that are due to make jobs ready."""
    due = Limiter.objects.using(using).filter(opens_at__lte=Now()).order_by("id").values_list("pk", flat=True)
    return read(due[:CHUNK])


def unblock_due(store: Store) -> set[str]:
    """Make the next sets of rate-limited jobs ready; return the queues that got work."""
    queues, _ = unblock_if_room(find_due_limiters(using=store.alias), using=store.alias, now=store.clock())
    return queues


def unblock_if_room(
    ids: Iterable[int], *, using: str, now: datetime | None = None, raises_lock_timeout: bool = True
) -> tuple[set[str], list[int]]:
    """Make jobs of these limiters ready if there is room, one transaction per limiter.

    Returns the queues that got work, and the limiters of which a job was skipped that another transaction has locked.
    """
    queues: set[str] = set()
    skipped: list[int] = []
    for limiter_id in ids:
        # One short transaction per limiter: a hot limiter's row is not locked while other limiters are handled.
        ready, has_skipped = run(
            using, partial(_unblock_if_room, limiter_id=limiter_id, now=now), raises_lock_timeout=raises_lock_timeout
        )
        queues |= ready
        if has_skipped:
            skipped.append(limiter_id)
    return queues, skipped


def _unblock_if_room(
    connection: BaseDatabaseWrapper, *, limiter_id: int, now: datetime | None
) -> tuple[set[str], bool]:
    dialect = dialect_of(connection)
    with connection.cursor() as cursor:
        limiters = sql.lock_by_id(cursor, dialect, [limiter_id])
        if not limiters:
            return set(), False
        [limiter] = limiters
        clock = now or dialect.now(cursor)
        limiter.fill(clock)
        # It may have been full until its limit was changed or tokens were added, so a queue is always notified.
        ready, has_skipped = _unblock_fitting(cursor, dialect, limiter, clock, was_full=True)
        sql.save(cursor, limiters)
    return ready, has_skipped


def promote_waiters(ids: Iterable[int], *, using: str) -> None:
    """Make jobs of these limiters ready, after the commit of a change; try again for jobs that were skipped."""

    def promote(ids: Sequence[int]) -> Sequence[int]:
        # The change is committed: a lock timeout must not make the caller repeat it.
        queues, skipped = unblock_if_room(ids, using=using, raises_lock_timeout=False)
        locks.notify_ready(connections[using], queues)
        return skipped

    retry_skipped(using, promote, sorted(ids))


def promote_waiters_later(connection: BaseDatabaseWrapper, limiter_ids: Iterable[int | None]) -> None:
    """Call `promote_waiters` for these limiters after the commit, because jobs leave them."""
    ids = {limiter for limiter in limiter_ids if limiter is not None}
    if ids:
        after_commit(connection.alias, lambda: promote_waiters(ids, using=connection.alias))


def find_limiters_of(jobs: JobQuerySet) -> list[int]:
    """Return the limiters that made the enqueued jobs among these ready.

    Pass them to `promote_waiters_later` once the jobs are gone.
    """
    ready = jobs.in_state(State.ENQUEUED).filter(limiter__isnull=False)
    return [limiter for limiter in ready.order_by().values_list("limiter", flat=True).distinct() if limiter is not None]


def count_running(ids: Iterable[int], *, using: str) -> None:
    """Give running jobs the permits of these limiters that they lack, count them, and open the limiters.

    A limiter that is new, or did not count running jobs before, is paused until then, so that running jobs count from
    the commit of the change on. This call waits for claims that read the limits before that commit, because their
    jobs run too: see `Dialect.await_claims`. In the caller's transaction there is no such commit yet: the limiters open
    at once, and the jobs are counted again after the commit.
    """
    ids = list(ids)
    if not ids:
        return
    connection = connections[using]
    if connection.in_atomic_block:
        after_commit(using, _repair_each, ids, using)
    else:
        run(using, lambda connection: dialect_of(connection).await_claims(connection), atomic=False)
    _repair_each(ids, using)


def _repair_each(ids: Iterable[int], using: str) -> int:
    """Repair these limiters; return how many had a wrong counter."""
    return sum(repair(limiter_id, using=using) for limiter_id in ids)


def repair(limiter_id: int, *, using: str) -> bool:
    """Make a limiter what its jobs say, at any time; return whether its counter was wrong.

    Running jobs get the permits that they lack, the counter becomes the number of the permits, the limiter opens unless
    its limit is paused, and blocked jobs become ready for which there is room: all of them if the limiter was deleted.
    """
    after: int | None = 0
    while after is not None:
        after = run(using, partial(_give_missing_permits, limiter_id=limiter_id, after=after))
    was_wrong = False
    while True:
        is_wrong, has_more = run(using, partial(_settle, limiter_id=limiter_id))
        was_wrong |= is_wrong
        if not has_more:
            return was_wrong


def _give_missing_permits(connection: BaseDatabaseWrapper, *, limiter_id: int, after: int) -> int | None:
    """Give permits to at most `CHUNK` running jobs that started before they needed one, with ids above `after`.

    Returns the last id, or None at the end.
    """
    dialect = dialect_of(connection)
    with connection.cursor() as cursor:
        # Jobs are locked before the limiter, as everywhere (ADR 0024).
        rows = sql.lock_without_permit(cursor, dialect, limiter_id, after, CHUNK)
        limiter = next(iter(sql.lock_by_id(cursor, dialect, [limiter_id])), None)
        if not rows or limiter is None or not limiter.needs_permit():
            return None
        count = sql.give_permits(cursor, limiter.id, rows)
        limiter.in_use += count
        sql.save(cursor, [limiter])
    if count:
        logger.info(
            "running jobs got permits of a limit that was set meanwhile limiter=%s jobs=%d", limiter.name, count
        )
    return rows[-1][0] if len(rows) == CHUNK else None


def _settle(connection: BaseDatabaseWrapper, *, limiter_id: int) -> tuple[bool, bool]:
    """Take the last step of `repair`; return whether the limiter was wrong, and whether the step has to be repeated.

    The count is exact: each transaction that changes permits locks the limiter before it commits, so none can commit
    between the count, which runs after the lock, and this commit.
    """
    dialect = dialect_of(connection)
    # Limits are locked before limiters.
    own_limit = Limiter.objects.using(connection.alias).filter(pk=limiter_id).values("limit")
    limits = list(lock_limits(connection, Limit.objects.using(connection.alias).filter(pk__in=own_limit)))
    with connection.cursor() as cursor:
        limiter = next(iter(sql.lock_by_id(cursor, dialect, [limiter_id])), None)
        if limiter is None:
            # The limit was deleted, and the process may have ended before it had unblocked the jobs.
            count, queues = sql.unblock_portion(cursor, dialect, limiter_id, CHUNK)
            locks.notify_ready(connection, queues)
            return count > 0, count > 0
        count = sql.count_holders(cursor, limiter.id)
        is_wrong = count != limiter.in_use
        if is_wrong:
            logger.warning(
                "wrong count of a limiter, repaired limiter=%s in_use=%d jobs=%d", limiter.name, limiter.in_use, count
            )
        limiter.in_use = count
        # Without this mark the limiter makes no job ready when it gets room.
        limiter.is_awaited = limiter.is_awaited or sql.is_referenced(cursor, limiter.id)
        for limit in limits:
            limiter.is_paused = limit.paused_at is not None
            Limiter.objects.using(connection.alias).filter(pk=limiter_id).update(is_paused=limiter.is_paused)
        now = dialect.now(cursor)
        limiter.fill(now)
        queues, has_skipped = _unblock_fitting(cursor, dialect, limiter, now, was_full=True)
        sql.save(cursor, [limiter])
    locks.notify_ready(connection, queues)
    promote_waiters_later(connection, [limiter_id] if has_skipped else [])
    return is_wrong, False


def sweep(*, using: str) -> int | None:
    """Repair all limiters that a crash, or rows changed manually, left wrong; return how many counters were wrong.

    Returns None if no limiter is in use: none counts a job, and no job is blocked by one.
    """

    def read_jobs(connection: BaseDatabaseWrapper) -> tuple[list[int], list[sql.RunningJobs]]:
        with connection.cursor() as cursor:
            return list(sql.find_referenced_limiters(cursor)), sql.count_running_jobs(cursor)

    rows = Limiter.objects.using(using).select_related("limit")
    limiters = {row.pk: row for row in read(rows)}
    referenced_ids, running = run(using, read_jobs, atomic=False)
    if not limiters and not referenced_ids:
        return None
    # Paused although its limit is not: the process that created it ended before it had counted.
    count_running([pk for pk, row in limiters.items() if row.is_paused and row.limit.paused_at is None], using=using)
    suspects = _find_wrong(limiters, running)
    suspects |= {pk for pk in referenced_ids if pk not in limiters or not limiters[pk].is_awaited}
    repaired = _repair_each(sorted(suspects), using)
    unblock_if_room([pk for pk in referenced_ids if pk in limiters and pk not in suspects], using=using)
    is_used = bool(referenced_ids) or any(row.in_use or row.is_awaited for row in limiters.values())
    return repaired if is_used or repaired else None


def _find_wrong(limiters: Mapping[int, Limiter], running: Iterable[sql.RunningJobs]) -> set[int]:
    """Return the limiters that count other jobs than those that run."""
    by_name = {(row.scope, row.name): pk for pk, row in limiters.items() if row.concurrency is not None}
    holders, wrong = Counter[int](), set[int]()
    for queue, jobtype, key, permits, count in running:
        permit_ids = parse_permits(permits)
        holders.update(dict.fromkeys(permit_ids, count))
        names = ((Scope.QUEUE, queue), (Scope.TASK, jobtype), (Scope.KEY, key or ""))
        wrong.update(pk for scope, name in names if (pk := by_name.get((str(scope), name))) and pk not in permit_ids)
    return wrong | {pk for pk, row in limiters.items() if holders[pk] != row.in_use}


def delete_idle(*, using: str, idle_s: float = IDLE_S) -> int:
    """Delete limiters of keys that were idle for `idle_s` and have a full bucket; return how many."""
    limiters = Limiter.objects.using(using).filter(scope=Scope.KEY, in_use=0, is_awaited=False, opens_at=None)
    idle = limiters.filter(filled_at__lt=Now() - timedelta(seconds=idle_s)).exclude(name=F("limit__name"))
    # A limit with a longer period may not have refilled yet: making its limiter again would give a full bucket too
    # early.
    idle = idle.exclude(per__gt=idle_s)
    ids = read(idle.values_list("pk", flat=True)[:CHUNK])

    def verb(_: BaseDatabaseWrapper) -> int:
        unused = list(limiters.filter(pk__in=ids).order_by("pk").select_for_update().values_list("pk", flat=True))
        return Limiter.objects.using(using).filter(pk__in=unused).delete()[0]

    return run(using, verb) if ids else 0
