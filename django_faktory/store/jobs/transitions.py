"""Transitions that people request: requeue, defer, kill, discard, purge. Each is a guarded update of a set of jobs.

Functions named by verbs take ids and open transactions. A `Change` (`requeued`, `killed(…)`, `discarded`, `purged`)
takes a queryset inside the caller's transaction; `store.jobs.bulk` selects the jobs for it and keeps the sets small. A
job in a state that does not allow the transition stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, DateTimeField, F, Value, When
from django.db.models.functions import Greatest, Now

from ...core.lifecycle import ENDED, GONE, UNFINISHED, Event, State, sources
from ...core.payloads import is_storable
from ...models import Job, JobLock, JobQuerySet
from ..batches import progress
from ..chunks import chunks
from ..deletion import delete_locked
from ..dialects import clock_of, dialect_of
from ..dialects.base import JOB, marks
from ..limits import limiters
from ..locks import locks
from ..store import Store
from ..transactions import read, run
from . import steps, waits

CHUNK = 500
DISCARDED_FOR = timedelta(days=1)
"""How long the row of a discarded job is kept if the job has a `result_ttl`."""

Change = Callable[[JobQuerySet], int]


def defer(times: Mapping[int, datetime], *, using: str) -> int:
    """Schedule the retries of failed jobs: `times` maps at most `bulk.CHUNK` ids to times. Return how many changed.

    As with `requeued`, the failure stays readable and counts.
    """
    whens = [When(pk=pk, then=Value(moment, DateTimeField())) for pk, moment in times.items()]

    def verb(_: BaseDatabaseWrapper) -> int:
        legal = lock_rows(Job.live.using(using).filter(pk__in=list(times)).in_state(*sources(Event.DEFER)))
        return legal.update(state=State.RETRIES, run_at=Case(*whens), wid="", finished_at=None, purge_at=None)

    return run(using, verb) if times else 0


def keep_for(pk: int, seconds: int, *, using: str) -> None:
    """Keep the row of a job for this many seconds after its end, if the job has no `result_ttl`."""
    jobs = Job.live.using(using).filter(pk=pk, result_ttl=None)
    run(using, lambda _: jobs.update(result_ttl=seconds), atomic=False, writes=True)


def free_locks(tokens: Sequence[int], *, using: str) -> int:
    """Release locks although their holders keep running, and return how many were released.

    The next job of each key becomes ready; the holders' workers notice the loss when they next extend their leases.
    Locks are identified by token, so a lock that another job holds by now is not affected.
    """

    def verb(connection: BaseDatabaseWrapper) -> int:
        # In the order of the keys, the lock order of lock rows (ADR 0024).
        rows = JobLock.objects.using(using).filter(pk__in=tokens).order_by("key").select_for_update()
        key_by_token = dict(rows.values_list("pk", "key"))
        JobLock.objects.using(using).filter(pk__in=list(key_by_token)).delete()
        locks.make_next_ready(connection, sorted(key_by_token.values()))
        return len(key_by_token)

    return run(using, verb)


def lock_rows(jobs: JobQuerySet) -> JobQuerySet:
    """Lock these jobs in the order of their ids, and return a queryset of exactly these ids. Needs a transaction.

    An UPDATE locks rows in the order in which it finds them, so two of them without this could deadlock (ADR 0024).
    On SQLite, which has no row locks and one writer, return the queryset unchanged.
    """
    connection = connections[jobs.db]
    if not connection.features.has_select_for_update:
        return jobs
    if connection.vendor == "mysql":
        # On MariaDB a locking SELECT locks each row that its plan reads, and for many ids the plan scans a small table.
        # So read the ids first, lock them by primary key, and filter again, because rows may have changed in between.
        pks = list(jobs.values_list("pk", flat=True))
        with connection.cursor() as cursor:
            if pks:
                cursor.execute(
                    f"SELECT id FROM {JOB} FORCE INDEX (PRIMARY) WHERE id IN ({marks(pks)}) ORDER BY id FOR UPDATE",
                    pks,
                )
        ids = list(jobs.filter(pk__in=pks).values_list("pk", flat=True))
    else:
        ids = list(jobs.order_by("pk").select_for_update().values_list("pk", flat=True))
    return Job.live.using(jobs.db).filter(pk__in=ids)


def requeued(jobs: JobQuerySet) -> int:
    """Enqueue scheduled, retrying and dead jobs now, and return how many changed. Their failures stay readable.

    They are placed last among jobs of the same queue and priority.
    """
    legal = lock_rows(jobs.in_state(*sources(Event.REQUEUE)))
    keyed = list(legal.filter(lock_key__isnull=False).values_list("pk", flat=True))
    count = legal.update(state=State.ENQUEUED, enqueued_at=Now(), run_at=None, wid="", finished_at=None, purge_at=None)
    # An enqueued job becomes blocked if its lock is taken or another job is next in line for it (ADR 0015).
    locks.block_if_locked(connections[jobs.db], keyed)
    return count


def restarted(jobs: JobQuerySet) -> int:
    """Enqueue jobs as `requeued` does, without their committed steps and signals; return how many changed."""
    legal = lock_rows(jobs.in_state(*sources(Event.REQUEUE)))
    ids = list(legal.values_list("pk", flat=True))
    steps.forget_steps(ids, using=jobs.db)
    # A signal was sent to what this job has done so far.
    waits.forget_signals(ids, using=jobs.db)
    return requeued(legal)


def killed(dead_for_s: int) -> Change:
    """Return the change that moves scheduled, enqueued, blocked and retrying jobs to dead, and returns their number.

    A job that is dead already gets new times. A kill is no failure, so no counter changes.
    """
    purge_at = Now() + timedelta(seconds=dead_for_s)

    def kill(jobs: JobQuerySet) -> int:
        now = Now()
        return jobs.update(
            state=State.DEAD, limiter=None, run_at=None, finished_at=now, failed_at=now, purge_at=purge_at
        )

    return lambda jobs: leave(lock_rows(jobs.in_state(*sources(Event.KILL))), State.DEAD, kill)


def discarded(jobs: JobQuerySet) -> int:
    """Discard jobs that are not running, and return their number.

    Rows with a `result_ttl` are kept as discarded for `DISCARDED_FOR`, other rows are deleted.
    """
    return leave(lock_rows(jobs.in_state(*sources(Event.DISCARD))), State.DISCARDED, _discard_rows)


def leave(legal: JobQuerySet, to: State | None, write: Change) -> int:
    """Change locked jobs that do not run by `write`, so that they will not run; return their number.

    Then their batches are counted, and the jobs that waited behind them for a lock or a limiter become ready.
    """
    # Read before the change: other jobs of its key, or of a limiter, may have waited for a ready job that leaves.
    connection = connections[legal.db]
    keys, limiter_ids = locks.keys_of(legal), limiters.find_limiters_of(legal)
    batchless, members, member_rows = progress.split_members(legal)
    count = write(batchless) + write(members)
    progress.record_all(legal.db, member_rows, to)
    locks.promote_waiters_later(connection, keys)
    limiters.promote_waiters_later(connection, limiter_ids)
    return count


def _discard_rows(jobs: JobQuerySet) -> int:
    # Unlike a dead job, a discarded one frees its unique key (W27).
    kept = list(jobs.filter(result_ttl__isnull=False).values_list("pk", flat=True))
    if kept:
        connection = connections[jobs.db]
        now = clock_of(connection)
        with connection.cursor() as cursor:
            dialect_of(connection).keep(cursor, kept, State.DISCARDED, now, purge_at=now + DISCARDED_FOR)
    return len(kept) + delete_locked(jobs.filter(result_ttl__isnull=True))


def purged(jobs: JobQuerySet) -> int:
    """Delete finished jobs before their `purge_at`, and return the number of deleted rows."""
    dead = lock_rows(jobs.in_state(State.DEAD))
    # The ended ones were counted when they ended; a batch still waits for a dead one.
    members = progress.members_of(dead)
    deleted = delete_locked(dead)
    progress.record_all(jobs.db, members, GONE)
    return deleted + jobs.in_state(*ENDED).delete()[0]


# --- cancellations: workers poll for the marks. A mark that is older than `enqueued_at` is ignored: it counts until the
# job is enqueued again by a retry or a requeue, but not when it returns from a lost worker.


def cancel(store: Store, jids: Sequence[str]) -> int:
    """Discard waiting jobs, mark running jobs, and return the number of both. Dead and finished jobs stay unchanged."""
    storable = [jid for jid in jids if is_storable(jid)]

    def verb(_: BaseDatabaseWrapper, chunk: Sequence[str]) -> int:
        return cancelled(store.jobs.filter(jid__in=chunk), store.clock())

    return sum(run(store.alias, partial(verb, chunk=chunk)) for chunk in chunks(storable, CHUNK))


def cancelled(jobs: JobQuerySet, now: datetime | None = None) -> int:
    """Apply `cancel` to a queryset, inside the caller's transaction."""
    connection = connections[jobs.db]
    jobs = lock_rows(jobs.in_state(*UNFINISHED))
    clock = clock_of(connection, now)
    # Discard before marking: without row locks (SQLite), a job that is claimed between the two updates gets marked.
    discarded_count = discarded(jobs.in_state(*UNFINISHED - {State.WORKING}))
    # `Greatest`: if the clock is behind `enqueued_at`, a mark with its time would be ignored.
    marked = jobs.in_state(State.WORKING).update(cancel_requested_at=Greatest(Value(clock), F("enqueued_at")))
    return discarded_count + marked


def find_cancelled(store: Store, jids: Sequence[str]) -> list[str]:
    """Return the jids of the running jobs among `jids` that have a valid cancellation mark."""
    marked = store.jobs.in_state(State.WORKING).filter(cancel_requested_at__gte=F("enqueued_at"))
    return read(marked.filter(jid__in=jids).values_list("jid", flat=True))
