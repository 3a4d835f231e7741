"""Prefetch jobs for a server, and confirm and extend reservations, on PostgreSQL (ADR 0022, ADR 0026).

A prefetched job is working, and its claim number is negative until its delivery is confirmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper

from ....core.payloads import Delivery
from ..base import DELIVERY_LEASE_S, JOB, WORKER, ClaimPlan
from .limits import IS_LIMITED, closed_queues
from .prepared import Call, Statement, execute_on, unnest
from .rows import RETURNED

# Claims jobs as CLAIM does, but stops in each queue at the first job that must not wait in the prefetch buffer: a job
# that would hold a lock, a permit or a key meanwhile, that expires before its lease ends, or that has a priority other
# than 0, which would change the order.
PREFETCH = Statement(
    "prefetch",
    ["text[]", "int[]", "timestamptz", "bigint", "double precision", "text[]"],
    f"""
UPDATE {JOB} AS j SET state = 'working', wid = '', attempt = attempt + 1, started_at = now, run_at = NULL,
  reserved_until = now + make_interval(secs => $5), limiter = NULL, claim = -$4
FROM (SELECT COALESCE($3, STATEMENT_TIMESTAMP()) AS now) AS clock WHERE j.id = ANY (ARRAY(
  SELECT line.id FROM (
    SELECT ready.id, bool_and(ready.is_plain) OVER (
        PARTITION BY q.name ORDER BY ready.sort_priority, ready.enqueued_at, ready.id) AS goes
    FROM {unnest(1, 2)} AS q (name, room)
    CROSS JOIN LATERAL (
      SELECT j.id, j.sort_priority, j.enqueued_at, j.sort_priority = 0 AND j.lock_key IS NULL AND (j.expires_at IS NULL
            OR j.expires_at > COALESCE($3, STATEMENT_TIMESTAMP()) + make_interval(secs => $5))
          AND NOT j.unique_until_start AND NOT {IS_LIMITED} AS is_plain
      FROM {JOB} AS j WHERE j.state = 'enqueued' AND j.queue = q.name
        AND (j.expires_at IS NULL OR j.expires_at > COALESCE($3, STATEMENT_TIMESTAMP()))
      ORDER BY j.sort_priority, j.enqueued_at, j.id LIMIT q.room FOR UPDATE SKIP LOCKED) AS ready
    WHERE q.name <> ALL ({closed_queues(3)})
      AND NOT EXISTS (SELECT 1 FROM {WORKER} WHERE wid = ANY ($6) AND state <> 'running')) AS line
  WHERE line.goes))
RETURNING array_position($1, j.queue::text), j.sort_priority, j.id, {RETURNED}""",
)

# Rows are found by jid alone, see `jobs`. A transaction that has locked a row may be ending its job, so the
# row is skipped and confirmed later.
CONFIRM = Statement(
    "confirm",
    ["text[]", "int[]", "text[]", "double precision[]", "timestamptz"],
    f"""
WITH handed AS (
  SELECT r.jid, r.attempt, r.wid, COALESCE($5, STATEMENT_TIMESTAMP()) - make_interval(secs => r.ago_s) AS at
  FROM {unnest(1, 2, 3, 4)} AS r (jid, attempt, wid, ago_s)),
mine AS MATERIALIZED (
  SELECT j.id, r.jid, r.attempt, r.wid, r.at FROM handed AS r JOIN {JOB} AS j ON j.jid = r.jid
  FOR UPDATE OF j SKIP LOCKED),
confirmed AS (
  UPDATE {JOB} AS j SET claim = -j.claim, wid = mine.wid, started_at = mine.at,
    reserved_until = GREATEST(j.reserved_until, mine.at + make_interval(secs => j.reserve_for))
  FROM mine WHERE j.id = mine.id AND j.attempt = mine.attempt AND j.wid IN ('', mine.wid) AND j.claim < 0
    AND j.reserved_until IS NOT NULL)
SELECT r.jid FROM handed AS r JOIN {JOB} AS j ON j.jid = r.jid AND j.attempt = r.attempt
WHERE j.claim < 0 AND j.reserved_until IS NOT NULL AND r.jid NOT IN (SELECT jid FROM mine)""",
)


# Rows are found by jid alone, see `jobs`; only due rows are locked. A locked row is skipped: a
# transaction that changes a job of its own must not delay the heartbeat, and `failures.reap` skips the row as well.
EXTEND = Statement(
    "extend",
    ["text[]", "int[]", "text[]", "double precision", "timestamptz"],
    f"""
WITH clock AS (SELECT COALESCE($5, STATEMENT_TIMESTAMP()) AS now),
due AS MATERIALIZED (
  SELECT j.id FROM {unnest(1, 2, 3)} AS r (jid, attempt, wid) CROSS JOIN clock
  CROSS JOIN LATERAL (
    SELECT id, wid, attempt, reserved_until, reserve_for FROM {JOB} WHERE jid = r.jid OFFSET 0) AS j
  WHERE j.wid = r.wid AND j.attempt = r.attempt
    AND j.reserved_until < now + make_interval(secs => GREATEST(j.reserve_for, $4) / 2)),
mine AS MATERIALIZED (
  SELECT j.id, j.wid, j.attempt FROM {JOB} AS j WHERE j.id = ANY (ARRAY(SELECT id FROM due))
  FOR UPDATE SKIP LOCKED)
UPDATE {JOB} AS j SET reserved_until = now + make_interval(secs => GREATEST(j.reserve_for, $4))
FROM mine, clock, {unnest(1, 2, 3)} AS r (jid, attempt, wid)
WHERE j.id = mine.id AND j.jid = r.jid AND mine.wid = r.wid AND mine.attempt = r.attempt
  AND j.reserved_until IS NOT NULL""",
    gives_rows=False,
)


def prefetch_call(plan: ClaimPlan, now: datetime | None) -> Call:
    """Return the call that prefetches jobs."""
    return PREFETCH, [
        [slot.queue for slot in plan.prefetch_slots], [slot.count for slot in plan.prefetch_slots], now, plan.claim,
        DELIVERY_LEASE_S if plan.at_most_s is None else plan.at_most_s,
        list(plan.candidate_wids),
    ]  # fmt: skip


def confirm(connection: BaseDatabaseWrapper, deliveries: Sequence[Delivery], now: datetime | None) -> set[str]:
    """Start the reservations of delivered jobs; return the jids of locked rows."""
    jobs = [delivery.job for delivery in deliveries]
    values = [
        [job.jid for job in jobs], [job.attempt for job in jobs], [job.wid for job in jobs],
        [delivery.ago_s for delivery in deliveries], now,
    ]  # fmt: skip
    [rows] = execute_on(connection, [(CONFIRM, values)])
    return {jid for (jid,) in rows}


def extend(
    connection: BaseDatabaseWrapper, held_jobs: Sequence[tuple[str, str, int]], at_least_s: float, now: datetime | None
) -> None:
    """Extend the reservations of these jobs (wid, jid, attempt) that are half over."""
    values = [
        [jid for _, jid, _ in held_jobs],
        [attempt for *_, attempt in held_jobs],
        [wid for wid, *_ in held_jobs],
        at_least_s,
        now,
    ]
    execute_on(connection, [(EXTEND, values)])
