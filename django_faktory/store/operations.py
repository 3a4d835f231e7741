"""What a person does to jobs: requeue, kill, discard. Each by a guarded update of a set; and of jobs picked by hand.

A change is applied to a queryset inside the caller's transaction; `many` picks the jobs and keeps the sets small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

from ..lifecycle import DEAD_FOR_S, Event, State, sources
from ..models import Job, JobQuerySet
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


def requeued(jobs: JobQuerySet) -> int:
    """The change of `requeue`: behind all that wait in their queues, and of their priority."""
    return jobs.in_state(*sources(Event.REQUEUE)).update(
        state=State.ENQUEUED, enqueued_at=Now(), run_at=None, wid="", finished_at=None, purge_at=None
    )


def killed(dead_for_s: int) -> Change:
    """The change of `kill`: nothing failed and nothing is counted."""
    purge_at = Now() + timedelta(seconds=dead_for_s)

    def change(jobs: JobQuerySet) -> int:
        return jobs.in_state(*sources(Event.KILL)).update(
            state=State.DEAD, run_at=None, finished_at=Now(), purge_at=purge_at
        )

    return change


def discarded(jobs: JobQuerySet) -> int:
    """The change of `discard`."""
    legal = jobs.in_state(*sources(Event.DISCARD))
    kept = legal.filter(result_ttl__isnull=False).update(
        state=State.DISCARDED, unique_key=None, run_at=None, finished_at=Now(), purge_at=Now() + DISCARDED_FOR
    )
    gone, _ = legal.filter(result_ttl__isnull=True).delete()
    return kept + gone


def _in_chunks(ids: Sequence[int], change: Change, using: str) -> int:
    """Apply `change` to these jobs, a bounded set at a time."""
    changed = 0

    def verb(_: BaseDatabaseWrapper) -> int:
        return change(Job.objects.using(using).filter(pk__in=chunk))

    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        changed += run(using, verb)
    return changed
