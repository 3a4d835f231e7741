"""What time does to jobs: due ones are enqueued, old ones are purged. Each safe to run twice at once, no leader."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet
from django.db.models.functions import Now

from ..jsonfields import later
from ..lifecycle import FINISHED, GONE, Event, State, sources
from ..models import Job, JobQuerySet
from . import gates, locks, members
from .dialects import dialect_of
from .transactions import run

CHUNK = 500
CLEARED_AT_ONCE = 20
"""Sets of finished rows whose expiry is cleared before the other steps of maintenance have their turn."""
WAITING = (State.SCHEDULED, State.RETRIES)


def enqueue_due(*, using: str, now: datetime | None = None, limit: int = CHUNK) -> set[str]:
    """Enqueue jobs whose time has come, at most `limit`; returns their queues, empty when none was due."""

    def verb(connection: BaseDatabaseWrapper) -> set[str]:
        rows: list[tuple[int, str, str | None]] = []
        for waiting in by_time(connection, using=using):
            due = skip_locked(waiting.filter(run_at__lte=now or Now()))
            rows += due.values_list("pk", "queue", "lock_key")[: limit - len(rows)]
        if rows:
            with connection.cursor() as cursor:
                clock = now or dialect_of(connection).now(cursor)
            Job.objects.using(using).filter(pk__in=[pk for pk, _, _ in rows]).in_state(*WAITING).update(
                state=State.ENQUEUED, enqueued_at=clock, run_at=None, wid=""
            )
            locks.arrived(connection, [pk for pk, _, key in rows if key])
        return {queue for _, queue, _ in rows}

    return run(using, verb)


def by_time(connection: BaseDatabaseWrapper, *, using: str) -> list[Any]:
    """Jobs that wait for their time, the soonest first: together, or by state where the index is led by it.

    One query over both states would there read, and lock, all that is due to find the first.
    """
    jobs = Job.objects.using(using).order_by("run_at")
    if connection.features.supports_partial_indexes:
        return [jobs.in_state(*WAITING)]
    return [jobs.filter(state=str(state)) for state in WAITING]


def expire(*, using: str, now: datetime | None = None, limit: int = CHUNK) -> int:
    """Drop jobs that no worker took in time, at most `limit`; returns how many. Tasks' stay as expired for their
    result's time, others go."""
    jobs, over = Job.objects.using(using), over_jobs(using=using, now=now)
    if not _is_partial(using):
        _clear_expiries(using, now)
    first = over.values_list("pk", flat=True)[:1]  # in order: `exists()` may read the table for it
    if not run(using, lambda _: list(first), atomic=False):  # nearly always
        return 0

    def verb(connection: BaseDatabaseWrapper) -> int:
        rows = list(skip_locked(over.only(*members.FIELDS, *_OF_WAITING))[:limit])
        if not rows:
            return 0
        with connection.cursor() as cursor:
            clock = now or dialect_of(connection).now(cursor)
        ready = [job for job in rows if job.state == State.ENQUEUED]
        locks.settle_later(connection, {job.lock_key for job in ready if job.lock_key})
        gates.settle_later(connection, {job.gate for job in ready})
        jobs.filter(pk__in=[job.pk for job in rows if job.result_ttl is None]).delete()
        for ttl in {job.result_ttl for job in rows if job.result_ttl is not None}:
            jobs.filter(pk__in=[job.pk for job in rows if job.result_ttl == ttl]).update(
                state=State.EXPIRED,
                gate=None,
                run_at=None,
                unique_key=None,
                finished_at=clock,
                purge_at=later(clock, ttl),
            )
        theirs = sorted((job for job in rows if job.bid or job.callback_of), key=lambda job: job.pk)
        members.note(connection, [members.Change(job, State.EXPIRED) for job in theirs], clock)
        return len(rows)

    return run(using, verb)


_OF_WAITING = ("state", "result_ttl", "lock_key", "gate")


def over_jobs(*, using: str, now: datetime | None = None) -> QuerySet[Job]:
    """Jobs whose expiry has passed before a worker took them, the first to expire first."""
    jobs = expiring(using=using).filter(expires_at__lte=now or Now())
    return jobs if _is_partial(using) else jobs.in_state(*sources(Event.EXPIRE))


def expiring(*, using: str) -> JobQuerySet:
    """Jobs with an expiry, in its order, as the index has them: its head says whether `expire` has anything to do.

    A finished row keeps its expiry. Where the index has no condition it is in there until `expire` clears it.
    """
    jobs = Job.objects.using(using).filter(expires_at__isnull=False).order_by("expires_at")
    return jobs.in_state(*sources(Event.EXPIRE)) if _is_partial(using) else jobs.exclude(state=State.WORKING)


def _is_partial(using: str) -> bool:
    return connections[using].features.supports_partial_indexes


def _clear_expiries(using: str, now: datetime | None) -> None:
    """Take finished rows out of the head of an index that has them (MariaDB), a bounded number at a time.

    Else each look at the head would read past all that are kept.
    """
    finished = expiring(using=using).in_state(*FINISHED).filter(expires_at__lte=now or Now())

    def verb(_: BaseDatabaseWrapper) -> int:
        ids = list(skip_locked(finished).values_list("pk", flat=True)[:CHUNK])
        Job.objects.using(using).filter(pk__in=ids).update(expires_at=None)
        return len(ids)

    for _ in range(CLEARED_AT_ONCE):
        if run(using, verb) < CHUNK:
            return


def purge(*, using: str, now: datetime | None = None, limit: int = CHUNK) -> int:
    """Delete finished jobs that were kept long enough, at most `limit`; returns how many."""

    def verb(connection: BaseDatabaseWrapper) -> int:
        rows: list[Job] = []
        for finished in _by_purge(connection, using=using):
            old = skip_locked(finished.filter(purge_at__lt=now or Now()).only(*members.FIELDS, "state"))
            rows += old[: limit - len(rows)]
        if not rows:
            return 0
        gone = Job.objects.using(using).filter(pk__in=[job.pk for job in rows]).in_state(*FINISHED).delete()[0]
        dead = [job for job in rows if job.state == State.DEAD and (job.bid or job.callback_of)]
        members.note_all(using, sorted(dead, key=lambda job: job.pk), GONE)
        return gone

    return run(using, verb)


def _by_purge(connection: BaseDatabaseWrapper, *, using: str) -> list[Any]:
    """Finished jobs, the first to be purged first: together, or by state where the index is led by it.

    One query over all states would there read and sort all that is due for each set (MariaDB, 400,000 due: 4 s).
    """
    jobs = Job.objects.using(using).order_by("purge_at")
    if connection.features.supports_partial_indexes:
        return [jobs.in_state(*FINISHED)]
    return [jobs.filter(state=str(state)) for state in State if state in FINISHED]


def skip_locked(jobs: Any) -> Any:
    """Lock these rows and leave out those another node is busy with, where the database can."""
    features = connections[jobs.db].features
    return jobs.select_for_update(skip_locked=True) if features.has_select_for_update_skip_locked else jobs
