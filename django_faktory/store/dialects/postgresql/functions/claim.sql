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

-- Draw new bounds of queues: the place of the first ready job of each part, if it has one (ADR 0046).
--
-- Gives no row unless they are due, a late transaction has ended, or this node has the turn to read one of the `wanted` queues
-- from its beginning, as one node does every 10 s. One row for each part with a priority; the snapshot is older than the one
-- that has found the job, and the xid and time are those of this transaction, which without pipelines is not that of the claim.
CREATE OR REPLACE FUNCTION faktory_bounds_1 (
  parts text[], ranks smallint[], bounds timestamptz[], late json, is_due boolean, wanted text[]
)
RETURNS TABLE (
  queue text, rank smallint, first_at timestamptz, seen text, xid bigint, began_at timestamptz, has_turn boolean
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  snapshot pg_snapshot := pg_current_snapshot();
  starts timestamptz[] := bounds;
  turns text[];
  taken text[];
BEGIN
  IF late IS NOT NULL THEN
    starts := faktory_starts_1(parts, bounds, late, snapshot);
  END IF;
  IF wanted <> '{}' THEN
    turns := ARRAY(SELECT 'read ' || hashtextextended(name, 0) FROM unnest(wanted) AS w (name) ORDER BY 1);
    INSERT INTO django_faktory_maintenanceturn (step, next_at, runner)
    SELECT step, 'epoch', '' FROM unnest(turns) AS t (step) ON CONFLICT (step) DO NOTHING;
    WITH mine AS (
      UPDATE django_faktory_maintenanceturn SET next_at = clock_timestamp() + interval '10 s' WHERE step = ANY (ARRAY(
        SELECT step FROM django_faktory_maintenanceturn
        WHERE step = ANY (turns) AND next_at <= clock_timestamp() FOR UPDATE SKIP LOCKED))
      RETURNING step)
    SELECT array_agg(step) INTO taken FROM mine;
    IF taken IS NOT NULL THEN
      starts := ARRAY(
        SELECT CASE WHEN 'read ' || hashtextextended(part.queue, 0) = ANY (taken) THEN '-infinity' ELSE part.start END
        FROM unnest(parts, starts) WITH ORDINALITY AS part (queue, start, place) ORDER BY place);
    END IF;
  END IF;
  IF starts <> bounds OR taken IS NOT NULL OR is_due THEN
    RETURN QUERY
    SELECT part.queue, part.rank, (
        SELECT enqueued_at FROM django_faktory_job
        WHERE state = 'enqueued' AND queue = part.queue AND sort_priority = part.rank AND enqueued_at >= part.start
        ORDER BY enqueued_at, id LIMIT 1),
      snapshot::text, pg_current_xact_id()::text::bigint, transaction_timestamp(),
      COALESCE('read ' || hashtextextended(part.queue, 0) = ANY (taken), FALSE)
    FROM unnest(parts, ranks, starts) AS part (queue, rank, start) WHERE part.rank >= -100;
  END IF;
END $$;

-- Count the jobs that a claim could take now, at most `at_most` of each queue, and find the workers that get none.
--
-- Rows: name and number for each queue, without those that a pause or a limiter closes (ADR 0016); and the quiet or terminating
-- ones of the workers. Without bitmap scans, which read each dead entry of the index again, and every job instead of `at_most`.
CREATE OR REPLACE FUNCTION faktory_waiting_1 (
  queues text[], at_most int, wids text[], moment timestamptz,
  parts text[], ranks smallint[], bounds timestamptz[], ends smallint[], late json  -- where to begin, see `faktory_starts_1`
)
RETURNS TABLE (name text, size bigint, is_wid boolean)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  clock timestamptz := COALESCE(moment, statement_timestamp());
  starts timestamptz[] := bounds;
BEGIN
  IF late IS NOT NULL THEN
    starts := faktory_starts_1(parts, bounds, late, pg_current_snapshot());
  END IF;
  RETURN QUERY
  SELECT q.name, (SELECT COUNT(*) FROM (
      SELECT 1 FROM unnest(parts, ranks, starts, ends) AS part (queue, rank, start, below)
      CROSS JOIN LATERAL (
        (SELECT FROM django_faktory_job
        WHERE is_returned AND queue = part.queue AND state = (SELECT 'enqueued') AND sort_priority = part.rank
          AND enqueued_at < part.start AND (expires_at IS NULL OR expires_at > clock) LIMIT at_most)
        UNION ALL
        (SELECT FROM django_faktory_job
        WHERE state = 'enqueued' AND queue = part.queue AND (sort_priority, enqueued_at) >= (part.rank, part.start)
          AND sort_priority < part.below AND (expires_at IS NULL OR expires_at > clock) LIMIT at_most)) AS found
      WHERE part.queue = q.name LIMIT at_most) AS ready),
    FALSE
  FROM unnest(queues) AS q (name)
  WHERE q.name <> ALL (ARRAY(SELECT name FROM faktory_closed_queues_1(clock) AS closed (name)))
  UNION ALL
  SELECT w.wid::text, 0, TRUE FROM django_faktory_workerprocess AS w WHERE w.wid = ANY (wids) AND w.state <> 'running';
END $$;

-- Where to begin to read each part of a queue: at its bound, or earlier if a transaction has ended that was open when the bound
-- was drawn, because its jobs lie behind the bound (ADR 0046).
--
-- A part is the jobs of a queue from a priority on up to the next part: ends has the first priority behind it. `late` lists
-- open transactions: a queue, an xid, and the time before which it has no jobs.
CREATE OR REPLACE FUNCTION faktory_starts_1 (
  parts text[], bounds timestamptz[], late json, seen pg_snapshot
)
RETURNS timestamptz[]
LANGUAGE plpgsql STABLE AS $$
BEGIN
  -- Not in the language SQL, in which a function that is not inlined is planned anew in each transaction.
  RETURN (
    SELECT array_agg(LEAST(part.bound, (
      SELECT MIN(l.since) FROM json_to_recordset(late) AS l (queue text, xid text, since timestamptz)
      WHERE l.queue = part.queue AND pg_visible_in_snapshot(l.xid::xid8, seen))) ORDER BY part.place)
    FROM unnest(parts, bounds) WITH ORDINALITY AS part (queue, bound, place));
END $$;
