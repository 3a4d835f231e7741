-- Start the reservations of delivered jobs (ADR 0026): a prefetched job is working, and its claim number is negative until then.
--
-- Rows: the jids of jobs that are locked. Another transaction may be ending such a job: it is confirmed later.
CREATE OR REPLACE FUNCTION faktory_confirm_1 (
  jids text[], attempts bigint[], wids text[], ages_s float8[], moment timestamptz
)
RETURNS TABLE (jid text)
LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
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
