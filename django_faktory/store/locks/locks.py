"""Locks: at most one job per lock key runs at a time; the jobs behind it are blocked. ADR 0015.

`acquire_locks` acquires a lock, `release` frees it in the transaction that ends the run. On PostgreSQL a claim tries
`faktory_acquire_1` first and leaves the rest to `acquire_locks`, a success is freed by `faktory_free_locks_1`, and
`faktory_hand_off_1` passes a lock on without freeing it (ADR 0015). Code that enqueues jobs calls `block_if_locked`;
code that removes ready jobs calls `promote_waiters` after the commit. Blocked jobs are outside the index that claims
read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, DateTimeField, Exists, ExpressionWrapper, F, OuterRef, Q, Value, When
from django.db.models.functions import Now

from ...core.lifecycle import State
from ...core.logs import get_logger
from ...core.payloads import Reservation
from ...models import Job, JobLock, JobQuerySet
from .. import notifier, scan
from ..chunks import chunks
from ..dialects import clock_of, dialect_of
from ..dialects.base import JOB, LOCK, marks
from ..dialects.values import RunningJob
from ..store import Store
from ..transactions import after_commit, read, retry_skipped, run, select

logger = get_logger(__name__)

CHUNK = 500
HANDOFF_GRACE_S = 0.25
"""Seconds within which a live process hands the key of an ended job to the next job."""

# With `unique_until_start` the unique key is free as soon as the job starts.
_UNIQUE_KEY_AFTER_START = Case(When(unique_until_start=True, then=Value(None)), default=F("unique_key"))

Place = Sequence[Any]
"""A position among the blocked jobs, see `scan.portion`."""

SWEEP_PORTION = 500
KEY_CHUNK = 200
MAX_SWEPT_PORTIONS = 40
"""Portions that one sweep reads: 20,000 blocked jobs, about 100 ms."""


# A job blocked by a limiter counts as ready: it is first in line for its key, and the limiter makes it ready.
_STUCK_KEYS_SQL = f"""
SELECT DISTINCT waiting.lock_key FROM {JOB} AS waiting
WHERE waiting.lock_key IN ({{keys}}) AND waiting.state = 'blocked' AND waiting.limiter IS NULL
  AND NOT EXISTS (SELECT 1 FROM {LOCK} AS held WHERE held.lock_key = waiting.lock_key AND NOT held.is_lapsed)
  AND NOT EXISTS (SELECT 1 FROM {JOB} AS ready WHERE ready.lock_key = waiting.lock_key AND ready.state = 'enqueued'
    AND ready.queue = waiting.queue AND ready.sort_priority = waiting.sort_priority)
  AND NOT EXISTS (SELECT 1 FROM {JOB} AS first WHERE first.lock_key = waiting.lock_key AND first.state = 'blocked'
    AND first.limiter IS NOT NULL AND first.queue = waiting.queue AND first.sort_priority = waiting.sort_priority)"""


def acquire_locks(store: Store, reservations: Sequence[Reservation], *, lease_s: float) -> list[Reservation]:
    """Acquire the locks of jobs just claimed; return the jobs that have theirs, with the token.

    The other jobs become blocked, as if they had not been claimed. Do not deliver a job before its lock is committed.
    """
    clock = store.clock()
    tokens = run(store.alias, lambda connection: acquire_locks_in(connection, reservations, lease_s, clock))
    # The holder may have released the key before these jobs were committed as blocked, without seeing them.
    promote_waiters({job.lock_key for job in reservations if job.lock_key and job.jid not in tokens}, using=store.alias)
    return [msgspec.structs.replace(job, lock_token=tokens[job.jid]) for job in reservations if job.jid in tokens]


def acquire_locks_in(
    connection: BaseDatabaseWrapper, reservations: Sequence[Reservation], lease_s: float, now: datetime | None
) -> dict[str, int]:
    """Acquire locks as part of a transaction; return the tokens by jid.

    The caller passes the keys of the jobs without a token to `promote_waiters` after the commit.
    """
    # The sort is stable: the first job of a key by priority stays its first, and receives the lock.
    reservations = sorted(reservations, key=lambda job: job.lock_key or "")
    rows = Job.live.using(connection.alias).filter(jid__in=[job.jid for job in reservations])
    rows = rows.order_by("id").select_for_update()
    # Rows are compared with the claims after they are locked: a job can be taken from its worker between the claim and
    # this statement.
    stored = {row.jid: row for row in rows.only("jid", "state", "wid", "attempt", "lock_token", "permits")}
    claimed = [job for job in reservations if job.jid in stored and _awaits_lock(stored[job.jid], job)]
    first_by_key: dict[str, Reservation] = {}
    for job in claimed:
        first_by_key.setdefault(job.lock_key or "", job)
    clock = clock_of(connection, now)
    tokens = _insert_locks(connection, first_by_key, clock, timedelta(seconds=lease_s))
    jobs = Job.live.using(connection.alias)
    for jid, token in tokens.items():
        row = stored[jid]
        # A job that also needs permits has not started yet: its unique key is freed when it has them.
        started_fields = {"unique_key": _UNIQUE_KEY_AFTER_START} if row.permits is None else {}
        jobs.filter(pk=row.pk).update(lock_token=token, **started_fields)
    if refused_ids := [stored[job.jid].pk for job in claimed if job.jid not in tokens]:
        jobs.filter(pk__in=refused_ids).update(
            state=State.BLOCKED, attempt=F("attempt") - 1, wid="", started_at=None, reserved_until=None, permits=None
        )
    _block_siblings(connection, [job.lock_key for job in claimed if job.lock_key and job.jid in tokens])
    return tokens


def _awaits_lock(row: Job, job: Reservation) -> bool:
    """Return whether a locked row still belongs to this claim and waits for its lock."""
    is_held = row.state == State.WORKING and (row.wid, row.attempt) == (job.wid, job.attempt)
    return is_held and row.lock_token is None


def _insert_locks(
    connection: BaseDatabaseWrapper, job_by_key: dict[str, Reservation], now: datetime, lease: timedelta
) -> dict[str, int]:
    """Insert lock rows in key order; return jid → token of the jobs that own their row."""
    with connection.cursor() as cursor:
        dialect_of(connection).reserve_keys(cursor, sorted(job_by_key))
    locks = JobLock.objects.using(connection.alias).filter(key__in=job_by_key)
    # An expired lock has no effect, even if maintenance has not marked it as lapsed yet (ADR 0015).
    locks.filter(expires_at__lte=now).delete()
    rows = [
        JobLock(
            key=key, jid=job.jid, attempt=job.attempt, wid=job.wid, lease=lease, acquired_at=now, expires_at=now + lease
        )
        for key, job in sorted(job_by_key.items())
    ]
    # A concurrent transaction may insert the same key first. The conflict is ignored, and the select below shows which
    # job owns the key.
    JobLock.objects.using(connection.alias).bulk_create(rows, ignore_conflicts=True)
    owner_by_key = {
        key: (jid, attempt, pk) for pk, key, jid, attempt in locks.values_list("pk", "key", "jid", "attempt")
    }
    return {
        job.jid: owner_by_key[key][2]
        for key, job in job_by_key.items()
        if key in owner_by_key and owner_by_key[key][:2] == (job.jid, job.attempt)
    }


def _block_siblings(connection: BaseDatabaseWrapper, keys: Sequence[str]) -> None:
    """Block the ready jobs of keys that were just acquired.

    Without races there is at most one per key, queue and priority. Rows that another transaction is claiming are
    skipped: that claim does not get the lock and blocks its job itself.
    """
    if not keys:
        return
    jobs = Job.live.using(connection.alias).in_state(State.ENQUEUED)
    ready = jobs.filter(lock_key__in=keys).select_for_update(skip_locked=True)
    ids = list(ready.values_list("pk", flat=True)[:CHUNK])
    if ids:
        # Without a limiter: from now on the release of the lock makes them ready.
        jobs.filter(pk__in=ids).update(state=State.BLOCKED, limiter=None)


def release(connection: BaseDatabaseWrapper, jobs: Iterable[Job | RunningJob | Reservation]) -> None:
    """Release the locks of these jobs and make the next ones ready.

    Call it inside the transaction that ended the runs. The jobs have the key and token from before that transaction;
    jobs without a lock may be among them.
    """
    key_by_token = {job.lock_token: job.lock_key for job in jobs if job.lock_token is not None and job.lock_key}
    if key_by_token:
        _delete(connection, sorted(key_by_token))
        make_next_ready(connection, sorted(set(key_by_token.values())))


def _delete(connection: BaseDatabaseWrapper, tokens: Sequence[int]) -> None:
    """Delete these lock rows, locked in key order."""
    rows = JobLock.objects.using(connection.alias).filter(pk__in=tokens)
    # A DELETE locks rows in any order; two transactions with the same two keys would deadlock (ADR 0024).
    if len(tokens) > 1 and connection.features.has_select_for_update:
        list(rows.order_by("key").select_for_update().values_list("pk", flat=True))
    rows.delete()


def make_next_ready(connection: BaseDatabaseWrapper, keys: Sequence[str]) -> set[str]:
    """Make the next jobs of these keys ready, inside a transaction; return the skipped keys.

    A key is skipped if its next job's row was locked by another transaction, which may end without changing it. Skipped
    keys are passed to `promote_waiters` after the commit.
    """
    queues, skipped = dialect_of(connection).make_next_ready(connection, keys)
    notify_ready(connection, queues)
    promote_waiters_later(connection, skipped)
    return skipped


def block_if_locked(connection: BaseDatabaseWrapper, ids: Sequence[int]) -> None:
    """Block the enqueued jobs among these that have to wait for their key.

    A job waits if the key is held, or an earlier job of the key is ready. Call it inside the transaction that enqueued
    the jobs. Jobs without a key are ignored.
    """
    jobs = Job.live.using(connection.alias)
    arrivals = list(
        jobs.in_state(State.ENQUEUED)
        .filter(pk__in=ids, lock_key__isnull=False)
        # In claim order, so that the first job of each queue and priority stays ready.
        .order_by("sort_priority", "enqueued_at", "id")
        .values_list("pk", "lock_key", "queue", "sort_priority")
    )
    if not arrivals:
        return
    lock_queue = LockQueue(connection, {key for _, key, _, _ in arrivals if key}, excluding=ids)
    to_block = [
        pk
        for pk, key, queue, sort_priority in arrivals
        if not lock_queue.try_add_ready(key or "", queue, sort_priority)
    ]
    if to_block:
        jobs.in_state(State.ENQUEUED).filter(pk__in=to_block).update(state=State.BLOCKED, limiter=None)
        # The holder may have released the key after `LockQueue` read it, without seeing these uncommitted jobs.
        promote_waiters_later(connection, lock_queue.keys)


class LockQueue:
    """The lock queue of some keys: decides whether a job that is added is ready or blocked."""

    def __init__(
        self, connection: BaseDatabaseWrapper, keys: Collection[str], *, excluding: Sequence[int] = ()
    ) -> None:
        self.keys = sorted(keys)
        alias = connection.alias
        live = JobLock.objects.using(alias).filter(key__in=self.keys, expires_at__gt=Now())
        self._held_keys = set(live.values_list("key", flat=True))
        excluded_ids = set(excluding)
        self._ready: set[tuple[str, str, int]] = set()
        if self.keys:
            with connection.cursor() as cursor:
                ready = dialect_of(connection).find_ready(cursor, self.keys)
            self._ready = {
                (key, queue, sort_priority) for row_id, key, queue, sort_priority in ready if row_id not in excluded_ids
            }

    def try_add_ready(self, key: str, queue: str, sort_priority: int) -> bool:
        """Return whether a job that is added now is ready, and record it as such.

        It is ready if no job holds the key and it is the first of its queue and priority.
        """
        place = key, queue, sort_priority
        if key in self._held_keys or place in self._ready:
            return False
        self._ready.add(place)
        return True


def promote_waiters(keys: Collection[str], *, using: str) -> None:
    """Make a job ready for each of these keys, unless a job holds it. Call it after the commit of a change.

    It waits for transactions that are releasing a key, so that of two concurrent changes the later one sees both.
    """
    if not keys:
        return

    def verb(connection: BaseDatabaseWrapper, chunk: Sequence[str]) -> set[str]:
        locks = JobLock.objects.using(using).filter(key__in=chunk).order_by("key").select_for_update()
        now = clock_of(connection)
        # The time is read before the rows are locked, so a lock that expires while waiting still counts as held;
        # `mark_expired` handles it.
        held_keys = {key for key, expires_at in locks.values_list("key", "expires_at") if expires_at > now}
        queues, skipped = dialect_of(connection).make_next_ready(
            connection, [key for key in chunk if key not in held_keys]
        )
        notify_ready(connection, queues)
        return skipped

    def promote(keys: Sequence[str]) -> Sequence[str]:
        skipped: set[str] = set()
        for chunk in chunks(keys, CHUNK):
            # The change is committed: a lock timeout must not make the caller repeat it.
            skipped |= run(using, partial(verb, chunk=chunk), raises_lock_timeout=False)
        return sorted(skipped)

    retry_skipped(using, promote, sorted(keys))


def promote_waiters_later(connection: BaseDatabaseWrapper, keys: Collection[str]) -> None:
    """Call `promote_waiters` for these keys after the commit."""
    if keys:
        after_commit(connection.alias, lambda: promote_waiters(set(keys), using=connection.alias))


def keys_of(jobs: JobQuerySet) -> list[str]:
    """Return the keys of the jobs among these that are ready or blocked by a limiter.

    Call `promote_waiters` for them once the jobs are gone: a job in either condition keeps the next job of its key
    blocked.
    """
    keeps_others = Q(state=str(State.ENQUEUED)) | Q(state=str(State.BLOCKED), limiter__isnull=False)
    blocking = jobs.filter(keeps_others, lock_key__isnull=False)
    return [key for key in blocking.order_by().values_list("lock_key", flat=True).distinct() if key]


def keeps_others_blocked(job: Job) -> bool:
    """Return whether a job that has no lock yet keeps the next job of its key blocked; the condition of `keys_of`."""
    return job.state == State.ENQUEUED or (job.state == State.BLOCKED and job.limiter is not None)


def notify_ready(connection: BaseDatabaseWrapper, queues: set[str]) -> None:
    """Announce after the commit that jobs of these queues are ready."""
    if queues:
        after_commit(connection.alias, notifier.announce, connection.alias, queues)


def extend(wids: Collection[str], *, using: str) -> int:
    """Extend the leases of these workers' locks; return how many were extended.

    A lapsed lock that no other job has acquired is revived. A row that another transaction has locked is skipped: it is
    changing, and the next heartbeat arrives within its lease.
    """
    locks = JobLock.objects.using(using).filter(wid__in=[wid for wid in wids if wid])
    # Most workers hold no lock: the check saves a transaction for each heartbeat.
    return _extend(locks, skip_locked=True) if run(using, lambda _: locks.exists(), atomic=False) else 0


def extend_held(store: Store, tokens: Collection[int]) -> set[int]:
    """Extend these locks; return the tokens that are lost because their row is gone.

    Another job has, or could have, acquired the key of a lost token.
    """
    locks = JobLock.objects.using(store.alias).filter(pk__in=tokens)
    _extend(locks)
    return set(tokens) - set(read(locks.values_list("pk", flat=True)))


def _extend(locks: Any, *, skip_locked: bool = False) -> int:
    new_expiry = ExpressionWrapper(Now() + F("lease"), output_field=DateTimeField())

    def verb(connection: BaseDatabaseWrapper) -> int:
        extendable = locks
        if connection.features.has_select_for_update:  # in key order, which an UPDATE does not keep
            rows = locks.order_by("key").select_for_update(skip_locked=skip_locked)
            tokens = list(rows.values_list("pk", flat=True))
            extendable = JobLock.objects.using(locks.db).filter(pk__in=tokens)
        extended: int = extendable.update(expires_at=new_expiry, is_lapsed=False)
        return extended

    return run(locks.db, verb)


def expired_locks(*, using: str) -> Any:
    """Return the locks that have expired and are not marked as lapsed yet."""
    return unmarked_locks(using=using).filter(expires_at__lte=Now())


def unmarked_locks(*, using: str) -> Any:
    """Return the locks that are not marked as lapsed.

    The earliest expiry among them shows whether `mark_expired` has anything to do.
    """
    return JobLock.objects.using(using).filter(is_lapsed=False)


def mark_expired(*, using: str, limit: int = CHUNK) -> int:
    """Mark at most `limit` expired locks as lapsed and make the next jobs ready; return how many.

    The locks are first found through their index and then locked in key order, as everywhere (ADR 0024).
    """

    def verb(connection: BaseDatabaseWrapper) -> int:
        earliest = expired_locks(using=using).order_by("expires_at").values_list("key", flat=True)
        expired = expired_locks(using=using).filter(key__in=list(earliest[:limit])).order_by("key")
        keys = list(expired.select_for_update(skip_locked=True).values_list("key", flat=True))
        if keys:
            JobLock.objects.using(using).filter(key__in=keys).update(is_lapsed=True)
            make_next_ready(connection, keys)
        return len(keys)

    lapsed = run(using, verb)
    if lapsed:
        logger.warning("locks were not extended in time and have lapsed locks=%d", lapsed)
    return lapsed


class LockSweep(NamedTuple):
    """Result of `sweep`: the repaired keys and the next position."""

    repaired: int
    """Number of keys for which a job was made ready."""
    after: Place | None
    """Position at which the next sweep continues; None to start from the beginning."""


def sweep(
    *,
    using: str,
    after: Place | None = None,
    portions: int = MAX_SWEPT_PORTIONS,
    portion_size: int = SWEEP_PORTION,
    pause: Callable[[float], object] = time.sleep,
) -> LockSweep:
    """Find free keys without a ready job, and make the next job of each ready.

    A crash just after a commit leaves such keys. Reads a bounded number of blocked jobs, starting at a position. A key
    also looks like this for a moment after each end that is not in one transaction with the next start, so only keys
    found twice are changed.
    """
    stuck_keys: set[str] = set()
    for _ in range(portions):
        rows, after = scan.portion(State.BLOCKED, ("lock_key", "limiter"), using=using, after=after, size=portion_size)
        # Jobs blocked by a limiter are left out: the limiter makes them ready.
        stuck_keys |= _find_stuck_keys({key for key, limiter in rows if key and limiter is None}, using)
        if after is None:
            break
    if stuck_keys:
        pause(HANDOFF_GRACE_S)
        stuck_keys = _find_stuck_keys(stuck_keys, using)
        promote_waiters(stuck_keys, using=using)
    return LockSweep(len(stuck_keys), after)


def _find_stuck_keys(keys: Collection[str], using: str) -> set[str]:
    """Return the keys among these that no job holds and for which no job is ready."""
    ordered, stuck_keys = sorted(keys), set[str]()
    for chunk in chunks(ordered, KEY_CHUNK):
        held_keys = unmarked_locks(using=using).filter(key__in=chunk).values_list("key", flat=True)
        free = sorted(set(chunk) - set(read(held_keys)))
        if free:
            stuck_keys.update(key for (key,) in select(_STUCK_KEYS_SQL.format(keys=marks(free)), free, using=using))
    return stuck_keys


class LocketState(NamedTuple):
    """Waiting jobs of a queue, and how many of them wait for a held key: the counter of resque-locket."""

    waiting: int
    """Number of jobs that are enqueued or blocked."""
    locked: int
    """Number of them whose key another job holds."""

    @property
    def is_locked(self) -> bool:
        """True if no job of the queue can run at this moment."""
        return 0 < self.waiting <= self.locked


def locket_state(queue: str, *, using: str) -> LocketState:
    """Count the waiting and the locked jobs of a queue in the database `using`, at each call."""

    def verb(_: BaseDatabaseWrapper) -> LocketState:
        jobs = Job.live.using(using).filter(queue=queue)
        live = JobLock.objects.using(using).filter(expires_at__gt=Now(), key=OuterRef("lock_key"))
        waiting = sum(jobs.in_state(state).count() for state in (State.ENQUEUED, State.BLOCKED))
        locked = jobs.in_state(State.BLOCKED).filter(Exists(live)).count()
        return LocketState(waiting, locked)

    return run(using, verb)
