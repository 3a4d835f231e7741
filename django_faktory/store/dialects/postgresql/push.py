"""PostgreSQL's statements that insert pushed jobs: one for a set of jobs, with or without options (ADR 0023).

`push_call` returns the call for a set: a statement with its values. A set is sent as one JSON parameter or as
arrays, so that the statement's text does not depend on its size.

Durations that start at the push are added in the statement, by the database's clock. A job is blocked from the start if
its lock is taken, or another job of its key is ready (ADR 0015); of several such jobs in one set the first is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from ....core.json.fields import LAST
from ....core.payloads import JobPayload
from ..base import JOB, LOCK, OrderedJobs, unique_key_of
from ..job_columns import INSERTED, NO_OPTIONS, REPLACED, replaceable
from .pipeline import Rows
from .prepared import Call, Statement, clock, unnest

FEW = 8
"""Up to this size, a set is not inserted faster by sending common values once."""

_json = msgspec.json.Encoder()


def _plain_values(ready_at: str) -> str:
    return f"""j.jid, j.jobtype, j.queue, CASE WHEN j.at > now THEN 'scheduled' ELSE 'enqueued' END, -j.priority,
  j.text, j.retry, j.reserve_for, j.backtrace, j.result_ttl, CASE WHEN j.at > now THEN j.at END,
  CASE WHEN j.at > now THEN NULL ELSE {ready_at} END"""


UPSERT = f"""
ON CONFLICT (jid) DO UPDATE SET {", ".join(f"{column} = excluded.{column}" for column in REPLACED)}
WHERE {replaceable("old.")}
"""


def replacing(jids: int, may_exist: int) -> str:
    """Return SQL that locks the rows with the jids in a parameter, by id, and deletes finished ones as `gone`.

    Both happen before the first insert (ADR 0030). A row that another transaction stores meanwhile stays: an insert
    that does nothing on a conflict neither locks nor replaces it. If the parameter `may_exist` is false, no row is
    looked up: `LOCK_STORED` has found none. Rows are looked up by scalar sub-selects: a plan made while the
    table is small would be a join, which reads the whole table after it has grown.
    """
    return f"""
WITH stored AS MATERIALIZED (
  SELECT id, {replaceable()} AS is_over FROM {JOB} WHERE id = ANY (ARRAY(
    SELECT (SELECT id FROM {JOB} WHERE jid = incoming.jid) FROM {unnest(jids)} AS incoming (jid)
    WHERE (SELECT ${may_exist})))
  ORDER BY id FOR UPDATE),
gone AS (DELETE FROM {JOB} WHERE id = ANY (ARRAY(SELECT id FROM stored WHERE is_over)) RETURNING jid, attempt)"""


IS_REPLACED = "(SELECT COUNT(*) FROM gone) >= 0"
"""SQL condition that is true once `replacing` is complete."""

# A lone job is sent as plain values, because encoding and parsing JSON would cost more. No row is locked before its
# insert: a statement that stores one row holds no other row lock while it waits for this one.
PUSH_ONE = Statement(
    "push_one",
    ["text", "text", "text", "smallint", "text", "int", "int", "smallint", "int", "timestamptz", "timestamptz"],
    f"""
INSERT INTO {JOB} AS old ({INSERTED})
SELECT {_plain_values("now")}
FROM (VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10))
  AS j (jid, jobtype, queue, priority, text, retry, reserve_for, backtrace, result_ttl, at), {clock(11)}{UPSERT}""",
    gives_rows=False,
    ages=False,
)

# Jobs of a set become ready a microsecond apart, in the order of their places, although they are inserted in another
# order. A row that replaces a finished one continues its attempts, so that a late report of the earlier run stays
# fenced.
_SET = f"""
INSERT INTO {JOB} ({INSERTED}, attempt)
SELECT {_plain_values("now + make_interval(secs => j.place / 1e6)")}, COALESCE(gone.attempt, 0)"""
_IN_ORDER = f"""
LEFT JOIN gone ON gone.jid = j.jid WHERE {IS_REPLACED} ORDER BY j.nth ON CONFLICT (jid) DO NOTHING"""

PUSH_MANY = Statement(
    "push_many",
    ["json", "timestamptz", "text[]", "int[]", "boolean"],
    f"""{replacing(3, 5)}{_SET}
FROM {clock(2)}, ROWS FROM (json_to_recordset($1) AS (jid text, jobtype text, queue text, priority smallint, text text,
  retry int, reserve_for int, backtrace smallint, result_ttl int, at timestamptz), {unnest(4)}) WITH ORDINALITY
  AS j (jid, jobtype, queue, priority, text, retry, reserve_for, backtrace, result_ttl, at, place, nth){_IN_ORDER}""",
    gives_rows=False,
)

# Jobs of one task or client mostly differ only in texts (jid, jobtype, queue, payload), so only the texts are sent for
# each job: PostgreSQL takes 14 µs to store a job, 3 of them to parse a JSON record with ten members. A jobtype or queue
# that all jobs share is sent once; of consecutive places only the first is sent.
PUSH_ALIKE = Statement(
    "push_alike",
    [*["text[]"] * 4, "smallint", "int", "int", "smallint", "int", "timestamptz", "timestamptz", "int[]", "boolean"],
    f"""{replacing(1, 13)}{_SET}
FROM {clock(11)}, (
  SELECT texts.jid, COALESCE(texts.jobtype, ($2)[1]) AS jobtype, COALESCE(texts.queue, ($3)[1]) AS queue, texts.text,
    COALESCE(texts.place, ($12)[1] + nth - 1) AS place, nth,
    $5 AS priority, $6 AS retry, $7 AS reserve_for, $8 AS backtrace, $9 AS result_ttl, $10 AS at
  FROM {unnest(1, 2, 3, 4, 12)} WITH ORDINALITY AS texts (jid, jobtype, queue, text, place, nth)) AS j{_IN_ORDER}""",
    gives_rows=False,
)

# Runs before a set that several statements insert in one transaction: the first statement must not insert before the
# rows of the last one are locked. An expired key is taken from its job, so that job's row is locked too.
LOCK_STORED = Statement(
    "lock_stored",
    ["text[]", "text[]", "timestamptz"],
    f"""
WITH clock AS (SELECT COALESCE($3, STATEMENT_TIMESTAMP()) AS now),
stored AS MATERIALIZED (
  SELECT id FROM {JOB} WHERE id = ANY (ARRAY(
    SELECT (SELECT id FROM {JOB} WHERE jid = incoming.jid) FROM {unnest(1)} AS incoming (jid)
    UNION ALL
    SELECT (SELECT id FROM {JOB} WHERE unique_key = incoming.key AND unique_expires_at <= now)
    FROM {unnest(2)} AS incoming (key), clock))
  ORDER BY id FOR UPDATE)
SELECT now, (SELECT COUNT(*) FROM stored) > 0 FROM clock""",
)

# --- jobs with options ---

_LONGEST_S = 3e11
"""Limit of durations in seconds: longer than the calendar from any moment, and still valid as a PostgreSQL interval."""

_LAST = f"TIMESTAMPTZ '{LAST.isoformat()}'"
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


def push_call(jobs: OrderedJobs, now: datetime | None, *, may_exist: bool) -> Call:
    """Return the call that inserts jobs with distinct jids and no unique key, in the given order."""
    options = [job.options for _, job in jobs if job.options]
    if not options:
        return _plain_call(jobs, now, may_exist=may_exist)
    values = [_to_json(jobs), now, [job.jid for _, job in jobs] if may_exist else [], may_exist]
    if any(option.lock_key for option in options):
        return PUSH_LOCKED, values
    # A lone job can be upserted without locking its row first, see PUSH_ONE.
    return (PUSH_OPTIONED, values) if len(jobs) > 1 else (PUSH_ONE_OPTIONED, values[:2])


def _plain_call(jobs: OrderedJobs, now: datetime | None, *, may_exist: bool) -> Call:
    """Return the call that inserts plain jobs with distinct jids, in the given order."""
    if len(jobs) == 1:
        [(place, job)] = jobs
        ready_at = now + timedelta(microseconds=place) if now else None
        values = [job.jid, job.jobtype, job.queue, job.priority, job.text, job.retry, job.reserve_for, job.backtrace]
        return PUSH_ONE, [*values, job.result_ttl, job.at, ready_at]
    places, records = [place for place, _ in jobs], [job for _, job in jobs]
    if len(jobs) > FEW and _are_alike(records):
        jids, texts = [job.jid for job in records], [job.text for job in records]
        jobtypes, queues = _send_once([job.jobtype for job in records]), _send_once([job.queue for job in records])
        if places == list(range(places[0], places[0] + len(places))):
            places = places[:1]
        numbers = _numbers(records[0])
        return PUSH_ALIKE, [jids, jobtypes, queues, texts, *numbers, now, places, may_exist]
    return PUSH_MANY, [str(_json.encode(records), "utf-8"), now, [job.jid for job in records], places, may_exist]


def lock_stored_call(jobs: OrderedJobs, now: datetime | None) -> Call:
    """Return the call that locks the rows with which inserts of these jobs may conflict."""
    keys = [key for _, job in jobs if (key := unique_key_of(job))]
    return LOCK_STORED, [[job.jid for _, job in jobs], keys, now]


def _numbers(job: JobPayload) -> tuple[int, int, int, int, int | None, datetime | None]:
    return job.priority, job.retry, job.reserve_for, job.backtrace, job.result_ttl, job.at


def _send_once(values: list[str]) -> list[str]:
    return values[:1] if values.count(values[0]) == len(values) else values


def _are_alike(jobs: Sequence[JobPayload]) -> bool:
    """Return whether the jobs differ only in their texts."""
    expected = _numbers(jobs[0])
    return all(_numbers(job) == expected for job in jobs)


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
