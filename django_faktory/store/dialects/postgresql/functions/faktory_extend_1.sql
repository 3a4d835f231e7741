-- Extend the reservations of held jobs that are half over (ADR 0026), and return their number.
--
-- A locked row is skipped: a transaction that changes a job of its own must not delay the heartbeat, and `failures.reap` skips
-- the row as well.
CREATE OR REPLACE FUNCTION faktory_extend_1 (
  jids text[], attempts bigint[], wids text[], at_least_s float8, moment timestamptz
)
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
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
