-- Delete the rows of locks, and make the next jobs of their keys ready (ADR 0015). Rows as of `faktory_ready_next_1`.
CREATE OR REPLACE FUNCTION faktory_free_locks_1 (
  tokens bigint[]
)
RETURNS TABLE (kind text, name text, jid text)
LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  lock record;
  keys text[];
BEGIN
  -- One by one, by key: a DELETE of several rows would lock them in the order in which it finds them (ADR 0024).
  FOR lock IN
    SELECT l.id, l.lock_key FROM unnest(tokens) AS t (id)
    CROSS JOIN LATERAL (SELECT id, lock_key FROM django_faktory_joblock WHERE id = t.id OFFSET 0) AS l ORDER BY l.lock_key
  LOOP
    DELETE FROM django_faktory_joblock WHERE id = lock.id;
    IF FOUND THEN
      keys := keys || lock.lock_key::text;
    END IF;
  END LOOP;
  -- A statement of its own: its snapshot shows each job that was blocked by these locks until they were deleted.
  IF keys IS NOT NULL THEN
    RETURN QUERY SELECT * FROM faktory_ready_next_1(keys);
  END IF;
END $$;
