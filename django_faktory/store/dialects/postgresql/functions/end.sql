-- End jobs successfully: delete each row, and keep it in the history for its `result_ttl` (ADR 0048). Locks and permits are released in
-- the same transaction, and what waits for them becomes ready.
--
-- `reports` is a JSON array of jid, wid, attempt and result; reports of others than the holder are counted as late. The rows
-- with the jids in `pushed`, which this transaction is about to insert, are locked too: all rows in one order (ADR 0024).
-- Rows: 'ended'; 'member' for a job of a batch, which is left unchanged; and those of `faktory_free_locks_1` and
-- `faktory_free_permits_1`, with the name in the column `queue`. With `is_last`, the reports must end all their jobs:
-- otherwise the function fails, so that the COMMIT behind it in the same message has no effect (ADR 0007).
CREATE OR REPLACE FUNCTION faktory_end_1 (
  reports json, reported int, pushed text[], moment timestamptz, is_last boolean
)
RETURNS TABLE (
  kind text, jid text, wid text, attempt bigint, queue text, jobtype text, started_at timestamptz, ended_at timestamptz
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  ended int;
  more int;
  gone bigint[];
  kept bigint[];
  results text[];
  members bigint[];
  tokens bigint[];
  permits text[];
  clock timestamptz;
BEGIN
  -- Jobs without permits and batches. Rows are found by jid alone, and their state is checked once they are locked: with
  -- the state in the lookup, the planner takes the partial index of working jobs, and walks over every job of the last
  -- minute. They are locked by a sub-select for each id, in the order of the ids: an ORDER BY beside FOR UPDATE lets the
  -- planner walk over the whole table in that order, with a plan that it made while the table was small. For the same
  -- reason rows are written by an array of their ids: `j.id = held.id` alone was a walk over all jobs at each end.
  RETURN QUERY
  WITH asked AS MATERIALIZED (
    SELECT * FROM json_to_recordset(reports) AS r (jid text COLLATE "C", wid text COLLATE "C", attempt bigint, result text)),
  locked AS MATERIALIZED (
    SELECT j.* FROM unnest(ARRAY(
      SELECT stored.id FROM (
        SELECT id FROM django_faktory_job WHERE jid = ANY (ARRAY(SELECT jid FROM asked) || pushed) OFFSET 0) AS stored
      ORDER BY stored.id)) AS wanted (id)
    CROSS JOIN LATERAL (
      SELECT id, jid, state, wid, attempt, result_ttl, queue, jobtype, started_at,
        lock_token, bid IS NULL AND callback_of IS NULL AND permits IS NULL AS is_plain
      FROM django_faktory_job WHERE id = wanted.id FOR UPDATE OFFSET 0) AS j),
  held AS MATERIALIZED (
    SELECT DISTINCT ON (j.id) j.id, j.jid, j.wid, j.attempt, j.result_ttl, j.queue, j.jobtype, j.started_at, j.lock_token,
      r.result, COALESCE(moment, clock_timestamp()) AS now
    FROM asked AS r JOIN locked AS j USING (jid)
    WHERE j.is_plain AND j.state = 'working' AND (r.wid = '' OR j.wid = '' OR j.wid = r.wid)
      AND (r.attempt IS NULL OR r.attempt = j.attempt)),
  gone AS (
    DELETE FROM django_faktory_job AS j WHERE j.id = ANY (ARRAY(SELECT id FROM held)) RETURNING j.*),
  today AS MATERIALIZED (
    SELECT day FROM (SELECT MAX(now) AS now FROM held) AS latest CROSS JOIN LATERAL faktory_day_1(latest.now) AS found (day)),
  -- As in `faktory_keep_1`; its call takes 10 % more time for a job with a result.
  kept AS (
    INSERT INTO django_faktory_history (id, state, result, finished_at, purge_at, day, jid, jobtype, queue, sort_priority, payload, retry, reserve_for,
      backtrace, result_ttl, created_at, enqueued_at, started_at, failed_at, wid, attempt, failures, losses, interruptions,
      errtype, failure, history, expires_at, unique_expires_at, unique_until_start, lock_key, limit_key, bid, callback_of,
      has_run, counts_failed, claim, about, cancel_requested_at)
    SELECT j.id, 'succeeded', held.result, held.now, held.now + make_interval(secs => j.result_ttl), (SELECT day FROM today),
      j.jid, j.jobtype, j.queue, j.sort_priority, j.payload, j.retry, j.reserve_for, j.backtrace, j.result_ttl,
      j.created_at, j.enqueued_at, j.started_at, j.failed_at, j.wid, j.attempt, j.failures, j.losses, j.interruptions,
      j.errtype, j.failure, j.history, j.expires_at, j.unique_expires_at, j.unique_until_start, j.lock_key, j.limit_key,
      j.bid, j.callback_of, j.has_run, j.counts_failed, j.claim, j.about, j.cancel_requested_at
    FROM gone AS j JOIN held ON held.id = j.id WHERE j.result_ttl IS NOT NULL)
  SELECT CASE WHEN lock_token IS NULL THEN 'ended' ELSE left(set_config('faktory.noted', COALESCE(
      current_setting('faktory.noted', TRUE), '') || ',' || lock_token, TRUE), 0) || 'ended' END,
    jid::text, wid::text, attempt, queue::text, jobtype::text, started_at, now
  FROM held;
  GET DIAGNOSTICS ended = ROW_COUNT;
  -- RETURN QUERY does not show its rows to the function: they have noted the locks that they held.
  IF COALESCE(current_setting('faktory.noted', TRUE), '') <> '' THEN
    tokens := string_to_array(substr(current_setting('faktory.noted'), 2), ',');
    PERFORM set_config('faktory.noted', '', TRUE);
  END IF;

  clock := COALESCE(moment, clock_timestamp());
  -- Jobs that hold permits, and members of batches; their rows are locked already.
  IF ended < reported THEN
    SELECT array_agg(id) FILTER (WHERE result_ttl IS NULL AND NOT is_member),
      array_agg(id) FILTER (WHERE result_ttl IS NOT NULL AND NOT is_member),
      array_agg(result) FILTER (WHERE result_ttl IS NOT NULL AND NOT is_member),
      array_agg(id) FILTER (WHERE is_member),
      tokens || array_agg(lock_token) FILTER (WHERE lock_token IS NOT NULL AND NOT is_member),
      array_agg(permits) FILTER (WHERE permits <> '' AND NOT is_member),
      COUNT(*) FILTER (WHERE NOT is_member)
    INTO gone, kept, results, members, tokens, permits, more
    FROM (
      SELECT DISTINCT ON (j.id) j.*, r.result
      FROM json_to_recordset(reports) AS r (jid text COLLATE "C", wid text COLLATE "C", attempt bigint, result text)
      CROSS JOIN LATERAL (
        SELECT id, state, wid, attempt, result_ttl, lock_token, permits,
          bid IS NOT NULL OR callback_of IS NOT NULL AS is_member
        FROM django_faktory_job WHERE jid = r.jid OFFSET 0) AS j
      WHERE j.state = 'working' AND (r.wid = '' OR j.wid = '' OR j.wid = r.wid)
        AND (r.attempt IS NULL OR r.attempt = j.attempt)
    ) AS held;
    ended := ended + more;
    IF is_last AND ended < reported THEN
      RAISE EXCEPTION 'a job is no longer held as it was: nothing of its task may be committed' USING ERRCODE = 'FK001';
    END IF;
    IF gone IS NOT NULL THEN
      RETURN QUERY
      DELETE FROM django_faktory_job AS j WHERE j.id = ANY (gone)
      RETURNING 'ended', j.jid::text, j.wid::text, j.attempt, j.queue::text, j.jobtype::text, j.started_at, clock;
    END IF;
    IF kept IS NOT NULL THEN
      RETURN QUERY
      SELECT 'ended', j.jid::text, j.wid::text, j.attempt, j.queue::text, j.jobtype::text, j.started_at, clock
      FROM django_faktory_job AS j WHERE j.id = ANY (kept);
      PERFORM faktory_keep_1(kept, results, clock);
    END IF;
    IF members IS NOT NULL THEN
      RETURN QUERY
      SELECT 'member', j.jid::text, NULL, NULL::bigint, NULL, NULL, NULL::timestamptz, clock
      FROM django_faktory_job AS j WHERE j.id = ANY (members);
    END IF;
  END IF;
  -- Locks before limiters (ADR 0024).
  IF tokens IS NOT NULL THEN
    RETURN QUERY
    SELECT f.kind, f.jid, NULL, NULL::bigint, f.name, NULL, NULL::timestamptz, NULL::timestamptz
    FROM faktory_free_locks_1(tokens) AS f;
  END IF;
  IF permits IS NOT NULL THEN
    RETURN QUERY
    SELECT f.kind, f.jid, NULL, NULL::bigint, f.name, NULL, NULL::timestamptz, NULL::timestamptz
    FROM faktory_free_permits_1(permits) AS f;
  END IF;
  INSERT INTO django_faktory_delta (kind, name, amount)
  SELECT n.kind, to_char(clock AT TIME ZONE 'UTC', 'YYYY-MM-DD'), n.amount
  FROM (VALUES ('processed', ended), ('late', reported - ended - COALESCE(cardinality(members), 0))) AS n (kind, amount)
  WHERE n.amount > 0;
END $$;

-- End a job that held a lock and claim the next job of its key, with the lock (ADR 0015).
--
-- Only for the usual case of a hot key: the next job waits for this lock alone, and a claim would return it now. Otherwise it
-- does nothing, and the caller ends and claims as usual. The key is never free in between, so one statement suffices: a job
-- that was pushed meanwhile waits for the new holder. On a hot key this statement, and not the wait for the disk, takes most
-- of a job's time: `faktory_end_1` and `faktory_claim_1` take 1.45 of it, because the next job is written twice.
--
-- The first columns describe the ended job, the others the claimed one, as those of `faktory_claim_1`.
CREATE OR REPLACE FUNCTION faktory_hand_off_1 (
  ended text, holder text, held_attempt bigint, outcome text, queues text[], claimer text, mark bigint,
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
  -- Lookups by key hide the state from the planner, see `faktory_ready_next_1`; OFFSET 0 keeps it out of the lookup of the holder.
  -- The token is drawn before the writes: no part of a statement sees what another part has written, and both the job and the
  -- lock row get it.
  RETURN QUERY
  WITH held AS MATERIALIZED (
    SELECT j.* FROM (
      SELECT id, wid, attempt, result_ttl, state, bid, callback_of, lock_token, permits, queue, jobtype, started_at
      FROM django_faktory_job WHERE jid = ended FOR UPDATE OFFSET 0) AS j
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
    INSERT INTO django_faktory_delta (kind, name, amount)
    SELECT 'processed', to_char(clock AT TIME ZONE 'UTC', 'YYYY-MM-DD'), 1 FROM heir)
  SELECT NOT EXISTS (
      SELECT FROM unnest(queues) AS q (name) CROSS JOIN LATERAL (
        SELECT FROM django_faktory_job WHERE state = 'enqueued' AND queue = q.name LIMIT 1) AS ready),
    held.wid::text, held.attempt, held.queue::text, held.jobtype::text, held.started_at, clock,
    'claimed', 1, j.sort_priority, j.id, j.jid::text, j.queue::text, j.payload, j.wid::text, j.attempt, j.created_at,
    j.enqueued_at, j.started_at, j.failure, j.history, j.reserve_for, j.result_ttl, j.jobtype::text, j.lock_key::text,
    j.limit_key::text, j.permits::text, j.bid IS NULL AND j.callback_of IS NULL, j.lock_token
  FROM held CROSS JOIN taken AS j LEFT JOIN kept ON TRUE;
END $$;

-- Return the day for `faktory_day_1` if today has no partition: its partition began earlier, or was not added.
CREATE OR REPLACE FUNCTION faktory_earlier_day_1 (today date)
RETURNS date
LANGUAGE plpgsql STABLE AS $$
DECLARE
  named oid;
BEGIN
  FOR age IN 1..59 LOOP
    named := to_regclass('django_faktory_history_' || to_char(today - age, 'YYYYMMDD'));
    -- A table of that name may have been detached, or be that of another schema.
    IF named IS NOT NULL AND EXISTS (
      SELECT FROM pg_inherits
      WHERE inhrelid = named AND inhseqno = 1 AND inhparent = to_regclass('django_faktory_history') AND NOT inhdetachpending)
    THEN
      RETURN today - age;
    END IF;
  END LOOP;
  RETURN '1970-01-01';
END $$;

-- Return the day of jobs that end now: that of the latest partition that begins on one of the last 60 days; otherwise the day
-- whose rows leave one by one (ADR 0049). With a day without a partition, the end would fail.
--
-- A query that PostgreSQL inlines: as a plpgsql function it took 17 µs of the 300 of an end.
CREATE OR REPLACE FUNCTION faktory_day_1 (clock timestamptz)
RETURNS SETOF date
LANGUAGE sql STABLE AS $$
  SELECT COALESCE(
    (SELECT (clock AT TIME ZONE 'UTC')::date FROM pg_inherits
      WHERE inhrelid = to_regclass('django_faktory_history_' || to_char(clock AT TIME ZONE 'UTC', 'YYYYMMDD')) AND inhseqno = 1
        AND inhparent = to_regclass('django_faktory_history') AND NOT inhdetachpending),
    faktory_earlier_day_1((clock AT TIME ZONE 'UTC')::date))
$$;

-- Move ended jobs to the history as succeeded: delete each row, and insert it with its result (ADR 0048).
--
-- The rows are locked, and have a `result_ttl`. The history gets no reservation, lock, permits and unique key.
CREATE OR REPLACE FUNCTION faktory_keep_1 (
  ids bigint[], results text[], clock timestamptz
)
RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
  WITH gone AS (
    DELETE FROM django_faktory_job AS j WHERE j.id = ANY (ids) RETURNING j.*)
  INSERT INTO django_faktory_history (id, state, result, finished_at, purge_at, day, jid, jobtype, queue, sort_priority, payload, retry, reserve_for, backtrace,
    result_ttl, created_at, enqueued_at, started_at, failed_at, wid, attempt, failures, losses, interruptions, errtype,
    failure, history, expires_at, unique_expires_at, unique_until_start, lock_key, limit_key, bid, callback_of, has_run,
    counts_failed, claim, about, cancel_requested_at)
  SELECT j.id, 'succeeded', results[array_position(ids, j.id)], clock, clock + make_interval(secs => j.result_ttl),
    (SELECT day FROM faktory_day_1(clock) AS today (day)), j.jid, j.jobtype, j.queue, j.sort_priority, j.payload, j.retry,
    j.reserve_for, j.backtrace, j.result_ttl, j.created_at, j.enqueued_at, j.started_at, j.failed_at, j.wid, j.attempt,
    j.failures, j.losses,
    j.interruptions, j.errtype, j.failure, j.history, j.expires_at, j.unique_expires_at, j.unique_until_start, j.lock_key,
    j.limit_key, j.bid, j.callback_of, j.has_run, j.counts_failed, j.claim, j.about, j.cancel_requested_at
  FROM gone AS j;
END $$;

-- Lock and read jobs that are reported as failed, without their large columns. Failures are decided in Python (ADR 0043).
--
-- The columns are in the order of the model's fields.
CREATE OR REPLACE FUNCTION faktory_failing_1 (
  jids text[]
)
RETURNS TABLE (
  id bigint, enqueued_at timestamptz, finished_at timestamptz, purge_at timestamptz, failed_at timestamptz,
  cancel_requested_at timestamptz, retry int, result_ttl int, failures int, backtrace smallint, losses smallint,
  has_run boolean, counts_failed boolean, jid text, jobtype text, queue text, lock_key text, bid text, callback_of text,
  errtype text, failure text, history text, state text, wid text, attempt bigint, run_at timestamptz, started_at timestamptz,
  reserved_until timestamptz, lock_token bigint, permits text, unique_key text
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
  -- By id, as all transactions (ADR 0024), and by a sub-select for each id, see `faktory_end_1`.
  RETURN QUERY
  SELECT j.id, j.enqueued_at, j.finished_at, j.purge_at, j.failed_at, j.cancel_requested_at, j.retry, j.result_ttl,
    j.failures, j.backtrace, j.losses, j.has_run, j.counts_failed, j.jid::text, j.jobtype::text, j.queue::text,
    j.lock_key::text, j.bid::text, j.callback_of::text, j.errtype::text, j.failure, j.history, j.state::text,
    j.wid::text, j.attempt, j.run_at, j.started_at, j.reserved_until, j.lock_token, j.permits::text, j.unique_key::text
  FROM unnest(ARRAY(
    SELECT stored.id FROM (SELECT id FROM django_faktory_job WHERE jid = ANY (jids) OFFSET 0) AS stored
    ORDER BY stored.id)) AS wanted (id)
  CROSS JOIN LATERAL (
    SELECT id, enqueued_at, finished_at, purge_at, failed_at, cancel_requested_at, retry, result_ttl, failures, backtrace,
      losses, has_run, counts_failed, jid, jobtype, queue, lock_key, bid, callback_of, errtype, failure, history, state,
      wid, attempt, run_at, started_at, reserved_until, lock_token, permits, unique_key
    FROM django_faktory_job WHERE id = wanted.id FOR UPDATE OFFSET 0) AS j;
END $$;

-- Write the columns of locked jobs that a failure changes: an array of each column. Returns the number of jobs.
CREATE OR REPLACE FUNCTION faktory_save_1 (
  id bigint[], state text[], unique_key text[], lock_token bigint[], permits text[], wid text[], failures int[],
  losses smallint[], errtype text[], failure text[], history text[], run_at timestamptz[], enqueued_at timestamptz[],
  started_at timestamptz[], reserved_until timestamptz[], finished_at timestamptz[], purge_at timestamptz[],
  failed_at timestamptz[]
)
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_variable
BEGIN
  -- An array of one id: for a comparison with the id itself, the planner may join by walking over the whole primary key, with a
  -- plan that it made while the table was small. A loop took twice the time for 50 jobs.
  UPDATE django_faktory_job AS j SET
    state = r.state, unique_key = r.unique_key, lock_token = r.lock_token, permits = r.permits, wid = r.wid,
    failures = r.failures, losses = r.losses, errtype = r.errtype, failure = r.failure, history = r.history,
    run_at = r.run_at, enqueued_at = r.enqueued_at, started_at = r.started_at, reserved_until = r.reserved_until,
    finished_at = r.finished_at, purge_at = r.purge_at, failed_at = r.failed_at,
    is_returned = r.state = 'enqueued'  -- a job that lost its worker keeps its place
  FROM unnest(
    id, state, unique_key, lock_token, permits, wid, failures, losses, errtype, failure, history, run_at, enqueued_at,
    started_at, reserved_until, finished_at, purge_at, failed_at
  ) AS r (
    id, state, unique_key, lock_token, permits, wid, failures, losses, errtype, failure, history, run_at, enqueued_at,
    started_at, reserved_until, finished_at, purge_at, failed_at)
  WHERE j.id = ANY (ARRAY[r.id]);
  RETURN cardinality(id);
END $$;
