"""Cancel jobs: what waits is dropped; what runs is marked, and its worker told when it asks.

A mark counts until its job is enqueued anew (a retry, a requeue by hand): one older than `enqueued_at` is nothing. So
it outlasts a worker that is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Value
from django.db.models.functions import Greatest

from ..lifecycle import WAITING, State
from ..models import Job
from . import operations
from .dialects import dialect_of
from .jobs import is_storable
from .transactions import run

CHUNK = 500
_READY = (State.ENQUEUED, State.BLOCKED)


def cancel(jids: Sequence[str], *, using: str, now: datetime | None = None) -> int:
    """Drop jobs that wait, and mark those that run; returns how many it was. What is dead or ended stays as it is."""
    known = [jid for jid in jids if is_storable(jid)]
    changed = 0

    def verb(connection: BaseDatabaseWrapper) -> int:
        return _cancel(connection, chunk, using, now)

    for start in range(0, len(known), CHUNK):
        chunk = known[start : start + CHUNK]
        changed += run(using, verb)
    return changed


def _cancel(connection: BaseDatabaseWrapper, jids: Sequence[str], using: str, now: datetime | None) -> int:
    jobs = Job.objects.using(using).filter(jid__in=jids)
    jobs = operations.locked(jobs.in_state(*WAITING, *_READY, State.WORKING))
    with connection.cursor() as cursor:
        clock = now or dialect_of(connection).now(cursor)
    # In this order: where rows cannot be locked, a job that a worker takes in between runs, and is marked.
    dropped = operations.discarded(jobs.in_state(*WAITING, *_READY))
    marked = jobs.in_state(State.WORKING).update(cancel_requested_at=Greatest(Value(clock), F("enqueued_at")))
    return dropped + marked


def cancelled(jids: Sequence[str], *, using: str) -> list[str]:
    """Those of these jobs that run and are to be cancelled."""
    marked = Job.objects.using(using).in_state(State.WORKING).filter(cancel_requested_at__gte=F("enqueued_at"))
    return run(using, lambda _: list(marked.filter(jid__in=jids).values_list("jid", flat=True)), atomic=False)
