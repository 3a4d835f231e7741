"""Cancel jobs: discard waiting jobs, and mark running jobs so that their workers can stop them.

Workers poll for the marks with `find_cancelled`. A mark counts until the job is enqueued again by a retry or a requeue:
a mark older than `enqueued_at` is ignored. A job that returns from a lost worker keeps its `enqueued_at` and its mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Value
from django.db.models.functions import Greatest

from ...core.lifecycle import LIVE, State
from ...core.payloads import is_storable
from ...models import Job, JobQuerySet
from ..chunks import chunks
from ..dialects import clock_of
from ..transactions import run
from . import transitions

CHUNK = 500


def cancel(jids: Sequence[str], *, using: str, now: datetime | None = None) -> int:
    """Discard waiting jobs, mark running jobs, and return the number of both. Dead and finished jobs stay unchanged."""
    storable = [jid for jid in jids if is_storable(jid)]

    def verb(_: BaseDatabaseWrapper, chunk: Sequence[str]) -> int:
        return cancelled(Job.objects.using(using).filter(jid__in=chunk), now)

    return sum(run(using, partial(verb, chunk=chunk)) for chunk in chunks(storable, CHUNK))


def cancelled(jobs: JobQuerySet, now: datetime | None = None) -> int:
    """Apply `cancel` to a queryset, inside the caller's transaction."""
    connection = connections[jobs.db]
    jobs = transitions.lock_rows(jobs.in_state(*LIVE))
    clock = clock_of(connection, now)
    # Discard before marking: without row locks (SQLite), a job that is claimed between the two updates gets marked.
    discarded = transitions.discarded(jobs.in_state(*LIVE - {State.WORKING}))
    # `Greatest`: if the clock is behind `enqueued_at`, a mark with its time would be ignored.
    marked = jobs.in_state(State.WORKING).update(cancel_requested_at=Greatest(Value(clock), F("enqueued_at")))
    return discarded + marked


def find_cancelled(jids: Sequence[str], *, using: str) -> list[str]:
    """Return the jids of the running jobs among `jids` that have a valid cancellation mark."""
    marked = Job.objects.using(using).in_state(State.WORKING).filter(cancel_requested_at__gte=F("enqueued_at"))
    return run(using, lambda _: list(marked.filter(jid__in=jids).values_list("jid", flat=True)), atomic=False)
