-- Prefetch jobs for later FETCHes of a server: they are claimed without a worker (ADR 0026). No row is waited for.
--
-- Takes at most `rooms` jobs of each of the `queues`; none if one of the `candidates`, who may get them, must get no jobs.
-- Stops in each queue at the first job that must not wait in the buffer: one that would hold a lock, a permit or a key
-- meanwhile, that expires before its lease ends, or whose priority would change the order. Rows as of `faktory_claim_1`.
CREATE OR REPLACE FUNCTION faktory_prefetch_1 (
  queues text[], rooms int[], mark bigint, lease_s float8, candidates text[], moment timestamptz,
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
  RETURN QUERY
  UPDATE django_faktory_job AS j SET state = 'working', wid = '', attempt = GREATEST(j.attempt, j.id << 20) + 1,
    started_at = clock, run_at = NULL,
    reserved_until = clock + make_interval(secs => lease_s), limiter = NULL, claim = mark, is_returned = FALSE
  WHERE j.id = ANY (ARRAY(
    SELECT line.id FROM (
      SELECT ready.id, bool_and(
          ready.sort_priority = 0 AND ready.lock_key IS NULL AND ready.limit_key IS NULL
          AND ready.jobtype <> ALL (ARRAY(SELECT name FROM faktory_limited_names_1('task') AS limited (name)))
          AND ready.queue <> ALL (ARRAY(SELECT name FROM faktory_limited_names_1('queue') AS limited (name)))
          AND NOT ready.unique_until_start
          AND (ready.expires_at IS NULL OR ready.expires_at > clock + make_interval(secs => lease_s))
        ) OVER (PARTITION BY slot.queue ORDER BY ready.sort_priority, ready.enqueued_at, ready.id) AS goes
      FROM unnest(queues, rooms) AS slot (queue, room)
      CROSS JOIN LATERAL (
        SELECT found.* FROM unnest(parts, ranks, starts, ends) AS part (queue, rank, start, below)
        CROSS JOIN LATERAL (
          SELECT * FROM (
            SELECT id, sort_priority, enqueued_at, queue, jobtype, lock_key, limit_key, unique_until_start, expires_at
            FROM django_faktory_job
            WHERE is_returned AND queue = part.queue AND state = (SELECT 'enqueued') AND sort_priority = part.rank
              AND enqueued_at < part.start AND (expires_at IS NULL OR expires_at > clock)
            ORDER BY enqueued_at, id LIMIT slot.room FOR UPDATE SKIP LOCKED) AS returned
          UNION ALL
          SELECT * FROM (
            SELECT id, sort_priority, enqueued_at, queue, jobtype, lock_key, limit_key, unique_until_start, expires_at
            FROM django_faktory_job
            WHERE state = 'enqueued' AND queue = part.queue AND (sort_priority, enqueued_at) >= (part.rank, part.start)
              AND sort_priority < part.below AND (expires_at IS NULL OR expires_at > clock)
            ORDER BY sort_priority, enqueued_at, id LIMIT slot.room FOR UPDATE SKIP LOCKED) AS others) AS found
        WHERE part.queue = slot.queue LIMIT slot.room) AS ready
      WHERE slot.queue <> ALL (ARRAY(SELECT name FROM faktory_closed_queues_1(clock) AS closed (name)))
        AND NOT EXISTS (SELECT FROM django_faktory_workerprocess WHERE wid = ANY (candidates) AND state <> 'running')
    ) AS line
    WHERE line.goes))
  RETURNING 'prefetched', array_position(queues, j.queue::text), j.sort_priority, j.id, j.jid::text, j.queue::text,
    j.payload, j.wid::text, j.attempt, j.created_at, j.enqueued_at, j.started_at, j.failure, j.history, j.reserve_for,
    j.result_ttl, j.jobtype::text, j.lock_key::text, j.limit_key::text, j.permits::text,
    j.bid IS NULL AND j.callback_of IS NULL, NULL::bigint;
END $$;
