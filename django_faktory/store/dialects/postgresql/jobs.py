"""PostgreSQL's statements for the hot operations, and functions that return their calls.

A call is a statement with its values. A set is sent as one JSON parameter or as arrays, so that the statement's text
does not depend on its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper

from ....core.payloads import Ack, JobPayload
from ..base import (
    COUNTER,
    JOB,
    LIMITER,
    WORKER,
    ClaimPlan,
    OrderedJobs,
    counter_slot,
    unique_key_of,
)
from ..job_columns import INSERTED, REPLACED, replaceable
from .ending import IS_HOLDER, REPORTS, count_processed, set_succeeded
from .limits import IS_LIMITED, closed_queues
from .prepared import Call, Statement, unnest
from .rows import RETURNED


def _plain_values(ready_at: str) -> str:
    return f"""j.jid, j.jobtype, j.queue, CASE WHEN j.at > now THEN 'scheduled' ELSE 'enqueued' END, -j.priority,
  j.text, j.retry, j.reserve_for, j.backtrace, j.result_ttl, CASE WHEN j.at > now THEN j.at END,
  CASE WHEN j.at > now THEN NULL ELSE {ready_at} END"""


UPSERT = f"""
ON CONFLICT (jid) DO UPDATE SET {", ".join(f"{column} = excluded.{column}" for column in REPLACED)}
WHERE {replaceable("old.")}
"""


def clock(place: int) -> str:
    """Return SQL for the time in this parameter, or the database's, as `now`."""
    return f"(SELECT COALESCE(${place}, STATEMENT_TIMESTAMP()) AS now) AS clock"


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

FEW = 8
"""Up to this size, a set is not inserted faster by sending common values once."""

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


def push_call(jobs: OrderedJobs, now: datetime | None, *, may_exist: bool) -> Call:
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


def end_call(connection: BaseDatabaseWrapper, acks: Sequence[Ack], now: datetime | None, pushed: Sequence[str]) -> Call:
    """Return the call that ends plain jobs, and locks the rows with the jids in `pushed`."""
    return END, [now, str(_json.encode(acks), "utf-8"), counter_slot(connection), len(acks), list(pushed)]


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
