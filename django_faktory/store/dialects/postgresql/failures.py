"""Read and write failed jobs on PostgreSQL with one message each (ADR 0043)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from ..values import FailureColumns, Tally
from .calls import function
from .jobs import ADD_TO_COUNTERS
from .prepared import Call, Command

READ = (
    "id", "enqueued_at", "finished_at", "purge_at", "failed_at", "cancel_requested_at", "retry", "result_ttl",
    "failures", "backtrace", "losses", "has_run", "counts_failed", "jid", "jobtype", "queue", "lock_key", "bid",
    "callback_of", "errtype", "failure", "history", "state", "wid", "attempt", "run_at", "started_at",
    "reserved_until", "lock_token", "permits", "unique_key",
)  # fmt: skip
"""Columns of `faktory_failing_1`, in the order of the model's fields, as Django expects them."""

# A separate statement: FOR UPDATE may wait, and the time after that wait is the relevant one.
CLOCK = Command("faktory_clock", ["timestamptz"], "SELECT COALESCE($1, STATEMENT_TIMESTAMP())")


def lock_failed_calls(jids: Collection[str], now: datetime | None) -> list[Call]:
    """Return the calls that lock and read jobs reported as failed, and then read the time."""
    return [(function("faktory_failing_1"), [list(jids)]), (CLOCK, [now])]


def save_calls(changed: Sequence[FailureColumns], day: datetime, tally: Tally) -> list[Call]:
    """Return the calls that write failed jobs, and count them."""
    calls: list[Call] = []
    if changed:
        columns: list[list[Any]] = [list(column) for column in zip(*changed, strict=True)]
        calls.append((function("faktory_save_1"), columns))
    if tally != Tally():
        calls.append((ADD_TO_COUNTERS, [day.date(), *tally.amounts]))
    return calls
