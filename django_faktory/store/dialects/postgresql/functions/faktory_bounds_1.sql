-- Draw new bounds of queues: the place of the first ready job of each part, if it has one (ADR 0046).
--
-- Gives no row unless they are due and this transaction has written, or a late transaction has ended. One row for each part with
-- a priority; the snapshot is older than the one that has found the job, and the xid and time are those of this transaction.
CREATE OR REPLACE FUNCTION faktory_bounds_1 (
  parts text[], ranks smallint[], bounds timestamptz[], late json, is_due boolean
)
RETURNS TABLE (queue text, rank smallint, first_at timestamptz, seen text, xid bigint, began_at timestamptz)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  snapshot pg_snapshot := pg_current_snapshot();
  own xid8 := pg_current_xact_id_if_assigned();
  starts timestamptz[] := bounds;
BEGIN
  IF late IS NOT NULL THEN
    starts := faktory_starts_1(parts, bounds, late, snapshot);
  END IF;
  IF starts <> bounds OR is_due AND own IS NOT NULL THEN
    RETURN QUERY
    SELECT part.queue, part.rank, (
        SELECT enqueued_at FROM django_faktory_job
        WHERE state = 'enqueued' AND queue = part.queue AND sort_priority = part.rank AND enqueued_at >= part.start
        ORDER BY enqueued_at, id LIMIT 1),
      snapshot::text, own::text::bigint, transaction_timestamp()
    FROM unnest(parts, ranks, starts) AS part (queue, rank, start) WHERE part.rank >= -100;
  END IF;
END $$;
