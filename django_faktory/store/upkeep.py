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
from ..models import Job
from . import gates, locks, members
from .dialects import dialect_of
from .transactions import run

CHUNK = 500
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
    """Drop jobs that nobody took in time, at most `limit`; returns how many. Tasks' stay as expired for their result's
    time, others go."""
    jobs, over = Job.objects.using(using), over_jobs(using=using, now=now)
    if not run(using, lambda _: over.exists(), atomic=False):  # nearly always
        return 0

    def verb(connection: BaseDatabaseWrapper) -> int:
        rows = list(skip_locked(over.order_by("expires_at")).values_list("pk", "result_ttl")[:limit])
        if not rows:
            return 0
        with connection.cursor() as cursor:
            clock = now or dialect_of(connection).now(cursor)
        theirs = members.of_batches(jobs.filter(pk__in=[pk for pk, _ in rows]))
        locks.settle_later(connection, locks.keys_of(jobs.filter(pk__in=[pk for pk, _ in rows])))
        gates.settle_later(connection, gates.let_go_by(jobs.filter(pk__in=[pk for pk, _ in rows])))
        jobs.filter(pk__in=[pk for pk, ttl in rows if ttl is None]).delete()
        for ttl in {ttl for _, ttl in rows if ttl is not None}:
            jobs.filter(pk__in=[pk for pk, kept in rows if kept == ttl]).update(
                state=State.EXPIRED,
                gate=None,
                run_at=None,
                unique_key=None,
                finished_at=clock,
                purge_at=later(clock, ttl),
            )
        members.note(connection, [members.Change(job, State.EXPIRED) for job in theirs], clock)
        return len(rows)

    return run(using, verb)


def over_jobs(*, using: str, now: datetime | None = None) -> QuerySet[Job]:
    """See `expire`."""
    return Job.objects.using(using).in_state(*sources(Event.EXPIRE)).filter(expires_at__lte=now or Now())


def purge(*, using: str, now: datetime | None = None, limit: int = CHUNK) -> int:
    """Delete finished jobs that were kept long enough, at most `limit`; returns how many."""

    def verb(_: BaseDatabaseWrapper) -> int:
        jobs = Job.objects.using(using).in_state(*FINISHED)
        old = skip_locked(jobs.filter(purge_at__lt=now or Now()).order_by("purge_at"))
        ids = list(old.values_list("pk", flat=True)[:limit])
        if not ids:
            return 0
        dead = members.of_batches(Job.objects.using(using).filter(pk__in=ids).in_state(State.DEAD))
        gone = jobs.filter(pk__in=ids).delete()[0]
        members.note_all(using, dead, GONE)
        return gone

    return run(using, verb)


def skip_locked(jobs: Any) -> Any:
    """Lock these rows and leave out those another node is busy with, where the database can."""
    features = connections[jobs.db].features
    return jobs.select_for_update(skip_locked=True) if features.has_select_for_update_skip_locked else jobs
