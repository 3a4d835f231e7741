-- Lock and read jobs that are reported as failed, without their large columns. Failures are decided in Python (ADR 0043).
--
-- The columns are in the order of the model's fields.
CREATE OR REPLACE FUNCTION faktory_failing_1 (
  jids text[]
)
RETURNS TABLE (
  id bigint, jid text, jobtype text, queue text, state text, retry int, backtrace smallint, result_ttl int,
  run_at timestamptz, enqueued_at timestamptz, started_at timestamptz, reserved_until timestamptz, finished_at timestamptz,
  purge_at timestamptz, failed_at timestamptz, wid text, attempt bigint, failures int, losses smallint, errtype text,
  failure text, history text, unique_key text, lock_key text, lock_token bigint, permits text, bid text, callback_of text,
  has_run boolean, counts_failed boolean, cancel_requested_at timestamptz
)
LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
  -- By id, as all transactions (ADR 0024), and by a sub-select for each id, see `faktory_end_1`.
  RETURN QUERY
  SELECT j.id, j.jid::text, j.jobtype::text, j.queue::text, j.state::text, j.retry, j.backtrace, j.result_ttl, j.run_at,
    j.enqueued_at, j.started_at, j.reserved_until, j.finished_at, j.purge_at, j.failed_at, j.wid::text, j.attempt,
    j.failures, j.losses, j.errtype::text, j.failure, j.history, j.unique_key::text, j.lock_key::text, j.lock_token,
    j.permits::text, j.bid::text, j.callback_of::text, j.has_run, j.counts_failed, j.cancel_requested_at
  FROM unnest(ARRAY(
    SELECT stored.id FROM (SELECT id FROM django_faktory_job WHERE jid = ANY (jids) OFFSET 0) AS stored
    ORDER BY stored.id)) AS wanted (id)
  CROSS JOIN LATERAL (
    SELECT id, jid, jobtype, queue, state, retry, backtrace, result_ttl, run_at, enqueued_at, started_at, reserved_until,
      finished_at, purge_at, failed_at, wid, attempt, failures, losses, errtype, failure, history, unique_key, lock_key,
      lock_token, permits, bid, callback_of, has_run, counts_failed, cancel_requested_at
    FROM django_faktory_job WHERE id = wanted.id FOR UPDATE OFFSET 0) AS j;
END $$;
