"""Choose the INSERT of pushed jobs (`any_push_call`), and insert jobs with options: one statement for a set (ADR 0023).

The statements for plain jobs, such as `PUSH_ONE`, are in `jobs`.

Durations that start at the push are added in the statement, by the database's clock. A job is blocked from the start if
its lock is taken, or another job of its key is ready (ADR 0015); of several such jobs in one set the first is ready.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from ....core.json.fields import LAST
from ....core.payloads import JobPayload
from ..base import JOB, LOCK, OrderedJobs
from ..job_columns import NO_OPTIONS, replaceable
from .jobs import IS_REPLACED, UPSERT, clock, push_call, replacing
from .pipeline import Rows
from .prepared import Call, Statement

_LONGEST_S = 3e11
"""Limit of durations in seconds: longer than the calendar from any moment, and still valid as a PostgreSQL interval."""

_LAST = f"TIMESTAMPTZ '{LAST.isoformat()}'"
_json = msgspec.json.Encoder()

# Lookups are scalar sub-selects with a limit, and compare the state with a sub-select: with EXISTS, or a literal state,
# the planner tends to read all jobs with a key.
_IS_BLOCKED = f"""lock_key IS NOT NULL AND (
    ROW_NUMBER() OVER (PARTITION BY lock_key, queue, priority, waits ORDER BY place) > 1
    OR (SELECT held.id FROM {LOCK} AS held WHERE held.lock_key = j.lock_key AND held.expires_at > now LIMIT 1)
      IS NOT NULL
    OR (SELECT ready.id FROM {JOB} AS ready WHERE ready.lock_key = j.lock_key AND ready.state = (SELECT 'enqueued')
      AND ready.queue = j.queue AND ready.sort_priority = -j.priority
      ORDER BY ready.enqueued_at, ready.id LIMIT 1) IS NOT NULL)"""


def _until(seconds: str) -> str:
    """Return SQL for the moment `seconds` after the job may first run; NULL if they are not given."""
    return f"CASE WHEN {seconds} IS NOT NULL THEN LEAST(begins + make_interval(secs => {seconds}), {_LAST}) END"


_RECORDS = """json_to_recordset($1) AS incoming (jid text COLLATE "C", jobtype text, queue text COLLATE "C",
    priority smallint, text text, retry int, reserve_for int, backtrace smallint, result_ttl int, at timestamptz,
    place int, nth int, expires_at timestamptz, expires_in float, unique_key text COLLATE "C", unique_for float,
    unique_until_start boolean, lock_key text COLLATE "C", limit_key text, about text)"""


def _insert(*, incoming: str, where: str, is_blocked: str = "FALSE", attempt: str = "0") -> str:
    return f"""
INSERT INTO {JOB} AS old (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for, backtrace, result_ttl,
  run_at, enqueued_at, created_at, expires_at, unique_key, unique_expires_at, unique_until_start, lock_key, limit_key,
  about, attempt)
SELECT jid, jobtype, queue, CASE WHEN waits THEN 'scheduled' WHEN {is_blocked} THEN 'blocked' ELSE 'enqueued' END,
  -priority, text, retry, reserve_for, backtrace, result_ttl,
  CASE WHEN waits THEN at END, CASE WHEN NOT waits THEN now + make_interval(secs => place / 1e6) END, now,
  LEAST(expires_at, {_until("expires_in")}), unique_key, {_until("unique_for")},
  COALESCE(unique_until_start, FALSE), lock_key, limit_key, about, attempt
FROM (
  SELECT incoming.*, {attempt} AS attempt, now, COALESCE(at > now, FALSE) AS waits, GREATEST(at, now) AS begins
  FROM {incoming}, {clock(2)}) AS j
{where} ORDER BY nth"""


# The caller checks these keys again after its commit: a release in progress may not have seen the new job (ADR 0015).
_BLOCKED = "CASE WHEN state = 'blocked' THEN lock_key END"
_REPLACE = {
    "incoming": f"{_RECORDS} LEFT JOIN gone USING (jid)",
    "attempt": "COALESCE(gone.attempt, 0)",
    "where": f"WHERE {IS_REPLACED}",
}

PUSH_ONE_OPTIONED = Statement(
    "push_one_optioned",
    ["json", "timestamptz"],
    _insert(incoming=_RECORDS, where="") + UPSERT,
    gives_rows=False,
    ages=False,
)
PUSH_OPTIONED = Statement(
    "push_optioned",
    ["json", "timestamptz", "text[]", "boolean"],
    f"{replacing(3, 4)}{_insert(**_REPLACE)} ON CONFLICT (jid) DO NOTHING",
    gives_rows=False,
)
PUSH_LOCKED = Statement(
    "push_locked",
    ["json", "timestamptz", "text[]", "boolean"],
    f"{replacing(3, 4)}{_insert(**_REPLACE, is_blocked=_IS_BLOCKED)} ON CONFLICT (jid) DO NOTHING RETURNING {_BLOCKED}",
)

# 1. Find the stored rows with the same jid or key. The caller may replace a 'replaceable' row; an 'alive' row has the
#    same jid, and a 'refused' one the same key.
# 2. Lock the rows that may be replaced, by id: after the insert it would be too late (ADR 0030). Rows that stay
#    unchanged are not locked, because a job that conflicts with one needs no wait.
# 3. Insert each job without a conflict, and each job whose row has lost that jid or key before it was locked.
# A job that conflicts with a row inserted meanwhile is in no group; the caller looks it up again.
# Above READ COMMITTED insert nothing, and leave it to the caller's slow path: the snapshot does not show a key that was
# taken since the transaction began, and the insert would raise an error.
_IS_FREE = """WHERE current_setting('transaction_isolation') = 'read committed' AND place <> ALL (ARRAY(
  SELECT place FROM met WHERE kind <> 'replaceable'
  UNION ALL SELECT place FROM met JOIN stored USING (id)
  WHERE stored.jid = met.jid OR stored.unique_key = met.unique_key))"""
PUSH_UNIQUE = Statement(
    "push_unique",
    ["json", "timestamptz"],
    f"""
WITH incoming AS MATERIALIZED (SELECT incoming.* FROM {_RECORDS}),
met AS MATERIALIZED (
  SELECT incoming.place, incoming.jid, incoming.unique_key, old.id, old.kind FROM incoming, {clock(2)}
  CROSS JOIN LATERAL (
    SELECT id, CASE WHEN {replaceable()} THEN 'replaceable' ELSE 'alive' END AS kind FROM {JOB} WHERE jid = incoming.jid
    UNION ALL
    SELECT id, CASE WHEN unique_expires_at <= now THEN 'replaceable' ELSE 'refused' END FROM {JOB}
    WHERE unique_key = incoming.unique_key AND jid <> incoming.jid) AS old),
stored AS MATERIALIZED (
  SELECT id, jid, unique_key FROM {JOB} WHERE id = ANY (ARRAY(SELECT id FROM met WHERE kind = 'replaceable'))
  ORDER BY id FOR UPDATE),
pushed AS ({_insert(incoming="incoming", is_blocked=_IS_BLOCKED, where=_IS_FREE)}
  ON CONFLICT DO NOTHING RETURNING jid, {_BLOCKED} AS blocked)
SELECT blocked, jid, 'stored', NULL::timestamptz FROM pushed
UNION ALL SELECT NULL, jid, kind, NULL FROM met
UNION ALL SELECT NULL, NULL, 'now', now FROM {clock(2)}""",
)


class _JobRecord(msgspec.Struct, omit_defaults=True, gc=False):
    """A job as a JSON record; omitted members are NULL."""

    jid: str
    jobtype: str
    queue: str
    priority: int
    text: str
    retry: int
    reserve_for: int
    backtrace: int
    place: int
    nth: int
    result_ttl: int | None = None
    at: datetime | None = None
    expires_at: datetime | None = None
    expires_in: float | None = None
    unique_key: str | None = None
    unique_for: float | None = None
    unique_until_start: bool = False
    lock_key: str | None = None
    limit_key: str | None = None
    about: str | None = None


def any_push_call(jobs: OrderedJobs, now: datetime | None, *, may_exist: bool) -> Call:
    """Return the call that inserts jobs with distinct jids and no unique key, in the given order."""
    options = [job.options for _, job in jobs if job.options]
    if not options:
        return push_call(jobs, now, may_exist=may_exist)
    values = [_to_json(jobs), now, [job.jid for _, job in jobs] if may_exist else [], may_exist]
    if any(option.lock_key for option in options):
        return PUSH_LOCKED, values
    # A lone job can be upserted without locking its row first, see PUSH_ONE.
    return (PUSH_OPTIONED, values) if len(jobs) > 1 else (PUSH_ONE_OPTIONED, values[:2])


def unique_call(jobs: OrderedJobs, now: datetime | None) -> Call:
    """Return the call that inserts, in the given order, jobs that share no jid or unique key with a stored row."""
    return PUSH_UNIQUE, [_to_json(jobs), now]


def blocked_keys(rows: Rows) -> set[str]:
    """Return the keys of locks that inserted jobs wait for, from the rows of these statements."""
    return {key for key, *_ in rows if key is not None}


def _to_json(jobs: OrderedJobs) -> str:
    records = [_to_record(nth, place, job) for nth, (place, job) in enumerate(jobs)]
    return str(_json.encode(records), "utf-8")


def _to_record(nth: int, place: int, job: JobPayload) -> _JobRecord:
    options = job.options or NO_OPTIONS
    return _JobRecord(
        job.jid, job.jobtype, job.queue, job.priority, job.text, job.retry, job.reserve_for, job.backtrace, place, nth,
        job.result_ttl, job.at, options.expires_at, _cap_duration(options.expires_in), options.unique_key,
        _cap_duration(options.unique_for) if options.unique_key else None, options.unique_until_start, options.lock_key,
        options.limit_key, options.about,
    )  # fmt: skip


def _cap_duration(seconds: float | None) -> float | None:
    return None if seconds is None else min(seconds, _LONGEST_S)
