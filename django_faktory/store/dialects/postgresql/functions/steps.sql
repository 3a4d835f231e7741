-- Record a step of a job, how far a walk has come, or the end of a wait, as the last statement of its transaction (ADR 0051). Fails unless the worker holds the job, so that a COMMIT
-- behind it in the same message has no effect (ADR 0007).
CREATE OR REPLACE FUNCTION faktory_step_1 (
  job_jid text, job_wid text, job_attempt bigint, step text, key text, step_result text, place text, rows_done bigint,
  rows_total bigint, is_over boolean, ends timestamptz, ran_s float8, moment timestamptz
)
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  row_id bigint;
  pushed_at timestamptz;
  is_held boolean;
  clock timestamptz;
BEGIN
  -- Not before the end: heartbeats would skip the locked row, and a KILL would wait for it, as long as the step runs. Waits for a
  -- transaction that gives the job to another worker. Found by jid alone, see `faktory_end_1`.
  SELECT id, created_at, state = 'working' AND wid = job_wid AND attempt = job_attempt INTO row_id, pushed_at, is_held
  FROM django_faktory_job WHERE jid = job_jid FOR NO KEY UPDATE;
  IF is_held IS NOT TRUE THEN
    RAISE EXCEPTION 'the job is no longer held: nothing of the step may be committed' USING ERRCODE = 'FK001';
  END IF;
  clock := COALESCE(moment, clock_timestamp());
  INSERT INTO django_faktory_jobstep AS s (job_id, name, step_key, pushed_at, attempt, result, reached, done, total, is_finished,
    until, started_at, recorded_at)
  VALUES (row_id, step, key, pushed_at, job_attempt, step_result, place, rows_done, rows_total, is_over, ends,
    clock - make_interval(secs => ran_s), clock)
  ON CONFLICT (job_id, name, step_key) DO UPDATE SET attempt = excluded.attempt, result = excluded.result, reached = excluded.reached,
    done = excluded.done, total = excluded.total, is_finished = excluded.is_finished, started_at = excluded.started_at,
    recorded_at = excluded.recorded_at
  WHERE s.done IS NOT NULL OR NOT s.is_finished;
  IF NOT FOUND THEN
    RAISE unique_violation USING MESSAGE = 'the step is recorded already: its effects must not happen twice';
  END IF;
  RETURN 1;
END $$;
