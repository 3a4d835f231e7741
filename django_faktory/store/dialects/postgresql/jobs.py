"""PostgreSQL's statements that claim jobs and end plain ones, and functions that return their calls.

A call is a statement with its values. A set is sent as one JSON parameter or as arrays, so that the statement's text
does not depend on its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper

from ....core.payloads import Ack
from ..base import (
    COUNTER,
    JOB,
    LIMITER,
    WORKER,
    ClaimPlan,
    counter_slot,
)
from .ending import IS_HOLDER, REPORTS, count_processed, set_succeeded
from .limits import IS_LIMITED, closed_queues
from .prepared import Call, Statement, clock, unnest
from .rows import RETURNED

_READY = f"""
  SELECT id FROM {JOB} WHERE state = 'enqueued' AND queue = q.name
    AND (expires_at IS NULL OR expires_at > COALESCE($5, STATEMENT_TIMESTAMP()))
  ORDER BY sort_priority, enqueued_at, id LIMIT q.room FOR UPDATE SKIP LOCKED"""

# Walks the queues in the given order and no further than the limit, so that exactly the claimed rows are locked. The
# ids pass through an array, which is computed once. For a join the planner would estimate a tenth of the waiting jobs,
# and read the whole table for each claim as soon as it knows that the table is large.
_CLAIM = f"""
UPDATE {JOB} AS j SET state = 'working', wid = $3, attempt = attempt + 1, started_at = now, run_at = NULL,
  reserved_until = now + make_interval(secs => LEAST(GREATEST(reserve_for, $7), $8)), limiter = NULL, claim = $6,
  permits = CASE WHEN {IS_LIMITED} THEN '' END,
  unique_key = CASE WHEN unique_until_start AND lock_key IS NULL AND NOT {IS_LIMITED} THEN NULL ELSE unique_key END
FROM {clock(5)} WHERE j.id = ANY (ARRAY(
  SELECT ready.id FROM {unnest(1, 2)} AS q (name, room)
  CROSS JOIN LATERAL ({_READY}) AS ready
  WHERE q.name <> ALL ({closed_queues(5)})
    AND NOT EXISTS (SELECT 1 FROM {WORKER} WHERE wid = $3 AND state <> 'running')
    AND $alone
  LIMIT (SELECT $4)))
RETURNING array_position($1, j.queue::text), j.sort_priority, j.id, {RETURNED}"""

_CLAIM_TYPES = ["text[]", "int[]", "text", "int", "timestamptz", "bigint", "double precision", "double precision"]
CLAIM = Statement("claim", _CLAIM_TYPES, _CLAIM.replace("AND $alone", ""))

# Alone in its transaction, a claim commits without waiting for the disk: if a crash of the database undoes it, the job
# runs again, and any later acknowledgement flushes the claim to disk as well (ADR 0006).
CLAIM_ALONE = Statement(
    "claim_alone",
    _CLAIM_TYPES,
    _CLAIM.replace("AND $alone", "AND (SELECT set_config('synchronous_commit', 'off', TRUE)) IS NOT NULL"),
)

COUNT_CLAIMABLE = Statement(
    "count_claimable",
    ["text[]", "int", "text[]", "timestamptz"],
    f"""
SELECT q.name, (SELECT COUNT(*) FROM (
    SELECT 1 FROM {JOB} WHERE state = 'enqueued' AND queue = q.name
      AND (expires_at IS NULL OR expires_at > COALESCE($4, STATEMENT_TIMESTAMP())) LIMIT $2) AS ready), FALSE
  FROM {unnest(1)} AS q (name)
  WHERE q.name <> ALL ({closed_queues(4)})
UNION ALL SELECT wid, 0, TRUE FROM {WORKER} WHERE wid = ANY ($3) AND state <> 'running'""",
)

# Rows are found by jid alone, and their state is checked once they are locked. With the state in the lookup, the
# planner takes the partial index of working jobs, does not count its dead entries, and walks over every job of the last
# minute. A prefetched job may get its wid in between (ADR 0022), and any job may get permits from a new limit: only the
# locked row counts. All rows are locked by id first, including rows that later statements of the same message end, and
# rows with a jid that a later statement inserts: $5 (ADR 0024).
END = Statement(
    "end",
    ["timestamptz", "json", "bigint", "int", "text[]"],
    f"""
WITH clock AS (SELECT COALESCE($1, STATEMENT_TIMESTAMP()) AS now),
asked AS MATERIALIZED (SELECT jid, wid, attempt, result FROM {REPORTS}),
locked AS MATERIALIZED (
  SELECT id, jid, wid, attempt, result_ttl, state, queue, jobtype, started_at,
    bid IS NOT NULL OR callback_of IS NOT NULL OR lock_token IS NOT NULL OR permits IS NOT NULL AS needs_more
  FROM {JOB} WHERE jid = ANY (ARRAY(SELECT jid FROM asked) || (SELECT $5))
  ORDER BY id FOR UPDATE),
held AS MATERIALIZED (
  SELECT DISTINCT ON (j.id) j.id, j.jid, j.wid, j.attempt, j.result_ttl, j.queue, j.jobtype, j.started_at, j.needs_more,
    r.result
  FROM asked AS r JOIN locked AS j USING (jid)
  WHERE {IS_HOLDER}),
gone AS (
  DELETE FROM {JOB} WHERE id = ANY (ARRAY(SELECT id FROM held WHERE result_ttl IS NULL AND NOT needs_more))),
kept AS (
  UPDATE {JOB} AS j SET {set_succeeded("held.result")}
  FROM held, clock WHERE j.id = held.id AND held.result_ttl IS NOT NULL AND NOT held.needs_more),
counted AS (
  {count_processed(3, "(SELECT COUNT(*) FROM held WHERE NOT needs_more)", late="$4 - (SELECT COUNT(*) FROM held)")})
SELECT jid, wid, attempt, queue, jobtype, CASE WHEN NOT needs_more THEN now END, started_at, needs_more
FROM held, clock""",
)

NOT_HELD = "the job is no longer held as it was: nothing of its task may be committed"
"""Error text with which `END_LAST` fails; it also appears in the server's log."""

# Ends one job, with the transaction's COMMIT behind it in the same message. If the job was not ended, the COMMIT must
# not take effect, so the statement must fail: it casts NOT_HELD to a number, which is an error that contains this text.
# The cast happens after the outcome is known. A limit set while the job ran may have given it permits: they are
# released here, and the caller checks their limiters.
END_LAST = Statement(
    "end_last",
    ["timestamptz", "text", "text", "int", "text", "bigint"],
    f"""
WITH clock AS (SELECT COALESCE($1, STATEMENT_TIMESTAMP()) AS now),
held AS MATERIALIZED (
  SELECT id, result_ttl, permits FROM {JOB}
  WHERE jid = $2 AND state = (SELECT 'working')
    AND ($3 = '' OR wid = '' OR wid = $3) AND ($4 IS NULL OR attempt = $4)
    AND bid IS NULL AND callback_of IS NULL AND lock_token IS NULL
  FOR UPDATE),
gone AS (
  DELETE FROM {JOB} AS j USING held WHERE j.id = held.id AND held.result_ttl IS NULL
  RETURNING 1),
kept AS (
  UPDATE {JOB} AS j SET {set_succeeded("$5")}
  FROM held, clock WHERE j.id = held.id AND held.result_ttl IS NOT NULL
  RETURNING 1),
limiters AS MATERIALIZED (
  SELECT id FROM {LIMITER} WHERE id = ANY (ARRAY(
    SELECT unnest(string_to_array(btrim(permits, ','), ','))::bigint FROM held WHERE permits <> ''))
  ORDER BY id FOR UPDATE),
freed AS (
  UPDATE {LIMITER} SET in_use = GREATEST(in_use - 1, 0) WHERE id = ANY (ARRAY(SELECT id FROM limiters)) RETURNING 1),
counted AS (
  {count_processed(6, "1", source="clock WHERE (SELECT COUNT(*) FROM freed) >= 0")})
SELECT (CASE WHEN EXISTS (SELECT FROM gone) OR EXISTS (SELECT FROM kept) THEN '1' ELSE '{NOT_HELD}' END)::int, now,
  (SELECT permits FROM held)
FROM clock""",
    ages=True,
)

MARK_SUCCEEDED = Statement(
    "keep",
    ["bigint[]", "text[]", "timestamptz"],
    f"""
UPDATE {JOB} AS j SET {set_succeeded("r.result", now="$3")}
FROM {unnest(1, 2)} AS r (id, result) WHERE j.id = r.id""",
    gives_rows=False,
)

ADD_TO_COUNTERS = Statement(
    "count",
    ["date", "bigint", "int", "int", "int"],
    f"""
INSERT INTO {COUNTER} AS c (day, slot, processed, failed, late) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (day, slot) DO UPDATE SET processed = c.processed + excluded.processed,
  failed = c.failed + excluded.failed, late = c.late + excluded.late""",
    gives_rows=False,
    ages=False,
)

_json = msgspec.json.Encoder()


def end_call(connection: BaseDatabaseWrapper, acks: Sequence[Ack], now: datetime | None, pushed: Sequence[str]) -> Call:
    """Return the call that ends plain jobs, and locks the rows with the jids in `pushed`."""
    # Without the log lines, which are stored before: they may have characters that the database refuses.
    reports = [msgspec.structs.replace(ack, log=()) if ack.log else ack for ack in acks]
    return END, [now, str(_json.encode(reports), "utf-8"), counter_slot(connection), len(acks), list(pushed)]


def end_last_call(connection: BaseDatabaseWrapper, ack: Ack, now: datetime | None) -> Call:
    """Return the call that ends one plain job before the COMMIT in the same message."""
    return END_LAST, [now, ack.jid, ack.wid, ack.attempt, ack.result, counter_slot(connection)]


def claim_calls(claim: Statement, plan: ClaimPlan, now: datetime | None) -> list[Call]:
    """Return a claim for each wid of the plan, followed by the claims of its `next_plans`."""
    calls: list[Call] = []
    for subplan in (plan, *plan.next_plans):
        by_wid: dict[str, tuple[list[str], list[int]]] = {}
        for slot in subplan.slots:
            queues, counts = by_wid.setdefault(slot.wid, ([], []))
            queues.append(slot.queue)
            counts.append(slot.count)
        leases = [now, plan.mark, plan.at_least_s, plan.at_most_s]
        for wid, (queues, counts) in by_wid.items():
            calls.append((claim, [queues, counts, wid, subplan.limit, *leases]))
    return calls
