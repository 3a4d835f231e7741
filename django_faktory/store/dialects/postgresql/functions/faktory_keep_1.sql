-- Move ended jobs to the history as succeeded: delete each row, and insert it with its result (ADR 0048).
--
-- The rows are locked, and have a `result_ttl`. The history gets no reservation, lock, permits and unique key.
CREATE OR REPLACE FUNCTION faktory_keep_1 (
  ids bigint[], results text[], clock timestamptz
)
RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
  WITH gone AS (
    DELETE FROM django_faktory_job AS j WHERE j.id = ANY (ids) RETURNING j.*)
  INSERT INTO django_faktory_history (id, state, result, finished_at, purge_at, day, jid, jobtype, queue, sort_priority, payload, retry, reserve_for, backtrace,
    result_ttl, created_at, enqueued_at, started_at, failed_at, wid, attempt, failures, losses, interruptions, errtype,
    failure, history, expires_at, unique_expires_at, unique_until_start, lock_key, limit_key, bid, callback_of, has_run,
    counts_failed, claim, about, cancel_requested_at)
  SELECT j.id, 'succeeded', results[array_position(ids, j.id)], clock, clock + make_interval(secs => j.result_ttl), (clock AT TIME
    ZONE 'UTC')::date, j.jid, j.jobtype, j.queue, j.sort_priority, j.payload, j.retry, j.reserve_for, j.backtrace,
    j.result_ttl, j.created_at, j.enqueued_at, j.started_at, j.failed_at, j.wid, j.attempt, j.failures, j.losses,
    j.interruptions, j.errtype, j.failure, j.history, j.expires_at, j.unique_expires_at, j.unique_until_start, j.lock_key,
    j.limit_key, j.bid, j.callback_of, j.has_run, j.counts_failed, j.claim, j.about, j.cancel_requested_at
  FROM gone AS j;
END $$;
