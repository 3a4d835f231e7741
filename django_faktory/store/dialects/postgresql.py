"""PostgreSQL 15 and later: one statement a verb, one round trip and one commit for the whole set.

A set travels as one JSON parameter, so that the statement's text does not grow with it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from ...payloads import Ack, JobPayload, Reservation
from .base import (
    COUNTER,
    JOB,
    LOCK,
    WORKER,
    Dialect,
    Ended,
    Ending,
    Held,
    Plan,
    Slot,
    Tally,
    counter_slot,
    replaceable,
)  # fmt: skip
from .pipeline import Rows
from .postgresql_gates import END_PASSED, IS_GATED, PASS, PASS_ALONE, withheld
from .postgresql_locks import END_LOCKED, HAND_OVER, NEXT, NEXT_OF_FREED, NEXT_OF_MARKED, READY, TAKE
from .postgresql_relay import Relay
from .postgresql_rows import RETURNED, reservations, with_tokens
from .prepared import Statement, execute, joins

_REPLACED = (
    "jobtype", "queue", "state", "weight", "payload", "retry", "reserve_for", "backtrace", "result_ttl", "run_at",
    "enqueued_at", "created_at", "failures", "losses", "errtype", "failure", "history", "result", "wid",
    "started_at", "reserved_until", "finished_at", "purge_at", "expires_at", "unique_key", "unique_expires_at",
    "unique_until_start", "lock_key", "lock_token", "limit_key", "gate", "passes",
    "bid", "callback_of", "has_run", "counts_failed", "about",
)  # fmt: skip

_INTO = f"""
INSERT INTO {JOB} AS old (jid, jobtype, queue, state, weight, payload, retry, reserve_for, backtrace, result_ttl,
  run_at, enqueued_at)
SELECT j.jid, j.jobtype, j.queue, CASE WHEN j.at > now THEN 'scheduled' ELSE 'enqueued' END, -j.priority, j.text,
  j.retry, j.reserve_for, j.backtrace, j.result_ttl,
  CASE WHEN j.at > now THEN j.at END, CASE WHEN j.at > now THEN NULL ELSE now END
"""

_UPSERT = f"""
ON CONFLICT (jid) DO UPDATE SET {", ".join(f"{column} = excluded.{column}" for column in _REPLACED)}
WHERE {replaceable("old.")}
"""


def _clock(place: int) -> str:
    return f"(SELECT COALESCE(${place}, STATEMENT_TIMESTAMP()) AS now) AS clock"


# A lone job goes as plain values: building and reading JSON would cost more than they do.
PUSH_ONE = Statement(
    "push_one",
    ["text", "text", "text", "smallint", "text", "int", "int", "smallint", "int", "timestamptz", "timestamptz"],
    f"""{_INTO}
FROM (VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10))
  AS j (jid, jobtype, queue, priority, text, retry, reserve_for, backtrace, result_ttl, at), {_clock(11)}{_UPSERT}""",
    gives_rows=False,
    ages=False,
)

PUSH_MANY = Statement(
    "push_many",
    ["json", "timestamptz"],
    f"""{_INTO}
FROM ROWS FROM (json_to_recordset($1) AS (jid text, jobtype text, queue text, priority smallint, text text,
  retry int, reserve_for int, backtrace smallint, result_ttl int, at timestamptz)) WITH ORDINALITY
  AS j (jid, jobtype, queue, priority, text, retry, reserve_for, backtrace, result_ttl, at, place), {_clock(2)}
ORDER BY j.place{_UPSERT}""",
    gives_rows=False,
    ages=False,
)

_READY = f"""
  SELECT id FROM {JOB} WHERE state = 'enqueued' AND queue = q.name
    AND (expires_at IS NULL OR expires_at > COALESCE($5, STATEMENT_TIMESTAMP()))
  ORDER BY weight, enqueued_at, id LIMIT q.room FOR UPDATE SKIP LOCKED"""

# The queues are walked in the order given and no further than the limit, so that exactly what is handed out is
# locked. The ids go through an array, which is made once, before: of a join the planner thinks that it gives a tenth
# of what waits, and reads the whole table for each claim as soon as it knows that the table is large.
_CLAIM = f"""
UPDATE {JOB} AS j SET state = 'working', wid = $3, attempt = attempt + 1, started_at = now, run_at = NULL,
  reserved_until = now + make_interval(secs => reserve_for), gate = NULL, claim = $6,
  passes = CASE WHEN {IS_GATED} THEN '' END,
  unique_key = CASE WHEN unique_until_start AND lock_key IS NULL AND NOT {IS_GATED} THEN NULL ELSE unique_key END
FROM {_clock(5)} WHERE j.id = ANY (ARRAY(
  SELECT ready.id FROM unnest((SELECT $1), (SELECT $2)) AS q (name, room)
  CROSS JOIN LATERAL ({_READY}) AS ready
  WHERE q.name <> ALL ({withheld(5)})
    AND NOT EXISTS (SELECT 1 FROM {WORKER} WHERE wid = $3 AND state <> 'running')
    AND $alone
  LIMIT (SELECT $4)))
RETURNING array_position($1, j.queue::text), j.weight, j.id, {RETURNED}"""

_CLAIM_TYPES = ["text[]", "int[]", "text", "int", "timestamptz", "bigint"]
CLAIM = Statement("claim", _CLAIM_TYPES, _CLAIM.replace("AND $alone", ""))

# Alone, a claim commits without waiting for the disk: one that a crash of the database takes back is a job that runs
# again, and whatever is acknowledged later takes the claim to disk with it (ADR 0006).
CLAIM_ALONE = Statement(
    "claim_alone",
    _CLAIM_TYPES,
    _CLAIM.replace("AND $alone", "AND (SELECT set_config('synchronous_commit', 'off', TRUE)) IS NOT NULL"),
)

WAITING = Statement(
    "waiting",
    ["text[]", "int", "text[]", "timestamptz"],
    f"""
SELECT q.name, (SELECT COUNT(*) FROM (
    SELECT 1 FROM {JOB} WHERE state = 'enqueued' AND queue = q.name
      AND (expires_at IS NULL OR expires_at > COALESCE($4, STATEMENT_TIMESTAMP())) LIMIT $2) AS ready), FALSE
  FROM unnest($1) AS q (name)
  WHERE q.name <> ALL ({withheld(4)})
UNION ALL SELECT wid, 0, TRUE FROM {WORKER} WHERE wid = ANY ($3) AND state <> 'running'""",
)

# Rows are found by jid alone, inside the LATERAL, and judged outside of it: told the state there, the planner takes
# the partial index of working jobs, whose dead entries it does not count, and walks over every job of the last minute.
# For the same reason it is told below of the reservation, which working jobs have and no others.
END = Statement(
    "done",
    ["timestamptz", "json", "smallint", "int"],
    f"""
WITH clock AS (SELECT COALESCE($1, STATEMENT_TIMESTAMP()) AS now),
held AS MATERIALIZED (
  SELECT DISTINCT ON (j.id) j.id, j.jid, j.wid, j.attempt, j.result_ttl, r.result,
    j.bid IS NOT NULL OR j.callback_of IS NOT NULL OR j.lock_token IS NOT NULL
      OR j.passes IS NOT NULL AS is_apart,
    j.queue, j.jobtype, j.started_at
  FROM json_to_recordset($2) AS r (jid text COLLATE "C", wid text COLLATE "C", attempt int, result text)
  CROSS JOIN LATERAL (
    SELECT id, jid, wid, attempt, result_ttl, state, bid, callback_of, lock_token, passes, queue, jobtype, started_at
    FROM {JOB} WHERE jid = r.jid OFFSET 0) AS j
  WHERE j.state = 'working' AND (r.wid = '' OR j.wid = '' OR j.wid = r.wid)
    AND (r.attempt IS NULL OR r.attempt = j.attempt)),
gone AS (
  DELETE FROM {JOB} AS j USING held
  WHERE j.id = held.id AND held.result_ttl IS NULL AND NOT held.is_apart
    AND j.reserved_until IS NOT NULL AND j.wid = held.wid AND j.attempt = held.attempt
  RETURNING j.jid, j.wid, j.attempt, j.queue, j.jobtype, j.started_at),
kept AS (
  UPDATE {JOB} AS j SET state = 'succeeded', result = held.result, finished_at = now, reserved_until = NULL,
    unique_key = NULL, purge_at = now + make_interval(secs => j.result_ttl)
  FROM held, clock
  WHERE j.id = held.id AND held.result_ttl IS NOT NULL AND NOT held.is_apart
    AND j.reserved_until IS NOT NULL AND j.wid = held.wid AND j.attempt = held.attempt
  RETURNING j.jid, j.wid, j.attempt, j.queue, j.jobtype, j.started_at),
ended AS (SELECT * FROM gone UNION ALL SELECT * FROM kept),
batched AS (SELECT jid, wid, attempt FROM held WHERE is_apart),
counted AS (
  INSERT INTO {COUNTER} AS c (day, slot, processed, failed, late)
  SELECT (now AT TIME ZONE 'UTC')::date, $3, (SELECT COUNT(*) FROM ended), 0,
    $4 - (SELECT COUNT(*) FROM ended) - (SELECT COUNT(*) FROM batched)
  FROM clock
  ON CONFLICT (day, slot) DO UPDATE SET processed = c.processed + excluded.processed, late = c.late + excluded.late)
SELECT jid, wid, attempt, queue, jobtype, now, started_at, FALSE FROM ended, clock
UNION ALL SELECT jid, wid, attempt, '', '', NULL, NULL, TRUE FROM batched""",
)

KEEP = Statement(
    "keep",
    ["bigint[]", "text[]", "timestamptz"],
    f"""
UPDATE {JOB} AS j SET state = 'succeeded', result = r.result, finished_at = $3, reserved_until = NULL,
  unique_key = NULL, lock_token = NULL, passes = NULL, purge_at = $3 + make_interval(secs => j.result_ttl)
FROM unnest($1, $2) AS r (id, result) WHERE j.id = r.id""",
    gives_rows=False,
)

COUNT = f"""
INSERT INTO {COUNTER} AS c (day, slot, processed, failed, late) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (day, slot) DO UPDATE SET processed = c.processed + excluded.processed,
  failed = c.failed + excluded.failed, late = c.late + excluded.late"""

_json = msgspec.json.Encoder()

LOCKS_IN_USE_S = 10.0
"""How long after a job with a lock was seen here the statements for such jobs go along with each turn."""


class PostgresqlDialect(Dialect):
    """See the module."""

    hands_over = True
    one_statement = True
    plain_lock = " FOR UPDATE"
    skip_lock = " FOR UPDATE SKIP LOCKED"

    def now(self, cursor: CursorWrapper) -> datetime:
        """See Dialect."""
        cursor.execute("SELECT STATEMENT_TIMESTAMP()")
        found: datetime = cursor.fetchone()[0]
        return found

    def insert(self, connection: BaseDatabaseWrapper, jobs: Sequence[JobPayload], now: datetime | None) -> None:
        """See Dialect."""
        with connection.cursor() as cursor:
            execute(cursor, [_push(jobs, now)])

    def claim(self, connection: BaseDatabaseWrapper, plan: Plan, now: datetime | None) -> list[Reservation]:
        """See Dialect. One statement for each wid of the plan."""
        claim = CLAIM if connection.in_atomic_block else CLAIM_ALONE
        with connection.cursor() as cursor:
            return reservations(execute(cursor, _claims(claim, plan, now)))

    def exchange(
        self,
        connection: BaseDatabaseWrapper,
        jobs: Sequence[JobPayload],
        acks: Sequence[Ack],
        plan: Plan,
        now: datetime | None,
    ) -> tuple[Ending, list[Reservation]]:
        """See Dialect. A lock that is freed goes to who is claimed for next, with no commit between them."""
        calls = self._ends(connection, acks, now) if acks else []
        ends = len(calls)
        calls += [_push(jobs, now)] if jobs else []
        claims_from = len(calls)
        calls += _claims(CLAIM, plan, now)
        is_handed_over = bool(plan.slots) and ends > 0 and calls[ends - 1][0] is NEXT_OF_FREED
        if is_handed_over:
            calls[ends - 1] = (NEXT_OF_MARKED, [True])
            calls.append((HAND_OVER, [True, plan.lease_s, now]))
        with connection.cursor() as cursor:
            found = execute(cursor, calls)
        heirs = found.pop() if is_handed_over else []
        self._relay.remember(jid for jid, _, _ in heirs)
        ending = self._ending(found[:ends] if acks else [[]], heirs)
        return ending, with_tokens(reservations(found[claims_from:]), heirs)

    def relay(
        self, connection: BaseDatabaseWrapper, ack: Ack, plan: Plan, now: datetime | None
    ) -> tuple[Ended, Reservation] | None:
        """See Dialect."""
        self._locked_at = time.monotonic()
        return self._relay.run(connection, ack, plan, now)

    def expects_relay(self, jid: str) -> bool:
        """See Dialect."""
        return self._relay.expects(jid)

    def joins(self, connection: BaseDatabaseWrapper) -> bool:
        """See Dialect."""
        return joins(connection)

    def waiting(
        self,
        connection: BaseDatabaseWrapper,
        queues: Sequence[str],
        most: int,
        wids: Collection[str],
        now: datetime | None,
    ) -> tuple[dict[str, int], set[str]]:
        """See Dialect."""
        with connection.cursor() as cursor:
            [rows] = execute(cursor, [(WAITING, [list(queues), most, list(wids), now])])
        return {name: count for name, count, muted in rows if not muted}, {wid for wid, _, muted in rows if muted}

    def end(self, connection: BaseDatabaseWrapper, acks: Sequence[Ack], now: datetime | None) -> Ending:
        """See Dialect."""
        with connection.cursor() as cursor:
            return self._ending(execute(cursor, self._ends(connection, acks, now)))

    _relay = Relay()
    _locked_at = float("-inf")
    _passed_at = float("-inf")

    def _ends(
        self, connection: BaseDatabaseWrapper, acks: Sequence[Ack], now: datetime | None
    ) -> list[tuple[Statement, list[Any]]]:
        """The end of jobs; where locks are in use here just now, the end of their holders goes along."""
        [_, values] = call = _end(acks, now)
        recently = time.monotonic() - LOCKS_IN_USE_S
        if not joins(connection):
            return [call]
        calls = [call]
        if self._passed_at > recently:
            calls.append((END_PASSED, values[:3]))
        if self._locked_at > recently:
            calls += [(END_LOCKED, values[:3]), (NEXT_OF_FREED, [True])]
        return calls

    def _ending(self, found: Sequence[Rows], heirs: Sequence[tuple[Any, ...]] = ()) -> Ending:
        """What the statements of `_ends` say; whose turn came and who got his lock at once is news to nobody."""
        first, *more = found
        readied = Counter[str]()
        ended = {jid: _held(row) for jid, *row, is_apart in first if not is_apart}
        left = {row[0] for row in first if row[-1]}
        if left:
            self._locked_at = time.monotonic()
        for rows in more:  # ends of holders, and the queues that got work by them
            if rows and len(rows[0]) == 1:
                readied = Counter(queue for (queue,) in rows) - Counter(queue for _, _, queue in heirs)
            else:
                ended |= {jid: _held(row) for jid, *row in rows}
        left -= ended.keys()
        return Ending(ended, left, set(readied))

    def passes(
        self, connection: BaseDatabaseWrapper, claimed: Sequence[Reservation], now: datetime | None
    ) -> dict[str, str | None]:
        """See Dialect."""
        self._passed_at = time.monotonic()
        told = [
            {"jid": job.jid, "wid": job.wid, "attempt": job.attempt, "jobtype": job.jobtype, "queue": job.queue,
             "key": job.limit_key}
            for job in claimed
        ]  # fmt: skip
        with connection.cursor() as cursor:
            statement = PASS if connection.in_atomic_block else PASS_ALONE
            [rows] = execute(cursor, [(statement, [str(_json.encode(told), "utf-8"), now])])
        return dict(rows)

    def takes(
        self, connection: BaseDatabaseWrapper, claimed: Sequence[Reservation], lease_s: float, now: datetime | None
    ) -> dict[str, int]:
        """See Dialect."""
        self._locked_at = time.monotonic()
        told = [{"key": job.lock_key, "jid": job.jid, "wid": job.wid, "attempt": job.attempt} for job in claimed]
        with connection.cursor() as cursor:
            [rows] = execute(cursor, [(TAKE, [str(_json.encode(told), "utf-8"), lease_s, now])])
            unused = [token for _, token, is_won in rows if not is_won]  # taken from their worker meanwhile
            if unused:
                cursor.execute(f"DELETE FROM {LOCK} WHERE id = ANY (%s)", [unused])
        return {jid: token for jid, token, is_won in rows if is_won}

    def ready_of(self, cursor: CursorWrapper, keys: Sequence[str]) -> Rows:
        """See Dialect."""
        [rows] = execute(cursor, [(READY, [list(keys)])])
        return rows

    def make_next_ready(self, connection: BaseDatabaseWrapper, keys: Sequence[str]) -> set[str]:
        """See Dialect."""
        if not keys:
            return set()
        with connection.cursor() as cursor:
            [rows] = execute(cursor, [(NEXT, [list(keys)])])
        return {queue for (queue,) in rows}

    def keep(self, cursor: CursorWrapper, held: Sequence[tuple[int, Ack, int]], now: datetime) -> None:
        """See Dialect."""
        if held:
            ids, results = [row_id for row_id, _, _ in held], [ack.result for _, ack, _ in held]
            execute(cursor, [(KEEP, [ids, results, now])])

    def count(self, cursor: CursorWrapper, day: datetime, tally: Tally) -> None:
        """See Dialect."""
        if tally != Tally():
            cursor.execute(COUNT, [day.date(), counter_slot(), tally.processed, tally.failed, tally.late])


def _push(jobs: Sequence[JobPayload], now: datetime | None) -> tuple[Statement, list[Any]]:
    if len(jobs) > 1:
        return PUSH_MANY, [str(_json.encode(jobs), "utf-8"), now]
    job = jobs[0]
    return PUSH_ONE, [
        job.jid, job.jobtype, job.queue, job.priority, job.text, job.retry, job.reserve_for, job.backtrace,
        job.result_ttl, job.at, now,
    ]  # fmt: skip


def _end(acks: Sequence[Ack], now: datetime | None) -> tuple[Statement, list[Any]]:
    return END, [now, str(_json.encode(acks), "utf-8"), counter_slot(), len(acks)]


def _held(row: Sequence[Any]) -> Held:
    wid, attempt, queue, jobtype, now, started_at = row
    return Held(wid, attempt, queue, jobtype, (now - started_at).total_seconds())


def _claims(claim: Statement, plan: Plan, now: datetime | None) -> list[tuple[Statement, list[Any]]]:
    """A claim for each wid of the plan."""
    by_wid: dict[str, list[Slot]] = {}
    for slot in plan.slots:
        by_wid.setdefault(slot.wid, []).append(slot)
    return [
        (claim, [[slot.queue for slot in slots], [slot.count for slot in slots], wid, plan.limit, now, plan.claim])
        for wid, slots in by_wid.items()
    ]


POSTGRESQL = PostgresqlDialect()
