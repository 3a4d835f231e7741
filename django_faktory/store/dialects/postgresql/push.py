"""Store pushed jobs on PostgreSQL: `faktory_push_1` decides about them in one call, and `push_call` returns its values.

Only a lone plain job has a statement of its own, where it can be prepared. Through the function its push took 1.3 times
the processor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from ....core.payloads import JobPayload
from ..base import JOB, OrderedJobs, unique_key_of
from ..job_columns import INSERTED, NO_OPTIONS, REPLACED, replaceable
from ..values import ALL_STORED, PushResult
from .calls import function
from .pipeline import Rows
from .prepared import Call, Command

_json = msgspec.json.Encoder()
_NAME = "faktory_push_1"

# No row is locked before the insert: a statement that stores one row holds no other row lock while it waits for this
# one. The clock is read once the transaction has an xid: claims must see that it is open from this time on (ADR 0046).
PUSH_ONE = Command(
    "faktory_push_one",
    ["text", "text", "text", "smallint", "text", "int", "int", "smallint", "int", "timestamptz", "timestamptz"],
    f"""
INSERT INTO {JOB} AS old ({INSERTED})
SELECT jid, jobtype, queue, CASE WHEN at > now THEN 'scheduled' ELSE 'enqueued' END, -priority, text, retry,
  reserve_for, backtrace, result_ttl, CASE WHEN at > now THEN at END, CASE WHEN at > now THEN NULL ELSE now END
FROM (VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10,
    COALESCE($11, (SELECT CLOCK_TIMESTAMP() FROM pg_current_xact_id()))))
  AS j (jid, jobtype, queue, priority, text, retry, reserve_for, backtrace, result_ttl, at, now)
ON CONFLICT (jid) DO UPDATE SET {", ".join(f"{column} = excluded.{column}" for column in REPLACED)}
WHERE {replaceable("old.")}""",
    gives_rows=False,
)


def lock_call(jobs: OrderedJobs, now: datetime | None) -> Call:
    """Return the call that only locks the rows which calls for these jobs may change."""
    places, jids = [place for place, _ in jobs], [job.jid for _, job in jobs]
    keys = _column([unique_key_of(job) for _, job in jobs])
    return function(_NAME), [None, None, places, jids, keys, None, True, now]


def push_call(jobs: OrderedJobs, now: datetime | None, *, may_exist: bool) -> Call:
    """Return the call that stores jobs with distinct jids, in the given order."""
    # Behind a pooler each use of the statement is planned, and the function takes two thirds of the time.
    if len(jobs) == 1 and jobs[0][1].options is None and Command.works:
        [(place, job)] = jobs
        ready_at = now + timedelta(microseconds=place) if now else None
        values = [job.jid, job.jobtype, job.queue, job.priority, job.text, job.retry, job.reserve_for, job.backtrace]
        return PUSH_ONE, [*values, job.result_ttl, job.at, ready_at]
    records = [job for _, job in jobs]
    options = keys = locks = None
    if any(job.options for job in records):
        options = _encode([job.options or NO_OPTIONS for job in records])
        keys = _column([unique_key_of(job) for job in records])
        locks = _column([job.options.lock_key if job.options else None for job in records])
    places = jids = None
    if len(records) > 1 or jobs[0][0]:
        places = [place for place, _ in jobs]
        jids = [job.jid for job in records] if may_exist or keys else None
    return function(_NAME), [_encode(records), options, places, jids, keys, locks, may_exist, now]


def read_result(rows: Rows) -> PushResult:
    """Return what the rows say."""
    if not rows:
        return ALL_STORED
    return PushResult(
        refused={subject for outcome, subject in rows if outcome == "refused"},
        blocked={subject for outcome, subject in rows if outcome == "blocked"},
        is_undecided=any(outcome == "undecided" for outcome, _ in rows),
    )


def _encode(records: Sequence[JobPayload | Any]) -> str:
    return str(_json.encode(records), "utf-8")


def _column(values: list[str | None]) -> list[str | None] | None:
    """Return the values, or None if there is none."""
    return values if any(values) else None
