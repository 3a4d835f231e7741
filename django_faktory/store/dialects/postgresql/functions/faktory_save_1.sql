-- Write the columns of locked jobs that a failure changes: an array of each column. Returns the number of jobs.
CREATE OR REPLACE FUNCTION faktory_save_1 (
  id bigint[], state text[], unique_key text[], lock_token bigint[], permits text[], wid text[], failures int[],
  losses smallint[], errtype text[], failure text[], history text[], run_at timestamptz[], enqueued_at timestamptz[],
  started_at timestamptz[], reserved_until timestamptz[], finished_at timestamptz[], purge_at timestamptz[],
  failed_at timestamptz[]
)
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
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
