"""Push of jobs that ask for more than to be run, on PostgreSQL: one statement for a set, as for plain ones (ADR 0023).

What counts from the push is added up here, by the clock of the database. Who comes to a lock that is held, or for
which another one is ready, is blocked from the start (ADR 0015); of several that come at once the first is ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec

from ...jsonfields import LAST
from ...options import JobOptions
from ...payloads import JobPayload
from .base import JOB, LOCK
from .pipeline import Rows
from .postgresql_verbs import UPSERT, clock, push_call
from .prepared import Call, Statement

_LONGEST_S = 3e11
"""Beyond the end of the calendar from any moment; what is longer PostgreSQL would refuse."""

_LAST = f"TIMESTAMPTZ '{LAST.isoformat()}'"
_NONE = JobOptions()
_json = msgspec.json.Encoder()

# The looks are scalars with a limit, and the state is asked for by a sub-select: as EXISTS, or told the state, the
# planner likes to read all that has a key.
_IS_BLOCKED = f"""lock_key IS NOT NULL AND (
    ROW_NUMBER() OVER (PARTITION BY lock_key, queue, priority, waits ORDER BY place) > 1
    OR (SELECT held.id FROM {LOCK} AS held WHERE held.lock_key = j.lock_key AND held.expires_at > now LIMIT 1)
      IS NOT NULL
    OR (SELECT ready.id FROM {JOB} AS ready WHERE ready.lock_key = j.lock_key AND ready.state = (SELECT 'enqueued')
      AND ready.queue = j.queue AND ready.weight = -j.priority
      ORDER BY ready.enqueued_at, ready.id LIMIT 1) IS NOT NULL)"""


def _until(seconds: str) -> str:
    """SQL: so many seconds after the job may first run; NULL where nothing is said of them."""
    return f"CASE WHEN {seconds} IS NOT NULL THEN LEAST(begins + make_interval(secs => {seconds}), {_LAST}) END"


def _push(name: str, *, is_blocked: str, then: str, where: str = "") -> Statement:
    # With a look at what is stored, its plan depends on that.
    return Statement(
        name,
        ["json", "timestamptz"],
        f"""
INSERT INTO {JOB} AS old (jid, jobtype, queue, state, weight, payload, retry, reserve_for, backtrace, result_ttl,
  run_at, enqueued_at, created_at, expires_at, unique_key, unique_expires_at, unique_until_start, lock_key, limit_key,
  about)
SELECT jid, jobtype, queue, CASE WHEN waits THEN 'scheduled' WHEN {is_blocked} THEN 'blocked' ELSE 'enqueued' END,
  -priority, text, retry, reserve_for, backtrace, result_ttl,
  CASE WHEN waits THEN at END, CASE WHEN NOT waits THEN now + make_interval(secs => place / 1e6) END, now,
  LEAST(expires_at, {_until("expires_in")}), unique_key, {_until("unique_for")},
  COALESCE(unique_until_start, FALSE), lock_key, limit_key, about
FROM (
  SELECT told.*, now, COALESCE(at > now, FALSE) AS waits, GREATEST(at, now) AS begins
  FROM json_to_recordset($1) AS told (jid text, jobtype text, queue text COLLATE "C", priority smallint, text text,
    retry int, reserve_for int, backtrace smallint, result_ttl int, at timestamptz, place int, expires_at timestamptz,
    expires_in float, unique_key text, unique_for float, unique_until_start boolean, lock_key text COLLATE "C",
    limit_key text, about text), {clock(2)}) AS j{where}
ORDER BY unique_key, place{then}""",
        gives_rows="RETURNING" in then,
        ages=is_blocked != "FALSE",
    )


_BLOCKED = "CASE WHEN state = 'blocked' THEN lock_key END"

PUSH_OPTIONED = _push("push_optioned", is_blocked="FALSE", then=UPSERT)
PUSH_LOCKED = _push("push_locked", is_blocked=_IS_BLOCKED, then=f"{UPSERT} RETURNING {_BLOCKED}")
# In the order of their keys, so that two sets never wait for each other. Where the transaction sees only what was
# there at its start, a key that was taken since would be an error: then it does nothing.
PUSH_UNIQUE = _push(
    "push_unique",
    is_blocked=_IS_BLOCKED,
    where=" WHERE current_setting('transaction_isolation') = 'read committed'",
    then=f" ON CONFLICT DO NOTHING RETURNING {_BLOCKED}, jid, created_at",
)


class _Told(msgspec.Struct, omit_defaults=True, gc=False):
    """A job as a record of JSON: what is not said is NULL."""

    jid: str
    jobtype: str
    queue: str
    priority: int
    text: str
    retry: int
    reserve_for: int
    backtrace: int
    place: int
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


def any_push_call(jobs: Sequence[JobPayload], now: datetime | None) -> Call:
    """How jobs are stored that have different jids, and no unique key."""
    if not any(job.options for job in jobs):
        return push_call(jobs, now)
    has_locks = any(job.options and job.options.lock_key for job in jobs)
    return PUSH_LOCKED if has_locks else PUSH_OPTIONED, [_told(enumerate(jobs)), now]


def unique_call(jobs: Sequence[tuple[int, JobPayload]], now: datetime | None) -> Call:
    """How jobs are stored of which nobody has the jid or the key."""
    return PUSH_UNIQUE, [_told(jobs), now]


def blocked_keys(rows: Rows) -> set[str]:
    """The keys for whose locks some of them wait, in what these statements say."""
    return {key for key, *_ in rows if key is not None}


def _told(jobs: Iterable[tuple[int, JobPayload]]) -> str:
    return str(_json.encode([_record(place, job) for place, job in jobs]), "utf-8")


def _record(place: int, job: JobPayload) -> _Told:
    options = job.options or _NONE
    return _Told(
        job.jid, job.jobtype, job.queue, job.priority, job.text, job.retry, job.reserve_for, job.backtrace, place,
        job.result_ttl, job.at, options.expires_at, _seconds(options.expires_in), options.unique_key,
        _seconds(options.unique_for) if options.unique_key else None, options.unique_until_start, options.lock_key,
        options.limit_key, options.about,
    )  # fmt: skip


def _seconds(told: float | None) -> float | None:
    return None if told is None else min(told, _LONGEST_S)
