-- Start the reservations of delivered jobs (ADR 0026): a prefetched job is working, and its claim number is negative until then.
--
-- Rows: the jids of jobs that are locked. Another transaction may be ending such a job: it is confirmed later.
CREATE OR REPLACE FUNCTION faktory_confirm_1 (
  jids text[], attempts bigint[], wids text[], ages_s float8[], moment timestamptz
)
RETURNS TABLE (jid text)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  clock timestamptz := COALESCE(moment, statement_timestamp());
  ids bigint[];
  holders text[];
  begun timestamptz[];
  skipped text[];
  skipped_attempts bigint[];
BEGIN
  -- Found by jid alone, and checked once they are locked, see `faktory_end_1`.
  SELECT array_agg(j.id) FILTER (WHERE is_mine), array_agg(r.wid) FILTER (WHERE is_mine),
    array_agg(clock - make_interval(secs => r.age_s)) FILTER (WHERE is_mine),
    array_agg(r.jid) FILTER (WHERE j.id IS NULL), array_agg(r.attempt) FILTER (WHERE j.id IS NULL)
  INTO ids, holders, begun, skipped, skipped_attempts
  FROM unnest(jids, attempts, wids, ages_s) AS r (jid, attempt, wid, age_s)
  LEFT JOIN LATERAL (
    SELECT id, attempt = r.attempt AND wid IN ('', r.wid) AND claim < 0 AND reserved_until IS NOT NULL AS is_mine
    FROM django_faktory_job WHERE jid = r.jid FOR UPDATE SKIP LOCKED OFFSET 0) AS j ON TRUE;
  IF ids IS NOT NULL THEN
    UPDATE django_faktory_job AS j SET claim = -j.claim, wid = holders[array_position(ids, j.id)],
      started_at = begun[array_position(ids, j.id)],
      reserved_until = GREATEST(j.reserved_until, begun[array_position(ids, j.id)] + make_interval(secs => j.reserve_for))
    WHERE j.id = ANY (ids);
  END IF;
  IF skipped IS NOT NULL THEN
    RETURN QUERY
    SELECT r.jid FROM unnest(skipped, skipped_attempts) AS r (jid, attempt)
    CROSS JOIN LATERAL (SELECT attempt, claim, reserved_until FROM django_faktory_job WHERE jid = r.jid OFFSET 0) AS j
    WHERE j.attempt = r.attempt AND j.claim < 0 AND j.reserved_until IS NOT NULL;
  END IF;
END $$;

-- Extend the reservations of held jobs that are half over (ADR 0026), and return their number.
--
-- A locked row is skipped: a transaction that changes a job of its own must not delay the heartbeat, and `failures.reap` skips
-- the row as well.
CREATE OR REPLACE FUNCTION faktory_extend_1 (
  jids text[], attempts bigint[], wids text[], at_least_s float8, moment timestamptz
)
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  clock timestamptz := COALESCE(moment, statement_timestamp());
  extended int;
BEGIN
  -- Found by jid alone, see `faktory_end_1`. Only due rows are locked, and their holder is checked again then.
  UPDATE django_faktory_job AS j SET reserved_until = clock + make_interval(secs => GREATEST(j.reserve_for, at_least_s))
  WHERE j.id = ANY (ARRAY(
    SELECT mine.id FROM (
      SELECT j.id, r.wid, r.attempt FROM unnest(jids, attempts, wids) AS r (jid, attempt, wid)
      CROSS JOIN LATERAL (
        SELECT id, wid, attempt, reserved_until, reserve_for FROM django_faktory_job WHERE jid = r.jid OFFSET 0) AS j
      WHERE j.wid = r.wid AND j.attempt = r.attempt
        AND j.reserved_until < clock + make_interval(secs => GREATEST(j.reserve_for, at_least_s) / 2) OFFSET 0) AS due
    CROSS JOIN LATERAL (
      SELECT id, wid, attempt, reserved_until FROM django_faktory_job WHERE id = due.id
      FOR UPDATE SKIP LOCKED OFFSET 0) AS mine
    WHERE mine.wid = due.wid AND mine.attempt = due.attempt AND mine.reserved_until IS NOT NULL));
  GET DIAGNOSTICS extended = ROW_COUNT;
  RETURN extended;
END $$;
