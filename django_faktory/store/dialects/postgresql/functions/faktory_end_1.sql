-- End jobs successfully: delete each row, and keep it in the history for its `result_ttl` (ADR 0048). Locks and permits are released in
-- the same transaction, and what waits for them becomes ready.
--
-- `reports` is a JSON array of jid, wid, attempt and result; reports of others than the holder are counted as late. The rows
-- with the jids in `pushed`, which this transaction is about to insert, are locked too: all rows in one order (ADR 0024).
-- Rows: 'ended'; 'member' for a job of a batch, which is left unchanged; and those of `faktory_free_locks_1` and
-- `faktory_free_permits_1`, with the name in the column `queue`. With `is_last`, the reports must end all their jobs:
-- otherwise the function fails, so that the COMMIT behind it in the same message has no effect (ADR 0007).
CREATE OR REPLACE FUNCTION faktory_end_1 (
  reports json, reported int, pushed text[], own_slot bigint, moment timestamptz, is_last boolean
)
RETURNS TABLE (
  kind text, jid text, wid text, attempt bigint, queue text, jobtype text, started_at timestamptz, ended_at timestamptz
)
LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  ended int;
  more int;
  missed int;
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
  -- As in `faktory_keep_1`; here, one statement suffices for plain jobs.
  kept AS (
    INSERT INTO django_faktory_history (id, state, result, finished_at, purge_at, day, jid, jobtype, queue, sort_priority, payload, retry, reserve_for,
      backtrace, result_ttl, created_at, enqueued_at, started_at, failed_at, wid, attempt, failures, losses, interruptions,
      errtype, failure, history, expires_at, unique_expires_at, unique_until_start, lock_key, limit_key, bid, callback_of,
      has_run, counts_failed, claim, about, cancel_requested_at)
    SELECT j.id, 'succeeded', held.result, held.now, held.now + make_interval(secs => j.result_ttl), (held.now AT TIME ZONE
      'UTC')::date, j.jid, j.jobtype, j.queue, j.sort_priority, j.payload, j.retry, j.reserve_for, j.backtrace, j.result_ttl,
      j.created_at, j.enqueued_at, j.started_at, j.failed_at, j.wid, j.attempt, j.failures, j.losses, j.interruptions,
      j.errtype, j.failure, j.history, j.expires_at, j.unique_expires_at, j.unique_until_start, j.lock_key, j.limit_key,
      j.bid, j.callback_of, j.has_run, j.counts_failed, j.claim, j.about, j.cancel_requested_at
    FROM gone AS j JOIN held ON held.id = j.id WHERE j.result_ttl IS NOT NULL),
  counted AS (
    INSERT INTO django_faktory_counter AS c (day, slot, processed, failed, late)
    SELECT (MAX(now) AT TIME ZONE 'UTC')::date, own_slot, COUNT(*), 0, 0 FROM held HAVING COUNT(*) > 0
    ON CONFLICT (day, slot) DO UPDATE SET processed = c.processed + excluded.processed)
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

  -- Jobs that hold permits, and members of batches; their rows are locked already.
  IF ended < reported THEN
    clock := COALESCE(moment, clock_timestamp());
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
    IF is_last AND ended + more < reported THEN
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
  -- Locks before limiters before counters (ADR 0024).
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
  missed := reported - ended - more - COALESCE(cardinality(members), 0);
  IF more > 0 OR missed > 0 THEN
    INSERT INTO django_faktory_counter AS c (day, slot, processed, failed, late)
    VALUES ((clock AT TIME ZONE 'UTC')::date, own_slot, more, 0, missed)
    ON CONFLICT (day, slot) DO UPDATE SET processed = c.processed + excluded.processed, late = c.late + excluded.late;
  END IF;
END $$;
