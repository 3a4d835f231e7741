"""Read and write failed jobs on PostgreSQL with one message each (ADR 0010)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..base import JOB, counter_slot
from ..values import FailureColumns, Tally
from .jobs import ADD_TO_COUNTERS
from .prepared import Call, Statement, unnest

READ = (
    "id", "jid", "jobtype", "queue", "state", "retry", "backtrace", "result_ttl", "run_at", "enqueued_at", "started_at",
    "reserved_until", "finished_at", "purge_at", "failed_at", "wid", "attempt", "failures", "losses", "errtype",
    "failure", "history", "unique_key", "lock_key", "lock_token", "permits", "bid", "callback_of", "has_run",
    "counts_failed", "cancel_requested_at",
)  # fmt: skip
"""Columns in the order of the model's fields, as Django expects them, without large ones that failures do not use."""

_TYPES = {
    "id": "bigint", "lock_token": "bigint", "failures": "int", "losses": "smallint",
    **dict.fromkeys(
        ("run_at", "enqueued_at", "started_at", "reserved_until", "finished_at", "purge_at", "failed_at"), "timestamptz"
    ),
}  # fmt: skip
"""Types of the written columns; others are text."""

_COLUMNS = FailureColumns._fields

# By id: all transactions lock the rows of jobs in this order (ADR 0024).
FAILING = Statement(
    "failing", ["text[]"], f"SELECT {', '.join(READ)} FROM {JOB} WHERE jid = ANY ($1) ORDER BY id FOR UPDATE"
)

# A separate statement: FOR UPDATE may wait, and the time after that wait is the relevant one.
CLOCK = Statement("clock", ["timestamptz"], "SELECT COALESCE($1, STATEMENT_TIMESTAMP())", ages=False)

SAVE = Statement(
    "save",
    [f"{_TYPES.get(column, 'text')}[]" for column in _COLUMNS],
    f"""
UPDATE {JOB} AS j SET {", ".join(f"{column} = r.{column}" for column in _COLUMNS[1:])}
FROM {unnest(*range(1, len(_COLUMNS) + 1))} AS r ({", ".join(_COLUMNS)}) WHERE j.id = r.id""",
    gives_rows=False,
)


def lock_failed_calls(jids: Collection[str], now: datetime | None) -> list[Call]:
    """Return the calls that lock and read jobs reported as failed, and then read the time."""
    return [(FAILING, [list(jids)]), (CLOCK, [now])]


def save_calls(
    connection: BaseDatabaseWrapper, changed: Sequence[FailureColumns], day: datetime, tally: Tally
) -> list[Call]:
    """Return the calls that write failed jobs, and count them last.

    Until the commit, other transactions that count in the same row wait (ADR 0024).
    """
    calls: list[Call] = []
    if changed:
        # One array per column, for `unnest`: the statement's text does not depend on the number of rows.
        columns: list[list[Any]] = [list(column) for column in zip(*changed, strict=True)]
        calls.append((SAVE, columns))
    if tally != Tally():
        calls.append(
            (ADD_TO_COUNTERS, [day.date(), counter_slot(connection), tally.processed, tally.failed, tally.late])
        )
    return calls
