"""PostgreSQL 15 and later: one statement a verb, one round trip and one commit for the whole set.

A set travels as one JSON parameter, so that the statement's text does not grow with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from ...payloads import Ack, JobPayload, Reservation
from .base import COUNTER, FINISHED_SQL, JOB, QUEUE, WORKER, Dialect, Ended, Slot, Tally, counter_slot

_REPLACED = (
    "jobtype", "queue", "state", "weight", "payload", "retry", "reserve_for", "backtrace", "result_ttl", "run_at",
    "enqueued_at", "created_at", "failures", "losses", "errtype", "failure", "history", "result", "wid",
    "started_at", "reserved_until", "finished_at", "purge_at",
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
WHERE old.state IN ({FINISHED_SQL})
"""

_CLOCK = "(SELECT COALESCE(%s::timestamptz, STATEMENT_TIMESTAMP()) AS now) AS clock"

# A lone job goes as plain values: building and reading JSON would cost more than they do.
PUSH_ONE = f"""{_INTO}
FROM (VALUES (%s, %s, %s, %s::smallint, %s, %s::int, %s::int, %s::smallint, %s::int, %s::timestamptz))
  AS j (jid, jobtype, queue, priority, text, retry, reserve_for, backtrace, result_ttl, at), {_CLOCK}{_UPSERT}"""

PUSH_MANY = f"""{_INTO}
FROM ROWS FROM (json_to_recordset(%s::json) AS (jid text, jobtype text, queue text, priority smallint, text text,
  retry int, reserve_for int, backtrace smallint, result_ttl int, at timestamptz)) WITH ORDINALITY
  AS j (jid, jobtype, queue, priority, text, retry, reserve_for, backtrace, result_ttl, at, place), {_CLOCK}
ORDER BY j.place{_UPSERT}"""

_RETURNED = (
    "j.jid, j.queue, j.payload, j.wid, j.attempt, j.created_at, j.enqueued_at, j.started_at, j.failure, j.history,"
    " j.reserve_for, j.result_ttl"
)

_READY = f"""
  SELECT id, weight, enqueued_at FROM {JOB} WHERE state = 'enqueued' AND queue = q.name
  ORDER BY weight, enqueued_at, id LIMIT q.room FOR UPDATE SKIP LOCKED"""

# The queues are walked in the order given and no further than the limit, so that exactly what is handed out is
# locked. MATERIALIZED: the claim must run once.
CLAIM = f"""
WITH picked AS MATERIALIZED (
  SELECT ready.id, q.place FROM unnest(%s::text[], %s::int[]) WITH ORDINALITY AS q (name, room, place)
  CROSS JOIN LATERAL ({_READY}) AS ready
  WHERE q.name <> ALL (ARRAY(SELECT name::text FROM {QUEUE} WHERE paused_at IS NOT NULL))
    AND NOT EXISTS (SELECT 1 FROM {WORKER} WHERE wid = %s AND state <> 'running')
  LIMIT %s)
UPDATE {JOB} AS j SET state = 'working', wid = %s, attempt = attempt + 1, started_at = now, run_at = NULL,
  reserved_until = now + make_interval(secs => reserve_for)
FROM picked, {_CLOCK} WHERE j.id = picked.id
RETURNING picked.place, j.weight, j.id, {_RETURNED}"""

END = f"""
WITH report AS MATERIALIZED (
  SELECT * FROM json_to_recordset(%s::json)
    AS r (jid text COLLATE "C", wid text COLLATE "C", attempt int, result text)),
clock AS (SELECT COALESCE(%s::timestamptz, STATEMENT_TIMESTAMP()) AS now),
gone AS (
  DELETE FROM {JOB} AS j USING report AS r
  WHERE j.jid = r.jid AND j.state = 'working' AND j.result_ttl IS NULL
    AND (r.wid = '' OR j.wid = '' OR j.wid = r.wid) AND (r.attempt IS NULL OR r.attempt = j.attempt)
  RETURNING j.jid, j.wid, j.attempt),
kept AS (
  UPDATE {JOB} AS j SET state = 'succeeded', result = r.result, finished_at = now, reserved_until = NULL,
    purge_at = now + make_interval(secs => j.result_ttl)
  FROM report AS r, clock
  WHERE j.jid = r.jid AND j.state = 'working' AND j.result_ttl IS NOT NULL
    AND (r.wid = '' OR j.wid = '' OR j.wid = r.wid) AND (r.attempt IS NULL OR r.attempt = j.attempt)
  RETURNING j.jid, j.wid, j.attempt),
ended AS (SELECT * FROM gone UNION ALL SELECT * FROM kept),
counted AS (
  INSERT INTO {COUNTER} AS c (day, slot, processed, failed, late)
  SELECT (now AT TIME ZONE 'UTC')::date, %s, (SELECT COUNT(*) FROM ended), 0, %s - (SELECT COUNT(*) FROM ended)
  FROM clock
  ON CONFLICT (day, slot) DO UPDATE SET processed = c.processed + excluded.processed, late = c.late + excluded.late)
SELECT jid, wid, attempt FROM ended"""

COUNT = f"""
INSERT INTO {COUNTER} AS c (day, slot, processed, failed, late) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (day, slot) DO UPDATE SET processed = c.processed + excluded.processed,
  failed = c.failed + excluded.failed, late = c.late + excluded.late"""

_json = msgspec.json.Encoder()


class PostgresqlDialect(Dialect):
    """See the module."""

    one_statement = True

    def now(self, cursor: CursorWrapper) -> datetime:
        """See Dialect."""
        cursor.execute("SELECT STATEMENT_TIMESTAMP()")
        found: datetime = cursor.fetchone()[0]
        return found

    def insert(self, connection: BaseDatabaseWrapper, jobs: Sequence[JobPayload], now: datetime | None) -> None:
        """See Dialect."""
        with connection.cursor() as cursor:
            if len(jobs) > 1:
                cursor.execute(PUSH_MANY, [str(_json.encode(jobs), "utf-8"), now])
                return
            job = jobs[0]
            cursor.execute(
                PUSH_ONE,
                [job.jid, job.jobtype, job.queue, job.priority, job.text, job.retry, job.reserve_for, job.backtrace,
                 job.result_ttl, job.at, now],
            )  # fmt: skip

    def claim(
        self, connection: BaseDatabaseWrapper, plan: Sequence[Slot], limit: int, now: datetime | None
    ) -> list[Reservation]:
        """See Dialect. One statement for each wid of the plan."""
        found: list[Reservation] = []
        with connection.cursor() as cursor:
            for wid in dict.fromkeys(slot.wid for slot in plan):
                slots = [slot for slot in plan if slot.wid == wid]
                queues, rooms = [slot.queue for slot in slots], [slot.count for slot in slots]
                room = limit - len(found)
                if room > 0:
                    cursor.execute(CLAIM, [queues, rooms, wid, room, wid, now])
                    found += [_reserved(row) for row in sorted(cursor.fetchall(), key=_place)]
        return found

    def end(self, connection: BaseDatabaseWrapper, acks: Sequence[Ack], now: datetime | None) -> Ended:
        """See Dialect."""
        with connection.cursor() as cursor:
            cursor.execute(END, [str(_json.encode(acks), "utf-8"), now, counter_slot(), len(acks)])
            return {jid: (wid, attempt) for jid, wid, attempt in cursor.fetchall()}

    def count(self, cursor: CursorWrapper, day: datetime, tally: Tally) -> None:
        """See Dialect."""
        if tally != Tally():
            cursor.execute(COUNT, [day.date(), counter_slot(), tally.processed, tally.failed, tally.late])


def _place(row: tuple[Any, ...]) -> tuple[Any, ...]:
    place, weight, row_id, _, _, _, _, _, _, enqueued_at, *_ = row
    return place, weight, enqueued_at, row_id


def _reserved(row: tuple[Any, ...]) -> Reservation:
    (_, _, _, jid, queue, text, wid, attempt, created_at, enqueued_at, started_at, failure, history, reserve_for,
     result_ttl) = row  # fmt: skip
    return Reservation(
        jid=jid,
        queue=queue,
        text=text,
        wid=wid,
        attempt=attempt,
        created_at=created_at,
        enqueued_at=enqueued_at,
        started_at=started_at,
        failure=failure,
        history=history,
        reserve_for=reserve_for,
        result_ttl=result_ttl,
    )


POSTGRESQL = PostgresqlDialect()
