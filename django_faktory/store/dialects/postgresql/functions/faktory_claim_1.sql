-- Claim jobs for a worker, with their locks and permits. No row is waited for.
--
-- Takes at most `maximum` jobs, and at most `rooms` of each of the `queues`, in their order, then by priority and age
-- (W13).
-- Rows: 'claimed', and those of `faktory_acquire_1`, which correct lock and permits of these jobs.
CREATE OR REPLACE FUNCTION faktory_claim_1 (
  queues text[], rooms int[], claimer text, maximum int, mark bigint, at_least_s float8, at_most_s float8,
  lock_lease_s float8, moment timestamptz, is_lazy boolean,
  parts text[], ranks smallint[], bounds timestamptz[], ends smallint[], late json  -- where to begin, see `faktory_starts_1`
)
RETURNS TABLE (
  kind text, place int, sort_priority smallint, id bigint, jid text, queue text, payload text, wid text, attempt bigint,
  created_at timestamptz, enqueued_at timestamptz, started_at timestamptz, failure text, history text,
  reserve_for int, result_ttl int, jobtype text, lock_key text, limit_key text, permits text, is_batchless boolean, lock_token bigint
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  clock timestamptz := COALESCE(moment, clock_timestamp());
  starts timestamptz[] := bounds;
BEGIN
  IF late IS NOT NULL THEN
    starts := faktory_starts_1(parts, bounds, late, pg_current_snapshot());
  END IF;
  IF is_lazy THEN
    -- If a crash of the database undoes a claim, the job runs again; its end flushes the claim to disk as well (ADR 0043).
    PERFORM set_config('synchronous_commit', 'off', TRUE);
  END IF;
  -- Walks the queues and their parts in order and no further than the maximum, so that exactly the claimed rows are locked.
  -- Behind a bound are only jobs that returned to an old place: they have an index of their own, and hide their state from the
  -- planner, which could choose the index of all ready jobs (ADR 0046). The ids
  -- pass through an array, which is computed once: for a join the planner would estimate a tenth of the waiting jobs.
  -- Without bitmap scans, which read the dead entries of a drained queue again at each claim.
  -- RETURN QUERY does not show its rows to the function, so jobs that need a lock or a permit note their ids in a setting:
  -- to select the jobs before would take 20 % more for each claim.
  RETURN QUERY
  UPDATE django_faktory_job AS j SET state = 'working', wid = claimer, attempt = GREATEST(j.attempt, j.id << 20) + 1,
    started_at = clock, run_at = NULL,
    reserved_until = clock + make_interval(secs => LEAST(GREATEST(j.reserve_for, at_least_s), at_most_s)),
    limiter = NULL, claim = mark, is_returned = FALSE,
    -- The token of its lock, which `faktory_acquire_1` inserts, or takes back.
    lock_token = CASE WHEN j.lock_key IS NOT NULL THEN nextval(pg_get_serial_sequence('django_faktory_joblock', 'id')) END,
    permits = CASE WHEN (j.limit_key IS NOT NULL
      OR j.jobtype = ANY (ARRAY(SELECT name FROM faktory_limited_names_1('task') AS limited (name)))
      OR j.queue = ANY (ARRAY(SELECT name FROM faktory_limited_names_1('queue') AS limited (name)))) THEN '' END,
    unique_key = CASE WHEN j.unique_until_start AND j.lock_key IS NULL AND NOT (j.limit_key IS NOT NULL
      OR j.jobtype = ANY (ARRAY(SELECT name FROM faktory_limited_names_1('task') AS limited (name)))
      OR j.queue = ANY (ARRAY(SELECT name FROM faktory_limited_names_1('queue') AS limited (name))))
      THEN NULL ELSE j.unique_key END
  WHERE j.id = ANY (ARRAY(
    SELECT ready.id FROM unnest(queues, rooms) AS slot (queue, room)
    CROSS JOIN LATERAL (
      SELECT found.id FROM unnest(parts, ranks, starts, ends) AS part (queue, rank, start, below)
      CROSS JOIN LATERAL (
        SELECT id FROM (
          SELECT id FROM django_faktory_job
          WHERE is_returned AND queue = part.queue AND state = (SELECT 'enqueued') AND sort_priority = part.rank
            AND enqueued_at < part.start AND (expires_at IS NULL OR expires_at > clock)
          ORDER BY enqueued_at, id LIMIT slot.room FOR UPDATE SKIP LOCKED) AS returned
        UNION ALL
        SELECT id FROM (
          SELECT id FROM django_faktory_job
          WHERE state = 'enqueued' AND queue = part.queue AND (sort_priority, enqueued_at) >= (part.rank, part.start)
            AND sort_priority < part.below AND (expires_at IS NULL OR expires_at > clock)
          ORDER BY sort_priority, enqueued_at, id LIMIT slot.room FOR UPDATE SKIP LOCKED) AS others) AS found
      WHERE part.queue = slot.queue LIMIT slot.room) AS ready
    WHERE slot.queue <> ALL (ARRAY(SELECT name FROM faktory_closed_queues_1(clock) AS closed (name)))
      AND NOT EXISTS (SELECT FROM django_faktory_workerprocess WHERE wid = claimer AND state <> 'running')
    LIMIT maximum))
  RETURNING CASE WHEN j.lock_key IS NULL AND j.permits IS NULL THEN 'claimed'
      ELSE left(set_config('faktory.noted',
        COALESCE(current_setting('faktory.noted', TRUE), '') || ',' || j.id, TRUE), 0) || 'claimed' END,
    array_position(queues, j.queue::text), j.sort_priority, j.id, j.jid::text, j.queue::text, j.payload, j.wid::text,
    j.attempt, j.created_at, j.enqueued_at, j.started_at, j.failure, j.history, j.reserve_for, j.result_ttl,
    j.jobtype::text, j.lock_key::text, j.limit_key::text, j.permits::text, j.bid IS NULL AND j.callback_of IS NULL,
    j.lock_token;
  IF COALESCE(current_setting('faktory.noted', TRUE), '') <> '' THEN
    RETURN QUERY
    SELECT a.kind, NULL::int, NULL::smallint, NULL::bigint, a.jid, NULL, NULL, NULL, NULL::bigint, NULL::timestamptz,
      NULL::timestamptz, NULL::timestamptz, NULL, NULL, NULL::int, NULL::int, NULL, NULL, NULL, a.permits, NULL::boolean,
      a.token
    FROM faktory_acquire_1(ARRAY(
      SELECT j.id FROM unnest(string_to_array(substr(current_setting('faktory.noted'), 2), ',')::bigint[]) AS p (id)
      CROSS JOIN LATERAL (
        SELECT id, queue, sort_priority, enqueued_at FROM django_faktory_job WHERE id = p.id OFFSET 0) AS j
      ORDER BY array_position(queues, j.queue::text), j.sort_priority, j.enqueued_at, j.id), lock_lease_s, clock) AS a;
    PERFORM set_config('faktory.noted', '', TRUE);
  END IF;
END $$;
