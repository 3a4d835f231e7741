"""What a person does to jobs: retry, kill, discard. Guarded by the state each is legal in, in bounded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

from ..lifecycle import DEAD_FOR_S, Event, State, sources
from ..models import Job
from .transactions import run

CHUNK = 500


def requeue(ids: Sequence[int], *, using: str) -> int:
    """Enqueue scheduled, retrying and dead jobs now; the failure stays readable. Returns how many were."""
    return _in_chunks(
        ids,
        Event.REQUEUE,
        using,
        lambda jobs: jobs.update(
            state=State.ENQUEUED, enqueued_at=Now(), run_at=None, wid="", finished_at=None, purge_at=None
        ),
    )


def kill(ids: Sequence[int], *, using: str, dead_for_s: int = DEAD_FOR_S) -> int:
    """Send scheduled, enqueued, retrying jobs to dead; a dead one is dated anew. Returns how many were."""
    purge_at = Now() + timedelta(seconds=dead_for_s)
    return _in_chunks(
        ids,
        Event.KILL,
        using,
        lambda jobs: jobs.update(state=State.DEAD, run_at=None, finished_at=Now(), purge_at=purge_at),
    )


def discard(ids: Sequence[int], *, using: str) -> int:
    """Drop jobs that are not running: a task's row stays as discarded for its result's time, others go."""

    def drop(jobs: Any) -> int:
        kept = jobs.filter(result_ttl__isnull=False).update(
            state=State.DISCARDED, run_at=None, finished_at=Now(), purge_at=Now() + timedelta(days=1)
        )
        gone, _ = jobs.filter(result_ttl__isnull=True).delete()
        return int(kept + gone)

    return _in_chunks(ids, Event.DISCARD, using, drop)


def _in_chunks(ids: Sequence[int], event: Event, using: str, change: Callable[[Any], int]) -> int:
    """Apply `change` to those of these jobs to which `event` may happen, a bounded set at a time."""
    changed = 0

    def verb(_: BaseDatabaseWrapper) -> int:
        return change(Job.objects.using(using).filter(pk__in=chunk).in_state(*sources(event)))

    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        changed += run(using, verb)
    return changed
