-- Count the jobs that a claim could take now, at most `at_most` of each queue, and find the workers that get none.
--
-- Rows: name and number for each queue, without those that a pause or a limiter closes (ADR 0016); and the quiet or terminating
-- ones of the workers. Without bitmap scans, which read each dead entry of the index again, and every job instead of `at_most`.
CREATE OR REPLACE FUNCTION faktory_waiting_1 (
  queues text[], at_most int, wids text[], moment timestamptz,
  parts text[], ranks smallint[], bounds timestamptz[], ends smallint[], late json  -- where to begin, see `faktory_starts_1`
)
RETURNS TABLE (name text, size bigint, is_wid boolean)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  clock timestamptz := COALESCE(moment, statement_timestamp());
  starts timestamptz[] := bounds;
BEGIN
  IF late IS NOT NULL THEN
    starts := faktory_starts_1(parts, bounds, late, pg_current_snapshot());
  END IF;
  RETURN QUERY
  SELECT q.name, (SELECT COUNT(*) FROM (
      SELECT 1 FROM unnest(parts, ranks, starts, ends) AS part (queue, rank, start, below)
      CROSS JOIN LATERAL (
        (SELECT FROM django_faktory_job
        WHERE is_returned AND queue = part.queue AND state = (SELECT 'enqueued') AND sort_priority = part.rank
          AND enqueued_at < part.start AND (expires_at IS NULL OR expires_at > clock) LIMIT at_most)
        UNION ALL
        (SELECT FROM django_faktory_job
        WHERE state = 'enqueued' AND queue = part.queue AND (sort_priority, enqueued_at) >= (part.rank, part.start)
          AND sort_priority < part.below AND (expires_at IS NULL OR expires_at > clock) LIMIT at_most)) AS found
      WHERE part.queue = q.name LIMIT at_most) AS ready),
    FALSE
  FROM unnest(queues) AS q (name)
  WHERE q.name <> ALL (ARRAY(SELECT name FROM faktory_closed_queues_1(clock) AS closed (name)))
  UNION ALL
  SELECT w.wid::text, 0, TRUE FROM django_faktory_workerprocess AS w WHERE w.wid = ANY (wids) AND w.state <> 'running';
END $$;
