-- Return permits of ended runs to their limiters, and make jobs ready that wait for one (ADR 0016).
--
-- `permits` has the texts of the jobs' columns. Rows: 'ready' with queue and jid of a job that became ready, or with a
-- queue that is open again; 'limiter' with the id of one that Python has to look at after the commit, because jobs wait
-- for its rate, or one of them was locked.
CREATE OR REPLACE FUNCTION faktory_free_permits_1 (
  permits text[]
)
RETURNS TABLE (kind text, name text, jid text)
LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  freed record;
  limiter record;
  room int;
  place text;
  ids bigint[];
  looked_at int;
  is_awaited_still boolean;
  has_skipped boolean;
BEGIN
  -- By id, as all transactions lock limiters (ADR 0024).
  FOR freed IN
    SELECT p.id::bigint AS id, COUNT(*) AS jobs FROM unnest(permits) AS texts (text)
    CROSS JOIN LATERAL unnest(string_to_array(btrim(texts.text, ','), ',')) AS p (id)
    GROUP BY 1 ORDER BY 1
  LOOP
    -- Never negative, even if rows were changed by hand: a sweep corrects the count.
    UPDATE django_faktory_limiter AS g SET in_use = GREATEST(g.in_use - freed.jobs, 0) WHERE g.id = freed.id
    RETURNING g.scope, g.name, g.concurrency, g.rate, g.is_paused, g.in_use, g.is_awaited INTO limiter;
    CONTINUE WHEN NOT FOUND;
    room := limiter.concurrency - limiter.in_use;
    IF limiter.scope = 'queue' THEN
      -- The jobs of a full queue are not blocked, claims skip them: waiting FETCHes need a notification.
      IF room > 0 AND room <= freed.jobs THEN
        kind := 'ready'; name := limiter.name;
        RETURN NEXT;
      END IF;
    ELSIF limiter.is_awaited AND (limiter.rate IS NOT NULL OR limiter.is_paused) THEN
      kind := 'limiter'; name := freed.id::text;
      RETURN NEXT;
    ELSIF limiter.is_awaited AND room > 0 THEN
      is_awaited_still := FALSE;
      has_skipped := FALSE;
      place := '';
      -- The room is that of each queue: a queue without workers must not keep the jobs of other queues blocked.
      LOOP
        SELECT j.queue INTO place FROM django_faktory_job AS j WHERE j.limiter = freed.id AND j.queue > place
        ORDER BY j.queue LIMIT 1;
        EXIT WHEN NOT FOUND;
        -- Jobs that became ready before and are not claimed yet take some of the room. Locked rows are skipped.
        SELECT array_agg(j.id) FILTER (WHERE j.state = 'blocked'), COUNT(*) INTO ids, looked_at FROM (
          SELECT j.id, j.state FROM django_faktory_job AS j WHERE j.limiter = freed.id AND j.queue = place
          ORDER BY j.sort_priority, j.enqueued_at, j.id LIMIT LEAST(room, 500) FOR UPDATE SKIP LOCKED) AS j;
        IF ids IS NOT NULL THEN
          RETURN QUERY
          UPDATE django_faktory_job AS j SET state = 'enqueued', is_returned = TRUE WHERE j.id = ANY (ids)
          RETURNING 'ready', j.queue::text, j.jid::text;
        END IF;
        PERFORM FROM django_faktory_job AS j
        WHERE j.limiter = freed.id AND j.queue = place AND j.state = (SELECT 'blocked') LIMIT 1;
        IF FOUND THEN
          is_awaited_still := TRUE;
          has_skipped := has_skipped OR looked_at < LEAST(room, 500);
        END IF;
      END LOOP;
      UPDATE django_faktory_limiter SET is_awaited = FALSE WHERE id = freed.id AND NOT is_awaited_still;
      IF has_skipped THEN
        kind := 'limiter'; name := freed.id::text;
        RETURN NEXT;
      END IF;
    END IF;
  END LOOP;
END $$;
