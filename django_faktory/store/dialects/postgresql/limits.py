"""PostgreSQL's statements for limiters (ADR 0016): which jobs need a permit, and how to acquire and release permits."""

from __future__ import annotations

from ....core.limits import SAVED_S
from ..base import JOB, LIMIT, LIMITER, QUEUE
from .ending import IS_HOLDER, REPORTS, count_processed, set_succeeded
from .prepared import Statement

# Names of tasks and queues with limits: read once per claim, from a table that is nearly always empty or small.
IS_LIMITED = f"""(j.limit_key IS NOT NULL
  OR j.jobtype = ANY (ARRAY(SELECT name::text FROM {LIMIT} WHERE scope = 'task'))
  OR j.queue = ANY (ARRAY(SELECT name::text FROM {LIMIT} WHERE scope = 'queue')))"""


def closed_queues(clock: int) -> str:
    """Return SQL for the array of queues without claims: paused, or with a limiter that is full or not open yet."""
    return f"""ARRAY(SELECT name::text FROM {QUEUE} WHERE paused_at IS NOT NULL
    UNION ALL SELECT name::text FROM {LIMITER} WHERE scope = 'queue'
      AND (is_paused OR in_use >= concurrency OR opens_at > COALESCE(${clock}, STATEMENT_TIMESTAMP())))"""


# The usual case of acquiring permits, in one statement: every limiter has room for the whole set, none is paused, no
# job waits for a rate, and each key has its limiter. Otherwise the statement does nothing, and the caller uses the slow
# path. Jobs are locked first, then limiters in the order of their ids. The ids pass through arrays, which are computed
# once, whatever changes while the statement waits for a row.
_ACQUIRE_PERMITS = f"""
WITH clock AS (SELECT COALESCE($2, CLOCK_TIMESTAMP()) AS now),
claimed AS MATERIALIZED (
  SELECT * FROM json_to_recordset($1)
    AS c (jid text COLLATE "C", wid text COLLATE "C", attempt int, jobtype text COLLATE "C", queue text COLLATE "C",
      key text COLLATE "C")),
locked AS MATERIALIZED (
  SELECT id, jid, wid, attempt FROM {JOB} WHERE jid = ANY (ARRAY(SELECT jid FROM claimed)) AND permits = ''
  ORDER BY id FOR UPDATE),
held AS MATERIALIZED (SELECT id, claimed.* FROM claimed JOIN locked USING (jid, wid, attempt)),
limiters AS MATERIALIZED (
  SELECT id, scope, name, concurrency, rate, per, burst, is_paused, in_use, tokens, filled_at, opens_at
  FROM {LIMITER} WHERE id = ANY (ARRAY(
    SELECT g.id FROM held JOIN {LIMITER} AS g ON g.scope = 'task' AND g.name = held.jobtype
    UNION SELECT g.id FROM held JOIN {LIMITER} AS g ON g.scope = 'queue' AND g.name = held.queue
    UNION SELECT g.id FROM held JOIN {LIMITER} AS g ON g.scope = 'key' AND g.name = held.key))
  ORDER BY id FOR UPDATE),
asked AS MATERIALIZED (
  SELECT held.id, limiters.id AS limiter, limiters.concurrency IS NOT NULL AS gives_permit
  FROM held JOIN limiters ON limiters.name =
    CASE limiters.scope WHEN 'task' THEN held.jobtype WHEN 'queue' THEN held.queue ELSE held.key END),
filled AS MATERIALIZED (
  SELECT limiters.id, limiters.concurrency, limiters.in_use, limiters.rate, need.jobs,
    limiters.is_paused OR limiters.opens_at IS NOT NULL AS is_busy,
    CASE WHEN limiters.rate IS NULL THEN limiters.tokens ELSE LEAST(
      limiters.tokens + GREATEST(EXTRACT(EPOCH FROM now - limiters.filled_at)::float8, 0)
        * limiters.rate / limiters.per,
      GREATEST(COALESCE(limiters.burst, 1), limiters.tokens,
        CASE WHEN limiters.burst IS NULL THEN {SAVED_S} * limiters.rate / limiters.per END)) END AS tokens
  FROM limiters JOIN (SELECT limiter, COUNT(*) AS jobs FROM asked GROUP BY limiter) AS need
    ON need.limiter = limiters.id, clock),
fits AS MATERIALIZED (
  SELECT $3 AND NOT EXISTS (SELECT 1 FROM filled WHERE is_busy OR in_use + jobs > concurrency
      OR (rate IS NOT NULL AND tokens < jobs))
    AND NOT EXISTS (SELECT 1 FROM held WHERE key IS NOT NULL
      AND NOT EXISTS (SELECT 1 FROM limiters WHERE scope = 'key' AND name = held.key)) AS all_of_them),
permitted AS (
  UPDATE {JOB} AS j SET unique_key = CASE WHEN j.unique_until_start AND (j.lock_key IS NULL OR j.lock_token IS NOT NULL)
      THEN NULL ELSE j.unique_key END,
    permits = (SELECT ',' || string_agg(limiter::text, ',' ORDER BY limiter) || ',' FROM asked
      WHERE asked.id = j.id AND gives_permit)
  WHERE j.id = ANY (ARRAY(SELECT id FROM held WHERE (SELECT all_of_them FROM fits)))
  RETURNING j.jid, j.permits),
used AS (
  UPDATE {LIMITER} AS g SET in_use = CASE WHEN g.concurrency IS NULL THEN g.in_use ELSE g.in_use + filled.jobs END,
    tokens = CASE WHEN g.rate IS NULL THEN g.tokens ELSE filled.tokens - filled.jobs END,
    filled_at = GREATEST(g.filled_at, now)
  FROM filled, clock WHERE g.id = filled.id AND (SELECT all_of_them FROM fits))
SELECT jid, permits FROM permitted"""

_ALONE = "(SELECT set_config('synchronous_commit', 'off', TRUE)) IS NOT NULL"
ACQUIRE_PERMITS = Statement("acquire_permits", ["json", "timestamptz"], _ACQUIRE_PERMITS.replace("$3", "TRUE"))
ACQUIRE_PERMITS_ALONE = Statement(
    "acquire_permits_alone", ["json", "timestamptz"], _ACQUIRE_PERMITS.replace("$3", _ALONE)
)
"""Like CLAIM_ALONE, it commits without waiting for the disk.

If a crash of the database undoes it, the job was not delivered yet, or runs again.
"""


# Ends the jobs that END skips because they hold permits, if they belong to no batch, have no lock, and no job waits for
# their permits. A waiting job needs the slow path, which unblocks it.
END_WITH_PERMITS = Statement(
    "end_with_permits",
    ["timestamptz", "json", "bigint"],
    f"""
WITH clock AS (SELECT COALESCE($1, STATEMENT_TIMESTAMP()) AS now),
held AS MATERIALIZED (
  SELECT DISTINCT ON (j.id) j.id, j.jid, j.wid, j.attempt, j.result_ttl, j.permits, j.queue, j.jobtype, j.started_at,
    r.result
  FROM {REPORTS}
  CROSS JOIN LATERAL (
    SELECT id, jid, wid, attempt, result_ttl, state, bid, callback_of, lock_token, permits, queue, jobtype, started_at
    FROM {JOB} WHERE jid = r.jid FOR UPDATE) AS j
  WHERE {IS_HOLDER}
    AND j.permits <> '' AND j.lock_token IS NULL AND j.bid IS NULL AND j.callback_of IS NULL),
asked AS MATERIALIZED (
  SELECT id, unnest(string_to_array(btrim(permits, ','), ','))::bigint AS limiter FROM held),
limiters AS MATERIALIZED (
  SELECT id, is_awaited OR (scope = 'queue' AND in_use >= concurrency) AS is_awaited
  FROM {LIMITER} WHERE id = ANY (ARRAY(SELECT limiter FROM asked)) ORDER BY id FOR UPDATE),
mine AS MATERIALIZED (
  SELECT * FROM held WHERE id <> ALL (ARRAY(
    SELECT asked.id FROM asked JOIN limiters ON limiters.id = asked.limiter WHERE limiters.is_awaited))),
gone AS (
  DELETE FROM {JOB} WHERE id = ANY (ARRAY(SELECT id FROM mine WHERE result_ttl IS NULL))),
kept AS (
  UPDATE {JOB} AS j SET {set_succeeded("mine.result")}
  FROM mine, clock WHERE j.id = mine.id AND mine.result_ttl IS NOT NULL),
freed AS (
  UPDATE {LIMITER} AS g SET in_use = GREATEST(g.in_use - back.jobs, 0)
  FROM (SELECT limiter, COUNT(*) AS jobs FROM asked JOIN mine USING (id) GROUP BY limiter) AS back
  WHERE g.id = back.limiter
  RETURNING 1),
counted AS (
  {
        count_processed(
            3,
            "(SELECT COUNT(*) FROM mine)",
            source="clock WHERE EXISTS (SELECT 1 FROM mine) AND (SELECT COUNT(*) FROM freed) >= 0",
        )
    })
SELECT jid, wid, attempt, queue, jobtype, now, started_at FROM mine, clock""",
)
