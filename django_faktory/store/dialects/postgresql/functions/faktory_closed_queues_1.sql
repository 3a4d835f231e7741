-- Queues from which no job may be claimed now: paused ones, and those whose limiter has no room.
--
-- One statement of LANGUAGE sql and STABLE: the planner puts it in the place of the call.
CREATE OR REPLACE FUNCTION faktory_closed_queues_1 (
  clock timestamptz
)
RETURNS SETOF text
LANGUAGE sql STABLE AS $$
  SELECT name::text FROM django_faktory_queue WHERE paused_at IS NOT NULL
  UNION ALL
  SELECT name::text FROM django_faktory_limiter
  WHERE scope = 'queue' AND (is_paused OR in_use >= concurrency OR opens_at > clock)
$$;
