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
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
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
        WHERE j.id = first_id AND j.state = 'blocked' AND j.limiter IS NULL FOR UPDATE SKIP LOCKED)
      RETURNING 'ready', j.queue::text, j.jid::text;
      IF NOT FOUND THEN
        kind := 'key'; name := wanted_key;
        RETURN NEXT;
      END IF;
    END LOOP;
  END LOOP;
END $$;
