-- Store pushed jobs: plain ones, and those with options, a lock or a unique key (ADR 0043).
--
-- A dead job with the jid of a pushed one is replaced; any other stays, and the push of it does nothing (W10). A
-- unique key belongs to one job: to the stored one, else to the one with the lowest place in the set (W27).
--
-- Rows of the result: 'refused' and the jid of a job whose key is taken; 'blocked' and a lock key that a stored job
-- waits for; 'undecided' and no jid, with nothing stored, if the transaction cannot see which keys are taken.
CREATE OR REPLACE FUNCTION faktory_push_1 (
  jobs json,          -- array of objects without members that have their default, in the order in which all
                      -- transactions insert (ADR 0024); NULL: only lock
  options json,       -- array of objects with the options of each; NULL: no job has any
  places int[],       -- place of each in the set: they are claimed in this order; NULL: a lone job
  jids text[],        -- jid of each, unless it is alone; of several calls the first one only locks, for all (ADR 0024)
  keys text[],        -- unique key of each; NULL: none has one
  locks text[],       -- lock key of each; NULL: none has one
  may_exist boolean,  -- whether a stored job may have one of the jids
  clock timestamptz   -- the time; NULL: that of the database
)
RETURNS TABLE (outcome text, subject text)
LANGUAGE plpgsql
AS $$
#variable_conflict use_column
DECLARE
  -- First: a claim that begins behind this time must see that this transaction is open (ADR 0046).
  own xid8 := pg_current_xact_id();
  moment timestamptz := COALESCE(clock, clock_timestamp());
  is_lone boolean := places IS NULL;
  looks boolean;
  scans text[];         -- settings of the session
  ids bigint[];         -- rows that this push may change
  expired bigint[];     -- of these, holders of a key that has expired
  replaced bigint[];    -- of these, dead jobs to replace
  locked bigint[];
  met jsonb;            -- what a stored job decides about pushed ones: 'kept' or 'refused', by jid
  is_blocked boolean[];
  blocking text[];
  added int;
BEGIN
  IF keys IS NOT NULL AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
    -- The snapshot does not show a key that was taken since the transaction began: the INSERT would be an error.
    RETURN QUERY SELECT 'undecided', NULL;
    RETURN;
  END IF;

  FOR round IN 1..10 LOOP
    -- A lone job is inserted first, and looked up if that did nothing: it waits while it has no other row locked.
    looks := NOT is_lone AND (may_exist OR keys IS NOT NULL);
    IF scans IS NULL AND (looks OR locks IS NOT NULL) THEN
      -- A plan made while the table was small must not read it from end to end, or all jobs of a key, when it has grown.
      -- Not SET clauses of the function, which cost each call more than this: a lone plain job needs no look.
      scans := ARRAY[current_setting('enable_seqscan'), current_setting('enable_bitmapscan')];
      PERFORM set_config('enable_seqscan', 'off', TRUE), set_config('enable_bitmapscan', 'off', TRUE);
    END IF;
    IF looks THEN
      LOOP
        -- Rows are found by lateral joins with OFFSET 0: any other form may be planned as a join that reads the table.
        -- Of arrays in a sub-select the planner does not know the length, so that it keeps the plan, nor that they are
        -- NULL: to a condition that is never true, it takes any partial index, and reads all of it.
        SELECT array_agg(mine_id) FILTER (WHERE is_over) || array_agg(holder_id) FILTER (WHERE is_expired),
          array_agg(holder_id) FILTER (WHERE is_expired), array_agg(mine_id) FILTER (WHERE is_over AND NOT is_taken),
          jsonb_object_agg(jid, CASE WHEN is_over IS FALSE THEN 'kept' ELSE 'refused' END)
            FILTER (WHERE is_over IS FALSE OR is_taken)
        INTO ids, expired, replaced, met
        FROM (
          SELECT j.jid, mine.id AS mine_id, mine.is_over, holder.id AS holder_id, holder.is_expired,
            key IS NOT NULL AND (NOT COALESCE(holder.is_expired, TRUE)
              OR row_number() OVER (PARTITION BY key, is_over IS FALSE ORDER BY place) > 1) AS is_taken
          FROM unnest((SELECT jids), (SELECT keys), (SELECT places)) AS j (jid, key, place)
          LEFT JOIN LATERAL (
            SELECT id, state = 'dead' AND bid IS NULL AND callback_of IS NULL AS is_over
            FROM django_faktory_job WHERE may_exist AND jid = j.jid OFFSET 0) AS mine ON TRUE
          LEFT JOIN LATERAL (
            SELECT id, COALESCE(unique_expires_at <= moment, FALSE) AS is_expired
            FROM django_faktory_job WHERE unique_key = j.key AND jid <> j.jid OFFSET 0) AS holder ON TRUE) AS found;
        EXIT WHEN ids IS NULL OR NOT EXISTS (SELECT unnest(ids) EXCEPT SELECT unnest(locked));
        -- By id, as in all transactions (ADR 0024), and before the first INSERT. What counts is the row as
        -- it is once it is locked, so look again.
        PERFORM FROM (SELECT DISTINCT id FROM unnest(ids) AS r (id) ORDER BY id OFFSET 0) AS r CROSS JOIN LATERAL (
          SELECT FROM django_faktory_job WHERE id = r.id FOR UPDATE OFFSET 0) AS old;
        locked := locked || ids;
        moment := COALESCE(clock, clock_timestamp());
      END LOOP;
      IF ids IS NOT NULL AND jobs IS NOT NULL THEN
        UPDATE django_faktory_job SET unique_key = NULL WHERE id = ANY ((SELECT expired)::bigint[]);
        DELETE FROM django_faktory_job WHERE id = ANY ((SELECT replaced)::bigint[]);
      END IF;
    END IF;
    EXIT WHEN jobs IS NULL;

    IF locks IS NOT NULL THEN
      -- A job is blocked from the start if its lock is taken, or another job of its key is ready (ADR 0015).
      SELECT array_agg(COALESCE(is_behind, FALSE) ORDER BY nth), array_agg(DISTINCT lock_key) FILTER (WHERE is_behind)
      INTO is_blocked, blocking FROM (
        SELECT nth, lock_key, at IS NULL AND lock_key IS NOT NULL AND (
            row_number() OVER (PARTITION BY lock_key, queue, priority, at > moment ORDER BY places[nth]) > 1
            OR held.id IS NOT NULL OR ready.id IS NOT NULL) AS is_behind
        FROM ROWS FROM (json_to_recordset(jobs) AS (queue text, priority smallint, at timestamptz), unnest(locks))
          WITH ORDINALITY AS job (queue, priority, at, lock_key, nth)
        LEFT JOIN LATERAL (SELECT id, expires_at FROM django_faktory_joblock AS held
          WHERE held.lock_key = job.lock_key OFFSET 0) AS held ON held.expires_at > moment
        LEFT JOIN LATERAL (SELECT id FROM django_faktory_job AS ready
          WHERE ready.lock_key = job.lock_key AND ready.state = (SELECT 'enqueued')
            AND ready.queue = COALESCE(job.queue, 'default') AND ready.sort_priority = -COALESCE(job.priority, 0)
          ORDER BY ready.enqueued_at, ready.id LIMIT 1) AS ready ON TRUE) AS j;
    END IF;

    -- Two statements: with the columns of options, a plain job would take a third more time.
    IF options IS NULL THEN
      INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for, backtrace,
        result_ttl, created_at, run_at, enqueued_at)
      SELECT jid, jobtype, COALESCE(queue, 'default'),
        CASE WHEN at > moment THEN 'scheduled' ELSE 'enqueued' END, -COALESCE(priority, 0), text, COALESCE(retry, 25),
        COALESCE(reserve_for, 1800), COALESCE(backtrace, 0), result_ttl, moment, CASE WHEN at > moment THEN at END,
        CASE WHEN at > moment THEN NULL ELSE moment + make_interval(secs => COALESCE(places[nth], 0) / 1e6) END
      FROM ROWS FROM (json_to_recordset(jobs) AS (jid text, jobtype text, queue text, priority smallint, text text,
        retry int, reserve_for int, backtrace smallint, result_ttl int, at timestamptz)) WITH ORDINALITY
        AS j (jid, jobtype, queue, priority, text, retry, reserve_for, backtrace, result_ttl, at, nth)
      ON CONFLICT (jid) DO NOTHING;
    ELSE
      INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for, backtrace,
        result_ttl, created_at, run_at, enqueued_at, expires_at, unique_key, unique_expires_at, unique_until_start,
        lock_key, limit_key, about)
      SELECT jid, jobtype, COALESCE(queue, 'default'),
        CASE WHEN at > moment THEN 'scheduled' WHEN is_blocked[nth] THEN 'blocked' ELSE 'enqueued' END,
        -COALESCE(priority, 0), text, COALESCE(retry, 25), COALESCE(reserve_for, 1800), COALESCE(backtrace, 0),
        result_ttl, moment, CASE WHEN at > moment THEN at END,
        CASE WHEN at > moment THEN NULL ELSE moment + make_interval(secs => COALESCE(places[nth], 0) / 1e6) END,
        -- No duration ends after the calendar.
        LEAST(expires_at, CASE WHEN expires_in IS NOT NULL THEN LEAST(
          GREATEST(at, moment) + make_interval(secs => LEAST(expires_in, 3e11)), '9999-12-31T00:00:00Z') END),
        unique_key, CASE WHEN unique_key IS NOT NULL THEN LEAST(
          GREATEST(at, moment) + make_interval(secs => LEAST(COALESCE(unique_for, 0), 3e11)), '9999-12-31T00:00:00Z') END,
        COALESCE(unique_until_start, FALSE), lock_key, limit_key, about
      FROM ROWS FROM (
        json_to_recordset(jobs) AS (jid text, jobtype text, queue text, priority smallint, text text, retry int,
          reserve_for int, backtrace smallint, result_ttl int, at timestamptz),
        json_to_recordset(options) AS (expires_at timestamptz, expires_in float, unique_key text, unique_for float,
          unique_until_start boolean, lock_key text, limit_key text, about text)) WITH ORDINALITY
        AS j (jid, jobtype, queue, priority, text, retry, reserve_for, backtrace, result_ttl, at, expires_at,
          expires_in, unique_key, unique_for, unique_until_start, lock_key, limit_key, about, nth)
      WHERE met IS NULL OR NOT met ? jid
      ON CONFLICT DO NOTHING;
    END IF;
    GET DIAGNOSTICS added = ROW_COUNT;

    IF is_lone THEN
      EXIT WHEN added = 1;
      -- A stored job has its jid or its key: look at it.
      is_lone := FALSE;
      may_exist := TRUE;
      jids := ARRAY[jobs #>> '{0,jid}'];
      places := '{0}';
    ELSE
      EXIT WHEN keys IS NULL OR added + (SELECT count(*) FROM jsonb_object_keys(met)) = cardinality(places);
      -- Another push took a jid or key between the look and the INSERT: look again, and see its row.
      IF replaced IS NOT NULL OR round = 10 THEN
        RAISE serialization_failure USING MESSAGE = 'other pushes took the same unique keys meanwhile';
      END IF;
      may_exist := TRUE;
    END IF;
  END LOOP;

  IF scans IS NOT NULL THEN
    PERFORM set_config('enable_seqscan', scans[1], TRUE), set_config('enable_bitmapscan', scans[2], TRUE);
  END IF;
  IF blocking IS NOT NULL THEN
    RETURN QUERY SELECT 'blocked', unnest(blocking);
  END IF;
  IF met IS NOT NULL THEN
    RETURN QUERY SELECT 'refused', key FROM jsonb_each_text(met) WHERE value = 'refused';
  END IF;
END
$$;
