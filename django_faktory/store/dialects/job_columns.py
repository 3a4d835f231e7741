"""Columns of a job's row that a push writes (`INSERTED`, `REPLACED`), and the rows that it may replace."""

from __future__ import annotations

from ...core.job_options import JobOptions
from ...core.lifecycle import FINISHED, State

INSERTED = (
    "jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for, backtrace, result_ttl, run_at, enqueued_at"
)
"""Columns of a job without options."""

REPLACED = (
    "jobtype", "queue", "state", "sort_priority", "payload", "retry", "reserve_for", "backtrace", "result_ttl",
    "run_at", "enqueued_at", "created_at", "failures", "losses", "interruptions", "errtype", "failure", "history",
    "result", "wid", "started_at", "reserved_until", "finished_at", "purge_at", "failed_at", "expires_at", "unique_key",
    "unique_expires_at", "unique_until_start", "lock_key", "lock_token", "limit_key", "limiter", "permits",
    "bid", "callback_of", "has_run", "counts_failed", "about",
)  # fmt: skip
"""Columns that an earlier run may have written, so that a push that replaces the row must write them."""

NO_OPTIONS = JobOptions()

# Sorted: the order of a set differs between processes, but a statement must have the same text in all of them.
_ENDED_SQL = ", ".join(f"'{state}'" for state in sorted(FINISHED - {State.DEAD}))


def replaceable(row: str = "") -> str:
    """Return an SQL condition: a push may replace this row.

    A finished job may be replaced, except for a dead one that a batch still waits for.
    """
    state, bid, callback_of = (f"{row}{column}" for column in ("state", "bid", "callback_of"))
    return f"({state} IN ({_ENDED_SQL}) OR ({state} = 'dead' AND {bid} IS NULL AND {callback_of} IS NULL))"
