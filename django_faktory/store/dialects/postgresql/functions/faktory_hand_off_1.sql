-- End a job that held a lock and claim the next job of its key, with the lock (ADR 0015).
--
-- Only for the usual case of a hot key: the next job waits for this lock alone, and a claim would return it now. Otherwise it
-- does nothing, and the caller ends and claims as usual. The key is never free in between, so one statement suffices: a job
-- that was pushed meanwhile waits for the new holder. On a hot key this statement, and not the wait for the disk, takes most
-- of a job's time: `faktory_end_1` and `faktory_claim_1` take 1.45 of it, because the next job is written twice.
--
-- The first columns describe the ended job, the others the claimed one, as those of `faktory_claim_1`.
CREATE OR REPLACE FUNCTION faktory_hand_off_1 (
  ended text, holder text, held_attempt bigint, outcome text, queues text[], claimer text, mark bigint, own_slot bigint,
  at_least_s float8, at_most_s float8, lease_s float8, moment timestamptz
)
RETURNS TABLE (
  is_all boolean, ended_wid text, ended_attempt bigint, ended_queue text, ended_jobtype text, began_at timestamptz,
  ended_at timestamptz, kind text, place int, sort_priority smallint, id bigint, jid text, queue text, payload text, wid text,
  attempt bigint, created_at timestamptz, enqueued_at timestamptz, started_at timestamptz, failure text, history text,
  reserve_for int, result_ttl int, jobtype text, lock_key text, limit_key text, permits text, is_batchless boolean,
  lock_token bigint
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  clock timestamptz := COALESCE(moment, clock_timestamp());
BEGIN
  -- The holder's row is locked, then its lock, as all transactions do (ADR 0024); the next job's row only if it is not locked.
  -- Lookups by key hide the state from the planner, see `faktory_ready_next_1`. The token is drawn before the writes: no part
  -- of a statement sees what another part has written, and both the job and the lock row get it.
  RETURN QUERY
  WITH held AS MATERIALIZED (
    SELECT j.* FROM (
      SELECT id, wid, attempt, result_ttl, state, bid, callback_of, lock_token, permits, queue, jobtype, started_at
      FROM django_faktory_job WHERE jid = ended FOR UPDATE) AS j
    WHERE j.state = 'working' AND (holder = '' OR j.wid = '' OR j.wid = holder)
      AND (held_attempt IS NULL OR j.attempt = held_attempt)
      AND j.bid IS NULL AND j.callback_of IS NULL AND j.permits IS NULL),
  mine AS MATERIALIZED (
    SELECT id, lock_key FROM django_faktory_joblock WHERE id = (SELECT lock_token FROM held) FOR UPDATE),
  open AS MATERIALIZED (
    SELECT slot.queue, slot.place FROM unnest(queues) WITH ORDINALITY AS slot (queue, place)
    WHERE slot.queue <> ALL (ARRAY(SELECT name FROM faktory_closed_queues_1(clock) AS closed (name)))),
  next AS MATERIALIZED (
    SELECT open.place, j.* FROM open CROSS JOIN LATERAL (
      SELECT id, jobtype, queue, sort_priority, enqueued_at, expires_at, limiter, limit_key FROM django_faktory_job
      WHERE lock_key = (SELECT lock_key FROM mine) AND state = (SELECT 'blocked') AND queue = open.queue
      ORDER BY sort_priority, enqueued_at, id LIMIT 1 FOR UPDATE SKIP LOCKED) AS j
    ORDER BY open.place LIMIT 1),
  heir AS MATERIALIZED (
    SELECT j.id FROM next AS j
    WHERE j.limiter IS NULL AND j.limit_key IS NULL AND (j.expires_at IS NULL OR j.expires_at > clock)
      AND j.jobtype <> ALL (ARRAY(SELECT name FROM faktory_limited_names_1('task') AS limited (name)))
      AND j.queue <> ALL (ARRAY(SELECT name FROM faktory_limited_names_1('queue') AS limited (name)))
      AND NOT EXISTS (SELECT FROM django_faktory_workerprocess WHERE wid = claimer AND state <> 'running')
      AND NOT EXISTS (
        SELECT FROM open CROSS JOIN LATERAL (
          SELECT sort_priority, enqueued_at, id FROM django_faktory_job
          WHERE state = 'enqueued' AND queue = open.queue AND (expires_at IS NULL OR expires_at > clock)
          ORDER BY sort_priority, enqueued_at, id LIMIT 1) AS ready
        WHERE open.place <= j.place AND (open.place, ready.sort_priority, ready.enqueued_at, ready.id)
          < (j.place, j.sort_priority, j.enqueued_at, j.id))),
  gone AS (
    DELETE FROM django_faktory_job WHERE id = (SELECT held.id FROM held, heir WHERE held.result_ttl IS NULL)),
  kept AS MATERIALIZED (
    SELECT faktory_keep_1(ARRAY[held.id], ARRAY[outcome], clock) FROM held, heir WHERE held.result_ttl IS NOT NULL),
  token AS MATERIALIZED (
    SELECT nextval(pg_get_serial_sequence('django_faktory_joblock', 'id')) AS id FROM heir),
  taken AS (
    UPDATE django_faktory_job AS j SET state = 'working', wid = claimer, attempt = GREATEST(j.attempt, j.id << 20) + 1,
      started_at = clock, run_at = NULL,
      reserved_until = clock + make_interval(secs => LEAST(GREATEST(j.reserve_for, at_least_s), at_most_s)),
      claim = mark, lock_token = token.id, unique_key = CASE WHEN j.unique_until_start THEN NULL ELSE j.unique_key END
    FROM token WHERE j.id = (SELECT id FROM heir)
    RETURNING j.*),
  moved AS (
    UPDATE django_faktory_joblock AS l SET id = token.id, jid = taken.jid, attempt = taken.attempt, wid = claimer,
      lease = make_interval(secs => lease_s), acquired_at = clock, expires_at = clock + make_interval(secs => lease_s),
      is_lapsed = FALSE
    FROM taken, token WHERE l.id = (SELECT id FROM mine)),
  counted AS (
    INSERT INTO django_faktory_counter AS c (day, slot, processed, failed, late)
    SELECT (clock AT TIME ZONE 'UTC')::date, own_slot, 1, 0, 0 FROM heir
    ON CONFLICT (day, slot) DO UPDATE SET processed = c.processed + excluded.processed)
  SELECT NOT EXISTS (
      SELECT FROM unnest(queues) AS q (name) CROSS JOIN LATERAL (
        SELECT FROM django_faktory_job WHERE state = 'enqueued' AND queue = q.name LIMIT 1) AS ready),
    held.wid::text, held.attempt, held.queue::text, held.jobtype::text, held.started_at, clock,
    'claimed', 1, j.sort_priority, j.id, j.jid::text, j.queue::text, j.payload, j.wid::text, j.attempt, j.created_at,
    j.enqueued_at, j.started_at, j.failure, j.history, j.reserve_for, j.result_ttl, j.jobtype::text, j.lock_key::text,
    j.limit_key::text, j.permits::text, j.bid IS NULL AND j.callback_of IS NULL, j.lock_token
  FROM held CROSS JOIN taken AS j LEFT JOIN kept ON TRUE;
END $$;
