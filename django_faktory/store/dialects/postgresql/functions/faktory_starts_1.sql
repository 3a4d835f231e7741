-- Where to begin to read each part of a queue: at its bound, or earlier if a transaction has ended that was open when the bound
-- was drawn, because its jobs lie behind the bound (ADR 0046).
--
-- A part is the jobs of a queue from a priority on up to the next part: ends has the first priority behind it. `late` lists
-- open transactions: a queue, an xid, and the time before which it has no jobs.
CREATE OR REPLACE FUNCTION faktory_starts_1 (
  parts text[], bounds timestamptz[], late json, seen pg_snapshot
)
RETURNS timestamptz[]
LANGUAGE plpgsql STABLE AS $$
BEGIN
  -- Not in the language SQL, in which a function that is not inlined is planned anew in each transaction.
  RETURN (
    SELECT array_agg(LEAST(part.bound, (
      SELECT MIN(l.since) FROM json_to_recordset(late) AS l (queue text, xid text, since timestamptz)
      WHERE l.queue = part.queue AND pg_visible_in_snapshot(l.xid::xid8, seen))) ORDER BY part.place)
    FROM unnest(parts, bounds) WITH ORDINALITY AS part (queue, bound, place));
END $$;
