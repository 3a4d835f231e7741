"""Change a job that is not running: its arguments, queue, priority or time. Its state and `enqueued_at` stay.

Values derived from arguments and queue are computed again: unique key, lock key and limit key, and so whether the job
is blocked.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

from django.db import IntegrityError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.lifecycle import DELAYED, Event, State, sources
from ...core.payloads import JobPayload
from ...errors import InvalidTransition, JobNotFound, NotUnique
from ...models import Job
from ..dialects.job_columns import NO_OPTIONS
from ..limits import limiters
from ..locks import locks
from ..transactions import run

EDITABLE = sources(Event.KILL)
"""States of a job that is not running but may still run: those in which it can be killed, dead included."""

_EDITED = (
    "payload", "queue", "sort_priority", "run_at", "lock_key", "limit_key", "limiter", "unique_key", "state",
    "is_returned",
)  # fmt: skip


class Edit(NamedTuple):
    """The new values of a job. `job` holds its new text and the values that a PUSH derives from it."""

    job: JobPayload
    sort_priority: int
    run_at: datetime | None
    """None leaves the time unchanged."""


def edit(jid: str, change: Callable[[Job], Edit], *, using: str) -> Job:
    """Apply the edit that `change` returns for the stored job, in one transaction, and return the updated job.

    Raise JobNotFound; InvalidTransition if the job is not `EDITABLE`, or if it gets a time although it is neither
    scheduled nor retrying; NotUnique if another job holds the key of the new arguments; and any error of `change`.
    """

    def verb(connection: BaseDatabaseWrapper) -> Job:
        row = Job.live.using(using).filter(jid=jid).select_for_update().first()
        row = row or Job.objects.using(using).latest_of(jid)
        if row is None:
            raise JobNotFound(jid)
        if row.state not in EDITABLE:
            raise InvalidTransition("a job that is %(state)s cannot be edited", state=row.state)
        new_values = change(row)
        if new_values.run_at is not None and row.state not in DELAYED:
            raise InvalidTransition("a job that is %(state)s has no time to wait for", state=row.state)
        with transaction.atomic(using=using):  # a savepoint: a taken key must not abort the caller's transaction
            _write(connection, row, new_values)
        return Job.live.using(using).get(pk=row.pk)

    try:
        return run(using, verb)
    except IntegrityError as error:
        raise NotUnique(jid) from error


def _write(connection: BaseDatabaseWrapper, row: Job, new_values: Edit) -> None:
    options = new_values.job.options or NO_OPTIONS
    old_lock_key, old_limiter_id = row.lock_key, row.limiter
    old_place = (row.lock_key, row.limit_key, row.queue, row.sort_priority)
    row.payload, row.queue, row.sort_priority = new_values.job.text, new_values.job.queue, new_values.sort_priority
    row.run_at = new_values.run_at or row.run_at
    row.lock_key, row.limit_key = options.lock_key, options.limit_key
    if row.unique_key is not None:  # a key that the job has released, or lost by its expiry, stays free
        row.unique_key = options.unique_key
    new_place = (row.lock_key, row.limit_key, row.queue, row.sort_priority)
    is_moved = new_place != old_place and row.state in (State.ENQUEUED, State.BLOCKED)
    # A job that moves to another lock, limit, queue or priority leaves its place, and is checked again at the new one:
    # `locks.block_if_locked` or the limiter of the next claim blocks it again if necessary.
    if is_moved:
        row.limiter = None
        row.is_returned = True
        if row.state == State.BLOCKED:
            row.state = State.ENQUEUED
    Job.live.using(connection.alias).filter(pk=row.pk, state__in=map(str, EDITABLE)).update(
        **{column: getattr(row, column) for column in _EDITED}
    )
    if is_moved:
        locks.block_if_locked(connection, [row.pk])
        # Jobs that waited behind this one, for its old lock or limiter, may be next now.
        locks.promote_waiters_later(connection, {old_lock_key} if old_lock_key else set())
        limiters.promote_waiters_later(connection, [old_limiter_id])
