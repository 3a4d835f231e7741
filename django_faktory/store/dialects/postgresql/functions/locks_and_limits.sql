-- Acquire the locks and permits of jobs that this transaction has claimed, in the order of `ids`.
--
-- Never waits: a claim may follow ends and pushes in its transaction, and would wait against the order of locks (ADR 0024).
-- A job that cannot have what it needs now keeps no token, and empty permits. The caller acquires what it lacks in a
-- transaction of its own (`store.jobs.acquire`), which also decides which jobs are blocked. Rows: the jobs whose claimed row
-- has changed, with their token and permits.
CREATE OR REPLACE FUNCTION faktory_acquire_1 (
  ids bigint[], lease_s float8, clock timestamptz
)
RETURNS TABLE (kind text, jid text, token bigint, permits text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  job record;
  has_siblings boolean := FALSE;
  ends_unique boolean := FALSE;
  is_limited boolean := FALSE;
  lost bigint[];          -- jobs without a lock
  keys text[];            -- keys that were locked
  places int[];
  limiters bigint[];
  is_refused boolean := FALSE;
  texts text[];
BEGIN
  -- By key: of several jobs of one key, the first gets the lock. The states are compared with a sub-select: with a literal, the
  -- planner chooses the index of that state, and reads the ready jobs of all keys.
  FOR job IN
    SELECT j.*, l.id AS old_token, l.expires_at <= clock AS is_over,
      j.lock_key IS NOT NULL AND (
        SELECT s.id FROM django_faktory_job AS s WHERE s.lock_key = j.lock_key AND s.state = (SELECT 'enqueued') LIMIT 1
      ) IS NOT NULL AS has_sibling,
      -- An INSERT would wait for another transaction that inserts the same key: all of them take this advisory lock before.
      j.lock_key IS NULL OR pg_try_advisory_xact_lock(hashtextextended(j.lock_key, 0)) AS is_mine
    FROM unnest(ids) WITH ORDINALITY AS i (id, place)
    CROSS JOIN LATERAL (
      SELECT id, lock_key, lock_token, jid, attempt, wid, permits, unique_until_start FROM django_faktory_job
      WHERE id = i.id OFFSET 0) AS j
    LEFT JOIN LATERAL (
      SELECT id, expires_at FROM django_faktory_joblock WHERE lock_key = j.lock_key OFFSET 0) AS l ON TRUE
    ORDER BY j.lock_key, i.place
  LOOP
    is_limited := is_limited OR job.permits IS NOT NULL;
    CONTINUE WHEN job.lock_key IS NULL;
    IF job.is_mine AND job.is_over THEN
      -- An expired lock is taken over with a new token, unless its worker is extending it.
      DELETE FROM django_faktory_joblock WHERE id = (
        SELECT id FROM django_faktory_joblock WHERE id = job.old_token AND expires_at <= clock FOR UPDATE SKIP LOCKED);
      job.is_mine := FOUND;
    ELSE
      -- With a row it is held, or another transaction is releasing it.
      job.is_mine := job.is_mine AND job.old_token IS NULL;
    END IF;
    IF job.is_mine THEN
      INSERT INTO django_faktory_joblock (id, lock_key, jid, attempt, wid, lease, acquired_at, expires_at, is_lapsed)
      VALUES (job.lock_token, job.lock_key, job.jid, job.attempt, job.wid, make_interval(secs => lease_s), clock,
        clock + make_interval(secs => lease_s), FALSE)
      ON CONFLICT DO NOTHING;
    END IF;
    IF job.is_mine AND FOUND THEN
      keys := keys || job.lock_key::text;
      has_siblings := has_siblings OR job.has_sibling;
      ends_unique := ends_unique OR job.unique_until_start;
    ELSE
      lost := lost || job.id;
    END IF;
  END LOOP;

  IF is_limited THEN
    SELECT array_agg(i.place), array_agg(l.id), COALESCE(bool_or(l.id IS NULL), FALSE) INTO places, limiters, is_refused
    FROM unnest(ids) WITH ORDINALITY AS i (id, place)
    CROSS JOIN LATERAL (
      SELECT jobtype, queue, limit_key FROM django_faktory_job WHERE id = i.id AND permits IS NOT NULL OFFSET 0) AS j
    CROSS JOIN LATERAL (VALUES ('task', j.jobtype), ('queue', j.queue), ('key', j.limit_key)) AS n (scope, name)
    LEFT JOIN LATERAL (SELECT id FROM django_faktory_limiter WHERE scope = n.scope AND name = n.name OFFSET 0) AS l ON TRUE
    -- A key with a limit and without a limiter: Python creates it, and counts the jobs that run already.
    WHERE i.id <> ALL (COALESCE(lost, '{}')) AND (l.id IS NOT NULL OR n.scope = 'key' AND EXISTS (
      SELECT FROM django_faktory_limit WHERE scope = 'key' AND name IN (n.name, split_part(n.name, ':', 1))));

    IF places IS NOT NULL AND NOT is_refused THEN
      -- The usual case: all limiters have room for all of these jobs, and no job waits for them. Otherwise Python decides.
      -- 0.4: the seconds whose tokens are saved (`core.limits.SAVED_S`).
      WITH need AS MATERIALIZED (SELECT id, COUNT(*) AS jobs FROM unnest(limiters) AS n (id) GROUP BY id),
      filled AS MATERIALIZED (
        SELECT l.id, l.rate, need.jobs, l.is_paused OR l.opens_at IS NOT NULL OR l.in_use + need.jobs > l.concurrency AS is_full,
          CASE WHEN l.rate IS NULL THEN l.tokens ELSE LEAST(
            l.tokens + GREATEST(EXTRACT(EPOCH FROM clock - l.filled_at)::float8, 0) * l.rate / l.per,
            GREATEST(COALESCE(l.burst, 1), l.tokens, CASE WHEN l.burst IS NULL THEN 0.4 * l.rate / l.per END)) END AS tokens
        FROM need CROSS JOIN LATERAL (
          SELECT id, concurrency, rate, per, burst, is_paused, in_use, tokens, filled_at, opens_at
          FROM django_faktory_limiter WHERE id = need.id FOR UPDATE SKIP LOCKED OFFSET 0) AS l)
      UPDATE django_faktory_limiter AS g SET in_use = g.in_use + CASE WHEN g.concurrency IS NULL THEN 0 ELSE filled.jobs END,
        tokens = CASE WHEN g.rate IS NULL THEN g.tokens ELSE filled.tokens - filled.jobs END,
        filled_at = GREATEST(g.filled_at, clock)
      FROM filled WHERE g.id = ANY (ARRAY(SELECT id FROM filled)) AND g.id = filled.id AND (SELECT COUNT(*) FROM need) = (
        SELECT COUNT(*) FROM filled WHERE is_full IS NOT TRUE AND (rate IS NULL OR tokens >= jobs));
      is_refused := NOT FOUND;
    END IF;
    IF places IS NOT NULL THEN
      texts := ARRAY(
        SELECT CASE WHEN i.place = ANY (places) THEN CASE WHEN is_refused THEN '' ELSE (
          SELECT ',' || string_agg(l.id::text, ',' ORDER BY l.id) || ','
          FROM unnest(places, limiters) AS asked (place, id)
          CROSS JOIN LATERAL (SELECT id, concurrency FROM django_faktory_limiter WHERE id = asked.id OFFSET 0) AS l
          WHERE asked.place = i.place AND l.concurrency IS NOT NULL) END END
        FROM unnest(ids) WITH ORDINALITY AS i (id, place) ORDER BY i.place);
    END IF;
    IF is_refused THEN
      -- No job keeps a lock while it waits for a permit.
      lost := lost || ARRAY(SELECT ids[place] FROM unnest(places) AS p (place));
      DELETE FROM django_faktory_joblock WHERE id = ANY (ARRAY(
        SELECT j.lock_token FROM unnest(places) AS p (place) CROSS JOIN LATERAL (
          SELECT lock_token FROM django_faktory_job WHERE id = ids[p.place] OFFSET 0) AS j));
    END IF;
    RETURN QUERY
    UPDATE django_faktory_job AS j SET permits = texts[array_position(ids, j.id)],
      unique_key = CASE WHEN j.unique_until_start THEN NULL ELSE j.unique_key END
    WHERE j.id = ANY (ids) AND j.id <> ALL (COALESCE(lost, '{}')) AND texts[array_position(ids, j.id)] IS DISTINCT FROM ''
      AND j.permits IS NOT NULL
    RETURNING 'acquired', j.jid::text, j.lock_token, j.permits::text;
  END IF;
  IF lost IS NOT NULL THEN
    RETURN QUERY
    UPDATE django_faktory_job AS j SET lock_token = NULL WHERE j.id = ANY (lost)
    RETURNING 'acquired', j.jid::text, j.lock_token, j.permits::text;
  END IF;
  IF ends_unique THEN
    -- A key that ends at the start was kept until here.
    UPDATE django_faktory_job SET unique_key = NULL
    WHERE id = ANY (ids) AND unique_until_start AND unique_key IS NOT NULL AND lock_token IS NOT NULL AND permits IS NULL;
  END IF;
  IF has_siblings THEN
    -- From now on the releases of these locks make the other jobs of their keys ready (ADR 0015).
    UPDATE django_faktory_job SET state = 'blocked', limiter = NULL WHERE id = ANY (ARRAY(
      SELECT sibling.id FROM unnest(keys) AS k (key) CROSS JOIN LATERAL (
        SELECT j.id FROM django_faktory_job AS j WHERE j.lock_key = k.key COLLATE "C" AND j.state = (SELECT 'enqueued')
        ORDER BY j.queue, j.sort_priority, j.enqueued_at, j.id LIMIT 500 FOR UPDATE SKIP LOCKED) AS sibling));
  END IF;
END $$;

-- Return permits of ended runs to their limiters, and make jobs ready that wait for one (ADR 0016).
--
-- `permits` has the texts of the jobs' columns. Rows: 'ready' with queue and jid of a job that became ready, or with a
-- queue that is open again; 'limiter' with the id of one that Python has to look at after the commit, because jobs wait
-- for its rate, or one of them was locked.
CREATE OR REPLACE FUNCTION faktory_free_permits_1 (
  permits text[]
)
RETURNS TABLE (kind text, name text, jid text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  freed record;
  limiter record;
  room int;
  place text;
  ids bigint[];
  looked_at int;
  is_awaited_still boolean;
  has_skipped boolean;
BEGIN
  -- By id, as all transactions lock limiters (ADR 0024).
  FOR freed IN
    SELECT p.id::bigint AS id, COUNT(*) AS jobs FROM unnest(permits) AS texts (text)
    CROSS JOIN LATERAL unnest(string_to_array(btrim(texts.text, ','), ',')) AS p (id)
    GROUP BY 1 ORDER BY 1
  LOOP
    -- Never negative, even if rows were changed by hand: a sweep corrects the count.
    UPDATE django_faktory_limiter AS g SET in_use = GREATEST(g.in_use - freed.jobs, 0) WHERE g.id = freed.id
    RETURNING g.scope, g.name, g.concurrency, g.rate, g.is_paused, g.in_use, g.is_awaited INTO limiter;
    CONTINUE WHEN NOT FOUND;
    room := limiter.concurrency - limiter.in_use;
    IF limiter.scope = 'queue' THEN
      -- The jobs of a full queue are not blocked, claims skip them: waiting FETCHes need a notification.
      IF room > 0 AND room <= freed.jobs THEN
        kind := 'ready'; name := limiter.name;
        RETURN NEXT;
      END IF;
    ELSIF limiter.is_awaited AND (limiter.rate IS NOT NULL OR limiter.is_paused) THEN
      kind := 'limiter'; name := freed.id::text;
      RETURN NEXT;
    ELSIF limiter.is_awaited AND room > 0 THEN
      is_awaited_still := FALSE;
      has_skipped := FALSE;
      place := '';
      -- The room is that of each queue: a queue without workers must not keep the jobs of other queues blocked.
      LOOP
        SELECT j.queue INTO place FROM django_faktory_job AS j WHERE j.limiter = freed.id AND j.queue > place
        ORDER BY j.queue LIMIT 1;
        EXIT WHEN NOT FOUND;
        -- Jobs that became ready before and are not claimed yet take some of the room. Locked rows are skipped.
        SELECT array_agg(j.id) FILTER (WHERE j.state = 'blocked'), COUNT(*) INTO ids, looked_at FROM (
          SELECT j.id, j.state FROM django_faktory_job AS j WHERE j.limiter = freed.id AND j.queue = place
          ORDER BY j.sort_priority, j.enqueued_at, j.id LIMIT LEAST(room, 500) FOR UPDATE SKIP LOCKED) AS j;
        IF ids IS NOT NULL THEN
          RETURN QUERY
          UPDATE django_faktory_job AS j SET state = 'enqueued', is_returned = TRUE WHERE j.id = ANY (ids)
          RETURNING 'ready', j.queue::text, j.jid::text;
        END IF;
        PERFORM FROM django_faktory_job AS j
        WHERE j.limiter = freed.id AND j.queue = place AND j.state = (SELECT 'blocked') LIMIT 1;
        IF FOUND THEN
          is_awaited_still := TRUE;
          has_skipped := has_skipped OR looked_at < LEAST(room, 500);
        END IF;
      END LOOP;
      UPDATE django_faktory_limiter SET is_awaited = FALSE WHERE id = freed.id AND NOT is_awaited_still;
      IF has_skipped THEN
        kind := 'limiter'; name := freed.id::text;
        RETURN NEXT;
      END IF;
    END IF;
  END LOOP;
END $$;

-- Delete the rows of locks, and make the next jobs of their keys ready (ADR 0015). Rows as of `faktory_ready_next_1`.
-- With the settings of `faktory_end_1`, as `faktory_free_permits_1`.
CREATE OR REPLACE FUNCTION faktory_free_locks_1 (
  tokens bigint[]
)
RETURNS TABLE (kind text, name text, jid text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  lock record;
  keys text[];
BEGIN
  -- One by one, by key: a DELETE of several rows would lock them in the order in which it finds them (ADR 0024).
  FOR lock IN
    SELECT l.id, l.lock_key FROM unnest(tokens) AS t (id)
    CROSS JOIN LATERAL (SELECT id, lock_key FROM django_faktory_joblock WHERE id = t.id OFFSET 0) AS l ORDER BY l.lock_key
  LOOP
    DELETE FROM django_faktory_joblock WHERE id = lock.id;
    IF FOUND THEN
      keys := keys || lock.lock_key::text;
    END IF;
  END LOOP;
  -- A statement of its own: its snapshot shows each job that was blocked by these locks until they were deleted.
  IF keys IS NOT NULL THEN
    RETURN QUERY SELECT * FROM faktory_ready_next_1(keys);
  END IF;
END $$;

-- Make the first blocked job of each key, queue and priority ready, unless one is ready already (ADR 0015).
--
-- A job that waits for a permit keeps its place: the jobs of its key wait behind it (ADR 0016). Lock rows may be locked
-- while this runs, so a locked job is skipped (ADR 0024). Rows: 'ready' with queue and jid of a job, 'key'
-- with a skipped key.
CREATE OR REPLACE FUNCTION faktory_ready_next_1 (
  keys text[]
)
RETURNS TABLE (kind text, name text, jid text)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  wanted_key text;
  first_id bigint;
  place text;
  rank int;
  is_behind boolean;
BEGIN
  FOREACH wanted_key IN ARRAY keys LOOP
    -- The lowest priority of a job is -100. Each step is one look into the index by key. The states are compared with
    -- sub-selects: with literals, the planner chooses the index of that state, which has the jobs of all keys.
    place := '';
    rank := -101;
    LOOP
      SELECT j.id, j.queue, j.sort_priority, j.limiter IS NOT NULL OR (
          SELECT ready.id FROM django_faktory_job AS ready
          WHERE ready.lock_key = wanted_key AND ready.state = (SELECT 'enqueued')
            AND ready.queue = j.queue AND ready.sort_priority = j.sort_priority LIMIT 1) IS NOT NULL
      INTO first_id, place, rank, is_behind FROM django_faktory_job AS j
      WHERE j.lock_key = wanted_key AND j.state = (SELECT 'blocked')
        AND (j.queue, j.sort_priority) > (place, rank)
      ORDER BY j.queue, j.sort_priority, j.enqueued_at, j.id LIMIT 1;
      EXIT WHEN NOT FOUND;
      CONTINUE WHEN is_behind;
      RETURN QUERY
      UPDATE django_faktory_job AS j SET state = 'enqueued', is_returned = TRUE WHERE j.id = (
        SELECT j.id FROM django_faktory_job AS j
        WHERE j.id = first_id AND j.state = (SELECT 'blocked') AND j.limiter IS NULL FOR UPDATE SKIP LOCKED)
      RETURNING 'ready', j.queue::text, j.jid::text;
      IF NOT FOUND THEN
        kind := 'key'; name := wanted_key;
        RETURN NEXT;
      END IF;
    END LOOP;
  END LOOP;
END $$;

-- Queues from which no job may be claimed now: paused ones, and those whose limiter has no room.
--
-- One statement of LANGUAGE sql and STABLE: the planner puts it in the place of the call.
CREATE OR REPLACE FUNCTION faktory_closed_queues_1 (
  clock timestamptz
)
RETURNS SETOF text
LANGUAGE sql STABLE AS $$
  SELECT name::text FROM django_faktory_queue WHERE paused_at IS NOT NULL
  UNION ALL
  SELECT name::text FROM django_faktory_limiter
  WHERE scope = 'queue' AND (is_paused OR in_use >= concurrency OR opens_at > clock)
$$;

-- Names of the tasks or queues (`kind`: 'task' or 'queue') whose jobs need a permit. Inlined as `faktory_closed_queues_1`.
CREATE OR REPLACE FUNCTION faktory_limited_names_1 (
  kind text
)
RETURNS SETOF text
LANGUAGE sql STABLE AS $$
  SELECT name::text FROM django_faktory_limit WHERE scope = kind
$$;
