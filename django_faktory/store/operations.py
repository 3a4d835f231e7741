"""What a person does to jobs: requeue, defer, kill, discard. Each by a guarded update of a set; and of jobs by hand.

A change is applied to a queryset inside the caller's transaction; `many` picks the jobs and keeps the sets small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, DateTimeField, Value, When
from django.db.models.functions import Now

from ..lifecycle import DEAD_FOR_S, GONE, Event, State, sources
from ..models import Job, JobLock, JobQuerySet
from . import gates, locks, members
from .dialects.base import JOB, marks
from .transactions import run

CHUNK = 500
DISCARDED_FOR = timedelta(days=1)
"""How long the row of a task that was dropped stays readable."""

Change = Callable[[JobQuerySet], int]


def requeue(ids: Sequence[int], *, using: str) -> int:
    """Enqueue scheduled, retrying and dead jobs now; the failure stays readable. Returns how many were."""
    return _in_chunks(ids, requeued, using)


def kill(ids: Sequence[int], *, using: str, dead_for_s: int = DEAD_FOR_S) -> int:
    """Send scheduled, enqueued, retrying jobs to dead; a dead one is dated anew. Returns how many were."""
    return _in_chunks(ids, killed(dead_for_s), using)


def discard(ids: Sequence[int], *, using: str) -> int:
    """Drop jobs that are not running: a task's row stays as discarded for a while, others go."""
    return _in_chunks(ids, discarded, using)


def defer(times: Mapping[int, datetime], *, using: str) -> int:
    """Have jobs that failed wait for a next try at these times, by id; at most `CHUNK`. Returns how many do.

    As with `requeue`, the failure stays readable and counts.
    """
    whens = [When(pk=pk, then=Value(moment, DateTimeField())) for pk, moment in times.items()]

    def verb(_: BaseDatabaseWrapper) -> int:
        legal = locked(Job.objects.using(using).filter(pk__in=list(times)).in_state(*sources(Event.DEFER)))
        return legal.update(state=State.RETRIES, run_at=Case(*whens), wid="", finished_at=None, purge_at=None)

    return run(using, verb) if times else 0


def keep_for(pk: int, seconds: int, *, using: str) -> None:
    """Have a job leave a row that tells its end, for so long, where it would leave none."""
    jobs = Job.objects.using(using).filter(pk=pk, result_ttl=None)
    run(using, lambda _: jobs.update(result_ttl=seconds), atomic=False)


def free_locks(tokens: Sequence[int], *, using: str) -> int:
    """Take locks from jobs that run on: their workers learn of it, and the next of each key is ready. Returns how many.

    By token: a lock that another holds by now is not touched.
    """

    def verb(connection: BaseDatabaseWrapper) -> int:
        held = JobLock.objects.using(using).filter(pk__in=tokens).order_by("key")
        if connection.features.has_select_for_update:
            held = held.select_for_update()
        found = dict(held.values_list("pk", "key"))
        JobLock.objects.using(using).filter(pk__in=list(found)).delete()
        locks.make_next_ready(connection, sorted(found.values()))
        return len(found)

    return run(using, verb)


def locked(jobs: JobQuerySet) -> JobQuerySet:
    """Lock these jobs in the order of their ids, and return them as a set of ids; inside a transaction.

    An UPDATE locks rows in the order in which it finds them, so that two of them could wait for each other.
    """
    connection = connections[jobs.db]
    if not connection.features.has_select_for_update:
        return jobs
    if connection.vendor == "mysql":
        # A locking SELECT waits for each row that its plan reads, and MariaDB scans a small table for many ids.
        found = list(jobs.values_list("pk", flat=True))
        with connection.cursor() as cursor:
            if found:
                cursor.execute(
                    f"SELECT id FROM {JOB} FORCE INDEX (PRIMARY) WHERE id IN ({marks(found)}) ORDER BY id FOR UPDATE",
                    found,
                )
        ids = list(jobs.filter(pk__in=found).values_list("pk", flat=True))
    else:
        ids = list(jobs.order_by("pk").select_for_update().values_list("pk", flat=True))
    return Job.objects.using(jobs.db).filter(pk__in=ids)


def requeued(jobs: JobQuerySet) -> int:
    """The change of `requeue`: behind all that wait in their queues, and of their priority."""
    legal = locked(jobs.in_state(*sources(Event.REQUEUE)))
    keyed = list(legal.filter(lock_key__isnull=False).values_list("pk", flat=True))
    requeued = legal.update(
        state=State.ENQUEUED, enqueued_at=Now(), run_at=None, wid="", finished_at=None, purge_at=None
    )
    locks.arrived(connections[jobs.db], keyed)
    return requeued


def killed(dead_for_s: int) -> Change:
    """The change of `kill`: nothing failed and nothing is counted."""
    purge_at = Now() + timedelta(seconds=dead_for_s)

    def change(jobs: JobQuerySet) -> int:
        legal = locked(jobs.in_state(*sources(Event.KILL)))
        keys, left = locks.keys_of(legal), gates.let_go_by(legal)
        free, theirs, rows = members.apart(legal)
        killed = sum(
            some.update(state=State.DEAD, gate=None, run_at=None, finished_at=Now(), purge_at=purge_at)
            for some in (free, theirs)
        )
        members.note_all(jobs.db, rows, State.DEAD)
        locks.settle_later(connections[jobs.db], keys)
        gates.settle_later(connections[jobs.db], left)
        return killed

    return change


def discarded(jobs: JobQuerySet) -> int:
    """The change of `discard`."""
    legal = locked(jobs.in_state(*sources(Event.DISCARD)))
    keys, left = locks.keys_of(legal), gates.let_go_by(legal)
    free, theirs, rows = members.apart(legal)
    dropped = _dropped(free) + _dropped(theirs)
    members.note_all(jobs.db, rows, State.DISCARDED)
    locks.settle_later(connections[jobs.db], keys)
    gates.settle_later(connections[jobs.db], left)
    return dropped


def _dropped(jobs: JobQuerySet) -> int:
    kept = jobs.filter(result_ttl__isnull=False).update(
        state=State.DISCARDED,
        gate=None,
        unique_key=None,
        run_at=None,
        finished_at=Now(),
        purge_at=Now() + DISCARDED_FOR,
    )
    gone, _ = jobs.filter(result_ttl__isnull=True).delete()
    return kept + gone


def purged(jobs: JobQuerySet) -> int:
    """Delete jobs that ended, before their time."""
    legal = locked(jobs.in_state(*sources(Event.PURGE)))
    dead = members.of_batches(legal.in_state(State.DEAD))
    gone, _ = legal.delete()
    members.note_all(jobs.db, dead, GONE)
    return gone


def _in_chunks(ids: Sequence[int], change: Change, using: str) -> int:
    """Apply `change` to these jobs, a bounded set at a time."""
    changed = 0

    def verb(_: BaseDatabaseWrapper) -> int:
        return change(Job.objects.using(using).filter(pk__in=chunk))

    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        changed += run(using, verb)
    return changed
