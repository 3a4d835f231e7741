"""Confirm and extend reservations on PostgreSQL (ADR 0022, ADR 0026).

A prefetched job is working, and its claim number is negative until its delivery is confirmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper

from ....core.payloads import Delivery
from ..base import JOB
from .prepared import Statement, execute_on, unnest

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
