"""Change a job that does not run: what it is called with, where and when. Its state stays, and since when it waits.

What follows from its arguments and queue follows anew: the key it is unique by, the lock it waits for; and so whether
it is blocked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

from django.db import IntegrityError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..errors import InvalidTransition, JobNotFound, NotUnique
from ..lifecycle import WAITING, Event, State, sources
from ..models import Job
from ..options import JobOptions
from ..payloads import JobPayload
from . import gates, locks
from .transactions import run

EDITABLE = sources(Event.KILL)
"""The states of a job that may run, and does not run just now."""

_NO_OPTIONS = JobOptions()


class Edit(NamedTuple):
    """What a job is to become; `text` and what follows from it, as PUSH reads it."""

    job: JobPayload
    weight: int
    run_at: datetime | None
    """None: as before."""


def edit(jid: str, change: Callable[[Job], Edit], *, using: str) -> Job:
    """Apply what `change` makes of the stored job, in one transaction; returns the job as it is then.

    Raises JobNotFound; InvalidTransition for one that runs or has ended, or is given a time and waits for none;
    NotUnique where another job holds the key of its new arguments; and whatever `change` raises.
    """

    def verb(connection: BaseDatabaseWrapper) -> Job:
        rows = Job.objects.using(using).filter(jid=jid)
        if connection.features.has_select_for_update:
            rows = rows.select_for_update()
        row = rows.first()
        if row is None:
            raise JobNotFound(jid)
        if row.state not in EDITABLE:
            raise InvalidTransition(f"a job that is {row.state} cannot be edited")
        wanted = change(row)
        if wanted.run_at is not None and row.state not in WAITING:
            raise InvalidTransition(f"a job that is {row.state} has no time to wait for")
        with transaction.atomic(using=using):  # so that a caller's transaction outlives a key that is taken
            _write(connection, row, wanted)
        return Job.objects.using(using).get(pk=row.pk)

    try:
        return run(using, verb)
    except IntegrityError as error:
        raise NotUnique(jid) from error


def _write(connection: BaseDatabaseWrapper, row: Job, wanted: Edit) -> None:
    options = wanted.job.options or _NO_OPTIONS
    before, left = (row.lock_key, row.limit_key, row.queue, row.weight), row.gate
    row.payload, row.queue, row.weight = wanted.job.text, wanted.job.queue, wanted.weight
    row.run_at = wanted.run_at or row.run_at
    row.lock_key, row.limit_key = options.lock_key, options.limit_key
    if row.unique_key is not None:  # a key it has let go of stays free
        row.unique_key = options.unique_key
    moves = (row.lock_key, row.limit_key, row.queue, row.weight) != before and row.state in (
        State.ENQUEUED,
        State.BLOCKED,
    )
    was_blocked = row.state == State.BLOCKED
    if moves:
        row.gate = None
    if moves and was_blocked:
        row.state = State.ENQUEUED  # `arrived` parks it again where it is not its turn, or the next claim at its gate
    columns: Sequence[str] = (
        "payload",
        "queue",
        "weight",
        "run_at",
        "lock_key",
        "limit_key",
        "gate",
        "unique_key",
        "state",
    )
    Job.objects.using(connection.alias).filter(pk=row.pk, state__in=map(str, EDITABLE)).update(
        **{column: getattr(row, column) for column in columns}
    )
    if moves:
        locks.arrived(connection, [row.pk])
        locks.settle_later(connection, {before[0]} if before[0] else set())
        gates.settle_later(connection, [left])
