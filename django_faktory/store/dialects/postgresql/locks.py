"""PostgreSQL's statements for jobs with lock keys (ADR 0015): one round trip each, where `store.locks.locks` needs ten.

States are compared with a sub-select, and working jobs are recognized by their reservation. With a literal state, the
planner chooses the partial index of that state, and walks over all ready jobs to find those of one key. The
throughput of a hot key depends on the time that it takes to end one job and to claim the next.
"""

from __future__ import annotations

from ..base import JOB, LOCK
from .ending import IS_HOLDER, REPORTS, count_processed, set_succeeded
from .prepared import Statement, unnest

_READY_SIBLINGS = f"""
      SELECT j.id FROM {JOB} AS j WHERE j.lock_key = {{key}} AND j.state = (SELECT 'enqueued')
      ORDER BY j.queue, j.sort_priority, j.enqueued_at, j.id LIMIT 500 FOR UPDATE SKIP LOCKED"""

# Acquires locks for claimed jobs. Their rows are locked first, by id; a job that its worker no longer holds is ignored.
# The first job of each key in the order of the claim tries to acquire it, in the order of the keys, so that two
# statements cannot deadlock. An expired lock is taken over with a new token. A job that has yet to acquire permits
# keeps its `unique_until_start` key.
TAKE = Statement(
    "take",
    ["json", "double precision", "timestamptz"],
    f"""
WITH clock AS (SELECT COALESCE($3, STATEMENT_TIMESTAMP()) AS now, make_interval(secs => $2) AS lease),
claimed AS MATERIALIZED (
  SELECT * FROM ROWS FROM (json_to_recordset($1)
    AS (key text COLLATE "C", jid text COLLATE "C", wid text COLLATE "C", attempt int))
    WITH ORDINALITY AS c (key, jid, wid, attempt, place)),
locked AS MATERIALIZED (
  SELECT id, jid, wid, attempt FROM {JOB}
  WHERE jid = ANY (ARRAY(SELECT jid FROM claimed)) AND reserved_until IS NOT NULL AND lock_token IS NULL
  ORDER BY id FOR UPDATE),
held AS MATERIALIZED (SELECT id, claimed.* FROM claimed JOIN locked USING (jid, wid, attempt)),
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
    unique_key = CASE WHEN j.unique_until_start AND j.permits IS NULL THEN NULL ELSE j.unique_key END
  FROM held JOIN got USING (jid) WHERE j.id = held.id),
lost AS (
  UPDATE {JOB} AS j SET state = 'blocked', attempt = j.attempt - 1, wid = '', started_at = NULL, reserved_until = NULL,
    permits = NULL
  WHERE j.id = ANY (ARRAY(SELECT id FROM held WHERE jid NOT IN (SELECT jid FROM got)))),
parked AS (
  UPDATE {JOB} SET state = 'blocked', limiter = NULL WHERE id = ANY (ARRAY(
    SELECT sibling.id FROM got CROSS JOIN LATERAL ({_READY_SIBLINGS.format(key="got.lock_key")}) AS sibling)))
SELECT jid, id FROM got""",
)

# Ends the jobs that END skips because they hold a lock, if they belong to no batch. Their locks are not deleted but
# marked: the next statement takes its snapshot after the lock rows were locked, and so sees every job that was blocked
# by them until then.
END_LOCKED = Statement(
    "end_locked",
    ["timestamptz", "json", "bigint"],
    f"""
WITH clock AS (SELECT COALESCE($1, STATEMENT_TIMESTAMP()) AS now),
held AS MATERIALIZED (
  SELECT DISTINCT ON (j.id) j.id, j.jid, j.wid, j.attempt, j.result_ttl, j.lock_token, r.result,
    j.queue, j.jobtype, j.started_at
  FROM {REPORTS}
  CROSS JOIN LATERAL (
    SELECT id, jid, wid, attempt, result_ttl, state, bid, callback_of, lock_token, permits, queue, jobtype, started_at
    FROM {JOB} WHERE jid = r.jid OFFSET 0) AS j
  WHERE {IS_HOLDER}
    AND j.lock_token IS NOT NULL AND j.bid IS NULL AND j.callback_of IS NULL AND j.permits IS NULL),
gone AS (
  DELETE FROM {JOB} AS j USING held
  WHERE j.id = held.id AND held.result_ttl IS NULL AND j.permits IS NULL
    AND j.reserved_until IS NOT NULL AND j.wid = held.wid AND j.attempt = held.attempt
  RETURNING j.jid, j.wid, j.attempt, j.queue, j.jobtype, j.started_at, held.lock_token),
kept AS (
  UPDATE {JOB} AS j SET {set_succeeded("held.result")}
  FROM held, clock
  WHERE j.id = held.id AND held.result_ttl IS NOT NULL AND j.permits IS NULL
    AND j.reserved_until IS NOT NULL AND j.wid = held.wid AND j.attempt = held.attempt
  RETURNING j.jid, j.wid, j.attempt, j.queue, j.jobtype, j.started_at, held.lock_token),
ended AS (SELECT * FROM gone UNION ALL SELECT * FROM kept),
locks AS MATERIALIZED (
  SELECT id FROM {LOCK} WHERE id = ANY (ARRAY(SELECT lock_token FROM ended)) ORDER BY lock_key FOR UPDATE),
freed AS (
  UPDATE {LOCK} SET is_lapsed = TRUE, expires_at = '-infinity' WHERE id = ANY (ARRAY(SELECT id FROM locks))
  RETURNING 1),
counted AS (
  {
        count_processed(
            3,
            "(SELECT COUNT(*) FROM ended)",
            source="clock WHERE EXISTS (SELECT 1 FROM ended) AND (SELECT COUNT(*) FROM freed) >= 0",
        )
    })
SELECT jid, wid, attempt, queue, jobtype, now, started_at FROM ended, clock""",
)

# If the first blocked job of a queue and priority waits for a permit, the jobs of its key wait behind it (ADR 0016).
# `places` lists the queues and priorities of the jobs blocked by a key, with one index lookup each. Of each place the
# first job becomes ready, unless one is ready already. That check is a scalar sub-select per place, in the order of the
# index: as NOT EXISTS it becomes a join that reads the whole table. A lock row is locked while this runs, so it must
# not wait for a job (ADR 0024): a locked job is skipped, and its key returned.
_FIRST = f"""
SELECT j.id, j.queue, j.sort_priority, j.limiter FROM {JOB} AS j
WHERE j.lock_key = keys.key AND j.state = (SELECT 'blocked')"""
_NEXT = f"""
found AS (
  WITH RECURSIVE places (key, id, queue, sort_priority, limiter) AS (
    SELECT keys.key, first.id, first.queue, first.sort_priority, first.limiter FROM keys
    CROSS JOIN LATERAL ({_FIRST} ORDER BY j.queue, j.sort_priority, j.enqueued_at, j.id LIMIT 1) AS first
    UNION ALL
    SELECT keys.key, next.id, next.queue, next.sort_priority, next.limiter FROM places AS keys
    CROSS JOIN LATERAL (
      {_FIRST} AND (j.queue, j.sort_priority) > (keys.queue, keys.sort_priority)
      ORDER BY j.queue, j.sort_priority, j.enqueued_at, j.id LIMIT 1) AS next)
  SELECT id, key FROM places WHERE limiter IS NULL AND (
    SELECT ready.id FROM {JOB} AS ready WHERE ready.lock_key = places.key AND ready.state = (SELECT 'enqueued')
      AND ready.queue = places.queue AND ready.sort_priority = places.sort_priority
    ORDER BY ready.enqueued_at, ready.id LIMIT 1) IS NULL),
free AS MATERIALIZED (
  SELECT id FROM {JOB} WHERE id = ANY (ARRAY(SELECT id FROM found)) AND state = (SELECT 'blocked') AND limiter IS NULL
  ORDER BY id FOR UPDATE SKIP LOCKED),
readied AS (UPDATE {JOB} AS j SET state = 'enqueued' WHERE j.id = ANY (ARRAY(SELECT id FROM free)) RETURNING j.queue)
SELECT queue, NULL::text FROM readied
UNION ALL SELECT '', key FROM found WHERE id NOT IN (SELECT id FROM free)"""

# LIMIT bounds the work for a key with many ready jobs.
READY = Statement(
    "ready_of_keys",
    ["text[]"],
    f"""
SELECT ready.id, ready.lock_key, ready.queue, ready.sort_priority FROM {unnest(1)} AS keys (key) CROSS JOIN LATERAL (
  SELECT id, lock_key, queue, sort_priority FROM {JOB}
  WHERE lock_key = keys.key COLLATE "C" AND state = (SELECT 'enqueued')
  ORDER BY queue, sort_priority, enqueued_at, id LIMIT 1000) AS ready""",
)

# END_LOCKED marks a lock as lapsed, expired at -infinity. Other transactions never see such rows, because this
# statement or HAND_OFF_MARKED removes them before the commit.
NEXT_OF_FREED = Statement(
    "next_of_freed",
    ["boolean"],
    f"""
WITH keys AS MATERIALIZED (
  DELETE FROM {LOCK} WHERE id = ANY (ARRAY(
    SELECT id FROM {LOCK} WHERE is_lapsed = $1 AND expires_at = '-infinity' FOR UPDATE SKIP LOCKED))
  RETURNING lock_key AS key), {_NEXT}""",
)

# For an exchange that also claims: the freed rows stay marked until `HAND_OFF_MARKED`.
NEXT_OF_MARKED = Statement(
    "next_of_marked",
    ["boolean"],
    f"""
WITH keys AS MATERIALIZED (
  SELECT lock_key AS key FROM {LOCK} WHERE is_lapsed = $1 AND expires_at = '-infinity'), {_NEXT}""",
)

# Passes the lock of a job that this transaction ended to the job of the same key that it claimed. That job is found by
# xmin: a job claimed by another transaction, which has yet to acquire its lock, must not get it. The statement waits
# for no row, since all are locked already. If two jobs of the key were claimed, `TAKE` chooses later; a job that needs
# a permit acquires its lock together with the permit.
HAND_OFF_MARKED = Statement(
    "hand_off_marked",
    ["boolean", "double precision", "timestamptz"],
    f"""
WITH clock AS (SELECT COALESCE($3, STATEMENT_TIMESTAMP()) AS now, make_interval(secs => $2) AS lease),
freed AS MATERIALIZED (
  SELECT id, lock_key FROM {LOCK} WHERE is_lapsed = $1 AND expires_at = '-infinity'),
heirs AS MATERIALIZED (
  SELECT freed.id AS lock_id, freed.lock_key, heir.* FROM freed CROSS JOIN LATERAL (
    SELECT j.id, j.jid, j.queue, j.wid, j.attempt, j.permits, COUNT(*) OVER () AS rivals FROM {JOB} AS j
    WHERE j.lock_key = freed.lock_key AND j.state = (SELECT 'working')
      AND j.xmin = pg_current_xact_id()::xid AND j.lock_token IS NULL) AS heir
  WHERE heir.rivals = 1 AND heir.permits IS NULL),
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
  UPDATE {JOB} SET state = 'blocked', limiter = NULL WHERE id = ANY (ARRAY(
    SELECT sibling.id FROM heirs CROSS JOIN LATERAL ({_READY_SIBLINGS.format(key="heirs.lock_key")}) AS sibling)))
SELECT moved.jid, moved.id, heirs.queue FROM moved JOIN heirs USING (jid)""",
)

NEXT = Statement("next_of_keys", ["text[]"], f'WITH keys AS (SELECT {unnest(1)} COLLATE "C" AS key), {_NEXT}')
