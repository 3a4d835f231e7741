"""End a job that held a lock and claim the next job of its key, in one statement on PostgreSQL (ADR 0015, 0020).

Only for the usual case of a hot key: the next job waits for this lock alone, and a claim would return it now. Otherwise
the statement does nothing, and the caller uses the slow path: end, free, claim, lock. The key is never free in between,
so a job that was pushed meanwhile cannot be missed: it waits for the new holder.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper

from ....core.payloads import Ack
from ..base import JOB, LOCK, WORKER, ClaimPlan, EndedRun, HandoffResult, counter_slot
from .ending import count_processed, set_succeeded
from .limits import IS_LIMITED, closed_queues
from .prepared import Statement, execute_on, unnest
from .rows import RETURNED, reservations

_LIVES = "(expires_at IS NULL OR expires_at > (SELECT now FROM clock))"

# Locks the holder's row, then its lock, as all transactions do (ADR 0024); the next job's row only if it is not locked.
# Lookups by key hide the state from the planner, see `locks`. The token is drawn before the writes: no part of a
# statement sees what another part has written (ADR 0024), and both the job and the lock row get it.
HAND_OFF_LOCK = Statement(
    "hand_off_lock",
    [
        "timestamptz",
        "double precision",
        "text",
        "text",
        "int",
        "text",
        "text[]",
        "text",
        "bigint",
        "bigint",
        "double precision",
        "double precision",
    ],
    f"""
WITH clock AS (SELECT COALESCE($1, STATEMENT_TIMESTAMP()) AS now, make_interval(secs => $2) AS lease),
held AS MATERIALIZED (
  SELECT j.id, j.wid, j.attempt, j.result_ttl, j.lock_token, j.queue, j.jobtype, j.started_at FROM (
    SELECT id, wid, attempt, result_ttl, state, bid, callback_of, lock_token, permits, queue, jobtype, started_at
    FROM {JOB} WHERE jid = $3 FOR UPDATE) AS j
  WHERE j.state = 'working' AND ($4 = '' OR j.wid = '' OR j.wid = $4) AND ($5 IS NULL OR j.attempt = $5)
    AND j.bid IS NULL AND j.callback_of IS NULL AND j.permits IS NULL),
mine AS MATERIALIZED (SELECT id, lock_key FROM {LOCK} WHERE id = (SELECT lock_token FROM held) FOR UPDATE),
next AS MATERIALIZED (
  SELECT q.place, j.id, j.jobtype, j.queue, j.sort_priority, j.enqueued_at, j.expires_at, j.limiter, j.limit_key
  FROM {unnest(7)} WITH ORDINALITY AS q (name, place) CROSS JOIN LATERAL (
    SELECT id, jobtype, queue, sort_priority, enqueued_at, expires_at, limiter, limit_key FROM {JOB}
    WHERE lock_key = (SELECT lock_key FROM mine) AND state = (SELECT 'blocked') AND queue = q.name
    ORDER BY sort_priority, enqueued_at, id LIMIT 1 FOR UPDATE SKIP LOCKED) AS j
  WHERE q.name <> ALL ({closed_queues(1)})
  LIMIT 1),
heir AS MATERIALIZED (
  SELECT j.id FROM next AS j
  WHERE j.limiter IS NULL AND NOT {IS_LIMITED} AND {_LIVES}
    AND NOT EXISTS (SELECT 1 FROM {WORKER} WHERE wid = $8 AND state <> 'running')
    AND NOT EXISTS (
      SELECT 1 FROM {unnest(7)} WITH ORDINALITY AS q (name, place) CROSS JOIN LATERAL (
        SELECT sort_priority, enqueued_at, id FROM {JOB} WHERE state = 'enqueued' AND queue = q.name AND {_LIVES}
        ORDER BY sort_priority, enqueued_at, id LIMIT 1) AS ready
      WHERE q.place <= j.place AND q.name <> ALL ({closed_queues(1)})
        AND (q.place, ready.sort_priority, ready.enqueued_at, ready.id)
          < (j.place, j.sort_priority, j.enqueued_at, j.id))),
gone AS (
  DELETE FROM {JOB} AS j USING held, heir WHERE j.id = held.id AND held.result_ttl IS NULL),
kept AS (
  UPDATE {JOB} AS j SET {set_succeeded("$6")}
  FROM held, heir, clock WHERE j.id = held.id AND held.result_ttl IS NOT NULL),
token AS MATERIALIZED (SELECT nextval(pg_get_serial_sequence('{LOCK}', 'id')) AS id FROM heir),
taken AS (
  UPDATE {JOB} AS j SET state = 'working', wid = $8, attempt = attempt + 1, started_at = now, run_at = NULL,
    reserved_until = now + make_interval(secs => LEAST(GREATEST(reserve_for, $11), $12)), claim = $9,
    lock_token = token.id,
    unique_key = CASE WHEN unique_until_start THEN NULL ELSE unique_key END
  FROM heir, token, clock WHERE j.id = heir.id
  RETURNING 1, j.sort_priority, j.id AS row_id, {RETURNED}),
moved AS (
  UPDATE {LOCK} AS l SET id = token.id, jid = taken.jid, attempt = taken.attempt, wid = $8, lease = clock.lease,
    acquired_at = now, expires_at = now + clock.lease, is_lapsed = FALSE
  FROM mine, taken, token, clock WHERE l.id = mine.id),
counted AS (
  {count_processed(10, "1", source="heir, clock")})
SELECT token.id, held.wid, held.attempt, held.queue, held.jobtype, clock.now, held.started_at,
  NOT EXISTS (SELECT 1 FROM {unnest(7)} AS q (name) CROSS JOIN LATERAL (
    SELECT 1 FROM {JOB} WHERE state = 'enqueued' AND queue = q.name LIMIT 1) AS ready), taken.*
FROM held, token, taken, clock""",
)

MAX_REMEMBERED = 10_000
"""Maximum number of remembered jobs that received their lock from an ended job.

A forgotten job costs one use of the slow path.
"""


class LockHandoff:
    """Memory of jobs for which the statement is likely to succeed, and its execution.

    A job that received its lock from an ended job is likely to be followed by another job of its key. If all keys are
    different, no job receives its lock that way, and the statement is never tried.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_holders: dict[str, None] = {}

    def remember(self, jids: Iterable[str]) -> None:
        """Remember jobs that received their lock from an ended job."""
        # Exchanges in several threads share this dict; `expects` only reads it, and needs no mutex.
        with self._lock:
            self._next_holders.update(dict.fromkeys(jids))
            # Dicts keep their insertion order, so the oldest job is forgotten first.
            while len(self._next_holders) > MAX_REMEMBERED:
                del self._next_holders[next(iter(self._next_holders))]

    def expects(self, jid: str) -> bool:
        """Return whether this job received its lock from an ended job."""
        return jid in self._next_holders

    def run(
        self, connection: BaseDatabaseWrapper, ack: Ack, plan: ClaimPlan, now: datetime | None
    ) -> HandoffResult | None:
        """Run the statement for this ack; None: it did nothing. Tried once for each job."""
        # Forgotten before the attempt: if the statement does nothing, the exchange ends this job by the slow path.
        with self._lock:
            self._next_holders.pop(ack.jid, None)
        # The plan is that of a single request, so all of its slots have the same wid.
        queues, next_wid = [slot.queue for slot in plan.slots], plan.slots[0].wid
        values: list[Any] = [
            now, plan.lease_s, ack.jid, ack.wid, ack.attempt, ack.result, queues, next_wid, plan.mark,
            counter_slot(connection), plan.at_least_s, plan.at_most_s,
        ]  # fmt: skip
        [rows] = execute_on(connection, [(HAND_OFF_LOCK, values)])
        if not rows:
            return None
        [(token, wid, attempt, queue, jobtype, ended_at, started_at, is_all, *job_columns)] = rows
        [job] = reservations([[tuple(job_columns)]])
        # Another job of the key is likely to follow this one too.
        self.remember([job.jid])
        ended_run = EndedRun(wid, attempt, queue, jobtype, (ended_at - started_at).total_seconds())
        return HandoffResult({ack.jid: ended_run}, msgspec.structs.replace(job, lock_token=token), is_all)
