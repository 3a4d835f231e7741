"""PostgreSQL's statements for jobs with lock keys: one round trip each, where the shapes of `store.locks` take ten.

States are compared with a sub-select, and working jobs told by their reservation: told the state itself, the planner
takes the partial index of that state, and walks over all ready jobs to find those of one key.

The rules are ADR 0015's. A hot key's speed is how long it takes to end one job and to take the next.
"""

from __future__ import annotations

from .base import COUNTER, JOB, LOCK
from .prepared import Statement

_READY_SIBLINGS = f"""
      SELECT j.id FROM {JOB} AS j WHERE j.lock_key = {{key}} AND j.state = (SELECT 'enqueued')
      ORDER BY j.queue, j.weight, j.enqueued_at, j.id LIMIT 500 FOR UPDATE SKIP LOCKED"""

# The claimed jobs are locked first, by id: one that its worker no longer holds takes no part. The best of each key
# tries, in the order of the keys. A lapsed lock is taken over with a new token. A job that has yet to pass its gates
# keeps a key that is unique until the start.
TAKE = Statement(
    "take",
    ["json", "double precision", "timestamptz"],
    f"""
WITH clock AS (SELECT COALESCE($3, STATEMENT_TIMESTAMP()) AS now, make_interval(secs => $2) AS lease),
claimed AS MATERIALIZED (
  SELECT c.*, (SELECT id FROM {JOB} WHERE jid = c.jid) AS id FROM ROWS FROM (json_to_recordset($1)
    AS (key text COLLATE "C", jid text COLLATE "C", wid text COLLATE "C", attempt int))
    WITH ORDINALITY AS c (key, jid, wid, attempt, place)),
locked AS MATERIALIZED (
  SELECT id, wid, attempt FROM {JOB}
  WHERE id = ANY (ARRAY(SELECT id FROM claimed)) AND reserved_until IS NOT NULL AND lock_token IS NULL
  ORDER BY id FOR UPDATE),
held AS MATERIALIZED (SELECT claimed.* FROM claimed JOIN locked USING (id, wid, attempt)),
got AS (
  INSERT INTO {LOCK} AS old (lock_key, jid, attempt, wid, lease, acquired_at, expires_at, is_lapsed)
  SELECT key, jid, attempt, wid, lease, now, now + lease, FALSE
  FROM (SELECT DISTINCT ON (key) * FROM held ORDER BY key, place) AS best, clock
  ON CONFLICT (lock_key) DO UPDATE SET id = nextval(pg_get_serial_sequence('{LOCK}', 'id')), jid = excluded.jid,
    attempt = excluded.attempt, wid = excluded.wid, lease = excluded.lease, acquired_at = excluded.acquired_at,
    expires_at = excluded.expires_at, is_lapsed = FALSE
  WHERE old.expires_at <= excluded.acquired_at
  RETURNING id, lock_key, jid),
won AS (
  UPDATE {JOB} AS j SET lock_token = got.id,
    unique_key = CASE WHEN j.unique_until_start AND j.passes IS NULL THEN NULL ELSE j.unique_key END
  FROM held JOIN got USING (jid) WHERE j.id = held.id),
lost AS (
  UPDATE {JOB} AS j SET state = 'blocked', attempt = j.attempt - 1, wid = '', started_at = NULL, reserved_until = NULL,
    passes = NULL
  WHERE j.id = ANY (ARRAY(SELECT id FROM held WHERE jid NOT IN (SELECT jid FROM got)))),
parked AS (
  UPDATE {JOB} SET state = 'blocked', gate = NULL WHERE id = ANY (ARRAY(
    SELECT sibling.id FROM got CROSS JOIN LATERAL ({_READY_SIBLINGS.format(key="got.lock_key")}) AS sibling)))
SELECT jid, id FROM got""",
)

# What END leaves alone because it holds a lock, if it is of no batch. The locks are not deleted but marked: the next
# statement, whose snapshot begins after their rows were locked, sees every job that came to wait for them by then.
END_LOCKED = Statement(
    "done_locked",
    ["timestamptz", "json", "bigint"],
    f"""
WITH clock AS (SELECT COALESCE($1, STATEMENT_TIMESTAMP()) AS now),
held AS MATERIALIZED (
  SELECT DISTINCT ON (j.id) j.id, j.jid, j.wid, j.attempt, j.result_ttl, j.lock_token, r.result,
    j.queue, j.jobtype, j.started_at
  FROM json_to_recordset($2) AS r (jid text COLLATE "C", wid text COLLATE "C", attempt int, result text)
  CROSS JOIN LATERAL (
    SELECT id, jid, wid, attempt, result_ttl, state, bid, callback_of, lock_token, passes, queue, jobtype, started_at
    FROM {JOB} WHERE jid = r.jid OFFSET 0) AS j
  WHERE j.state = 'working' AND (r.wid = '' OR j.wid = '' OR j.wid = r.wid)
    AND (r.attempt IS NULL OR r.attempt = j.attempt)
    AND j.lock_token IS NOT NULL AND j.bid IS NULL AND j.callback_of IS NULL AND j.passes IS NULL),
gone AS (
  DELETE FROM {JOB} AS j USING held
  WHERE j.id = held.id AND held.result_ttl IS NULL AND j.passes IS NULL
    AND j.reserved_until IS NOT NULL AND j.wid = held.wid AND j.attempt = held.attempt
  RETURNING j.jid, j.wid, j.attempt, j.queue, j.jobtype, j.started_at, held.lock_token),
kept AS (
  UPDATE {JOB} AS j SET state = 'succeeded', result = held.result, finished_at = now, reserved_until = NULL,
    unique_key = NULL, lock_token = NULL, purge_at = now + make_interval(secs => j.result_ttl)
  FROM held, clock
  WHERE j.id = held.id AND held.result_ttl IS NOT NULL AND j.passes IS NULL
    AND j.reserved_until IS NOT NULL AND j.wid = held.wid AND j.attempt = held.attempt
  RETURNING j.jid, j.wid, j.attempt, j.queue, j.jobtype, j.started_at, held.lock_token),
ended AS (SELECT * FROM gone UNION ALL SELECT * FROM kept),
locks AS MATERIALIZED (
  SELECT id FROM {LOCK} WHERE id = ANY (ARRAY(SELECT lock_token FROM ended)) ORDER BY lock_key FOR UPDATE),
freed AS (
  UPDATE {LOCK} SET is_lapsed = TRUE, expires_at = '-infinity' WHERE id = ANY (ARRAY(SELECT id FROM locks))
  RETURNING 1),
counted AS (
  INSERT INTO {COUNTER} AS c (day, slot, processed, failed, late)
  SELECT (now AT TIME ZONE 'UTC')::date, $3, (SELECT COUNT(*) FROM ended), 0, 0
  FROM clock WHERE EXISTS (SELECT 1 FROM ended) AND (SELECT COUNT(*) FROM freed) >= 0
  ON CONFLICT (day, slot) DO UPDATE SET processed = c.processed + excluded.processed)
SELECT jid, wid, attempt, queue, jobtype, now, started_at FROM ended, clock""",
)

# One that waits at a gate waits for all of its key (ADR 0016).
# Queue and priority of those blocked by a key, one look at the index for each; of each the first, unless one is ready.
# That is asked for each, in the order of the index: as NOT EXISTS it becomes a join that reads all of the table.
# A lock row is locked when this runs, so it waits for no job: a row that is locked is left, and its key returned.
_FIRST = f"""
SELECT j.id, j.queue, j.weight, j.gate FROM {JOB} AS j WHERE j.lock_key = keys.key AND j.state = (SELECT 'blocked')"""
_NEXT = f"""
found AS (
  WITH RECURSIVE places (key, id, queue, weight, gate) AS (
    SELECT keys.key, first.id, first.queue, first.weight, first.gate FROM keys
    CROSS JOIN LATERAL ({_FIRST} ORDER BY j.queue, j.weight, j.enqueued_at, j.id LIMIT 1) AS first
    UNION ALL
    SELECT keys.key, next.id, next.queue, next.weight, next.gate FROM places AS keys
    CROSS JOIN LATERAL (
      {_FIRST} AND (j.queue, j.weight) > (keys.queue, keys.weight)
      ORDER BY j.queue, j.weight, j.enqueued_at, j.id LIMIT 1) AS next)
  SELECT id, key FROM places WHERE gate IS NULL AND (
    SELECT ready.id FROM {JOB} AS ready WHERE ready.lock_key = places.key AND ready.state = (SELECT 'enqueued')
      AND ready.queue = places.queue AND ready.weight = places.weight
    ORDER BY ready.enqueued_at, ready.id LIMIT 1) IS NULL),
free AS MATERIALIZED (
  SELECT id FROM {JOB} WHERE id = ANY (ARRAY(SELECT id FROM found)) AND state = (SELECT 'blocked') AND gate IS NULL
  ORDER BY id FOR UPDATE SKIP LOCKED),
readied AS (UPDATE {JOB} AS j SET state = 'enqueued' WHERE j.id = ANY (ARRAY(SELECT id FROM free)) RETURNING j.queue)
SELECT queue, NULL::text FROM readied
UNION ALL SELECT '', key FROM found WHERE id NOT IN (SELECT id FROM free)"""

READY = Statement(
    "ready_of_keys",
    ["text[]"],
    f"""
SELECT ready.id, ready.lock_key, ready.queue, ready.weight FROM unnest($1) AS keys (key) CROSS JOIN LATERAL (
  SELECT id, lock_key, queue, weight FROM {JOB}
  WHERE lock_key = keys.key COLLATE "C" AND state = (SELECT 'enqueued')
  ORDER BY queue, weight, enqueued_at, id LIMIT 1000) AS ready""",
)

NEXT_OF_FREED = Statement(
    "next_of_freed",
    ["boolean"],
    f"""
WITH keys AS MATERIALIZED (
  DELETE FROM {LOCK} WHERE id = ANY (ARRAY(
    SELECT id FROM {LOCK} WHERE is_lapsed = $1 AND expires_at = '-infinity' FOR UPDATE SKIP LOCKED))
  RETURNING lock_key AS key), {_NEXT}""",
)

# In a transaction that goes on to claim: the freed rows stay marked until `HAND_OVER`.
NEXT_OF_MARKED = Statement(
    "next_of_marked",
    ["boolean"],
    f"""
WITH keys AS MATERIALIZED (
  SELECT lock_key AS key FROM {LOCK} WHERE is_lapsed = $1 AND expires_at = '-infinity'), {_NEXT}""",
)

# The lock of a job that was ended in this transaction goes to the one of its key that was claimed in it: known by
# xmin, since another's claim, whose lock is yet to be taken, must not get it. Nobody is waited for: the rows are ours
# already. Where two were claimed `TAKE` chooses; who has a gate to pass takes its lock after that.
HAND_OVER = Statement(
    "hand_over",
    ["boolean", "double precision", "timestamptz"],
    f"""
WITH clock AS (SELECT COALESCE($3, STATEMENT_TIMESTAMP()) AS now, make_interval(secs => $2) AS lease),
freed AS MATERIALIZED (
  SELECT id, lock_key FROM {LOCK} WHERE is_lapsed = $1 AND expires_at = '-infinity'),
heirs AS MATERIALIZED (
  SELECT freed.id AS lock_id, freed.lock_key, heir.* FROM freed CROSS JOIN LATERAL (
    SELECT j.id, j.jid, j.queue, j.wid, j.attempt, j.passes, COUNT(*) OVER () AS rivals FROM {JOB} AS j
    WHERE j.lock_key = freed.lock_key AND j.state = (SELECT 'working')
      AND j.xmin = pg_current_xact_id()::xid AND j.lock_token IS NULL) AS heir
  WHERE heir.rivals = 1 AND heir.passes IS NULL),
moved AS (
  UPDATE {LOCK} AS l SET id = nextval(pg_get_serial_sequence('{LOCK}', 'id')), jid = heirs.jid,
    attempt = heirs.attempt, wid = heirs.wid, lease = clock.lease, acquired_at = now, expires_at = now + clock.lease,
    is_lapsed = FALSE
  FROM heirs, clock WHERE l.id = heirs.lock_id
  RETURNING l.id, l.jid),
gone AS (
  DELETE FROM {LOCK} WHERE id = ANY (ARRAY(
    SELECT id FROM freed WHERE NOT EXISTS (SELECT 1 FROM heirs WHERE heirs.lock_id = freed.id)))),
won AS (
  UPDATE {JOB} AS j SET lock_token = moved.id,
    unique_key = CASE WHEN j.unique_until_start THEN NULL ELSE j.unique_key END
  FROM heirs JOIN moved USING (jid) WHERE j.id = heirs.id),
parked AS (
  UPDATE {JOB} SET state = 'blocked', gate = NULL WHERE id = ANY (ARRAY(
    SELECT sibling.id FROM heirs CROSS JOIN LATERAL ({_READY_SIBLINGS.format(key="heirs.lock_key")}) AS sibling)))
SELECT moved.jid, moved.id, heirs.queue FROM moved JOIN heirs USING (jid)""",
)

NEXT = Statement("next_of_keys", ["text[]"], f'WITH keys AS (SELECT unnest($1) COLLATE "C" AS key), {_NEXT}')
