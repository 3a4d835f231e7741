"""Columns of a job's row that a push writes (`INSERTED`, `REPLACED`, `NewRow`), and the rows that it may replace."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec

from ...core.job_options import JobOptions
from ...core.lifecycle import State
from ...core.payloads import JobPayload

INSERTED = (
    "jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for, backtrace, result_ttl, run_at, enqueued_at"
)
"""Columns of a job without options."""

REPLACED = (
    "jobtype", "queue", "state", "sort_priority", "payload", "retry", "reserve_for", "backtrace", "result_ttl",
    "run_at", "enqueued_at", "created_at", "failures", "losses", "interruptions", "errtype", "failure", "history",
    "result", "wid", "started_at", "reserved_until", "finished_at", "purge_at", "failed_at", "expires_at", "unique_key",
    "unique_expires_at", "unique_until_start", "lock_key", "lock_token", "limit_key", "limiter", "permits",
    "bid", "callback_of", "has_run", "counts_failed", "about", "waits_for",
)  # fmt: skip
"""Columns that an earlier run may have written, so that a push that replaces the row must write them."""

NO_OPTIONS = JobOptions()


class NewRow(msgspec.Struct, gc=False):
    """The columns of a new job: those of each job, then those that need options. Other columns have defaults."""

    jid: str
    jobtype: str
    queue: str
    state: str
    sort_priority: int
    payload: str
    retry: int
    reserve_for: int
    backtrace: int
    result_ttl: int | None
    run_at: Any
    enqueued_at: Any
    created_at: Any
    expires_at: Any = None
    limit_key: str | None = None
    about: str | None = None
    unique_key: str | None = None
    unique_expires_at: Any = None
    unique_until_start: bool = False
    lock_key: str | None = None
    bid: str | None = None
    callback_of: str | None = None


PLAIN, UNKEYED = 13, 16
"""Numbers of columns of a job without options, and of one without keys and batch."""

_SCHEDULED, _ENQUEUED = str(State.SCHEDULED), str(State.ENQUEUED)


def new_row(
    job: JobPayload, now: datetime, created_at: Any, place: int, adapt: Callable[[datetime | None], Any]
) -> NewRow:
    """Return the row of a pushed job. `adapt` turns a time into the database's form; `created_at` is `now` in it."""
    due_at = job.at if job.at is not None and job.at > now else None
    # A microsecond apart, so that a set is claimed in the order of its push, not of its insertion (ADR 0024).
    enqueued_at = None if due_at else adapt(now + timedelta(microseconds=place)) if place else created_at
    row = NewRow(
        job.jid, job.jobtype, job.queue, _SCHEDULED if due_at else _ENQUEUED, -job.priority, job.text,
        job.retry, job.reserve_for, job.backtrace, job.result_ttl, adapt(due_at) if due_at else None, enqueued_at,
        created_at,
    )  # fmt: skip
    if options := job.options:
        # A lifetime starts when the job may first run, by the database's clock.
        starts_at = due_at or now
        row.expires_at, row.limit_key, row.about = adapt(options.expiry(starts_at)), options.limit_key, options.about
        row.unique_key, row.unique_until_start = options.unique_key, options.unique_until_start
        row.unique_expires_at = adapt(options.unique_ends(starts_at))
        row.lock_key, row.bid = options.lock_key, options.bid
    return row


def replaceable(row: str = "") -> str:
    """Return an SQL condition: a push may replace this row.

    A dead job may be replaced, unless a batch still waits for it.
    """
    state, bid, callback_of = (f"{row}{column}" for column in ("state", "bid", "callback_of"))
    return f"({state} = 'dead' AND {bid} IS NULL AND {callback_of} IS NULL)"
