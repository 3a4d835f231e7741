-- Store pushed jobs: plain ones, and those with options, a lock or a unique key (ADR 0043).
--
-- A finished job with the jid of a pushed one is replaced; any other stays, and the push of it does nothing (W10). A
-- unique key belongs to one job: to the stored one, else to the one with the lowest place in the set (W27).
--
-- Rows of the result: 'refused' and the jid of a job whose key is taken; 'blocked' and a lock key that a stored job
-- waits for; 'undecided' and a jid, if the transaction cannot see which keys are taken.
CREATE OR REPLACE FUNCTION faktory_push_1 (
  jobs json,         -- array of objects, in the order in which all transactions insert (ADR 0024); empty: only lock
  places int[],      -- places of these jobs in the set: they are claimed in this order
  jids text[],       -- jids that may be stored already; of several calls the first one names those of all (ADR 0030)
  keys text[],       -- unique keys of the jobs, in the same way
  has_options boolean,
  clock timestamptz  -- the time; NULL: that of the database
)
RETURNS TABLE (outcome text, subject text)
LANGUAGE plpgsql
-- A plan made while the table was empty must not read it from end to end when it has grown.
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
  is_keyed CONSTANT boolean := cardinality(keys) > 0;
  may_exist CONSTANT boolean := is_keyed OR cardinality(jids) > 0;
  size CONSTANT int := cardinality(places);
  moment timestamptz := COALESCE(clock, clock_timestamp());
  ids bigint[];            -- rows that this push may change
  met jsonb := '{}';       -- outcome by jid: 'kept', 'refused' or 'stored'
  attempts jsonb := '{}';  -- attempts of the finished jobs to replace, by jid
  stored jsonb;
  blocked text[];
BEGIN
  IF is_keyed AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
    -- Its snapshot does not show a key that was taken since the transaction began: the INSERT would be an error.
    RETURN QUERY SELECT 'undecided', j.jid FROM json_to_recordset(jobs) AS j (jid text);
    RETURN;
  END IF;

  FOR round IN 1..10 LOOP
    -- A lone job is looked up only after its INSERT did nothing: until then it has no row locked while it waits.
    IF may_exist AND (size <> 1 OR round > 1) THEN
      -- Rows are found by lateral joins with OFFSET 0: any other form may be planned as a join that reads the table.
      SELECT array_agg(DISTINCT id ORDER BY id) FILTER (WHERE is_over),
        met || COALESCE(jsonb_object_agg(jid, 'kept') FILTER (WHERE NOT is_over), '{}')
      INTO ids, met
      FROM (
        SELECT old.* FROM unnest((SELECT jids)) AS r (jid) CROSS JOIN LATERAL (
          SELECT id, jid, state IN ('discarded', 'expired', 'succeeded')
            OR (state = 'dead' AND bid IS NULL AND callback_of IS NULL) AS is_over
          FROM django_faktory_job WHERE jid = r.jid OFFSET 0) AS old
        UNION ALL
        SELECT old.* FROM unnest((SELECT keys)) AS r (key) CROSS JOIN LATERAL (
          SELECT id, jid, TRUE FROM django_faktory_job
          WHERE unique_key = r.key AND unique_expires_at <= moment OFFSET 0) AS old) AS found;
      IF ids IS NOT NULL THEN
        -- By id, as in all transactions (ADR 0024), and before the first INSERT (ADR 0030). What counts is the row as
        -- it is once it is locked.
        SELECT attempts || COALESCE(jsonb_object_agg(jid, attempt) FILTER (WHERE is_over), '{}'),
          met || COALESCE(jsonb_object_agg(jid, 'kept') FILTER (WHERE NOT is_over), '{}')
        INTO attempts, met
        FROM unnest((SELECT ids)) AS r (id) CROSS JOIN LATERAL (
          SELECT jid, attempt, state IN ('discarded', 'expired', 'succeeded')
            OR (state = 'dead' AND bid IS NULL AND callback_of IS NULL) AS is_over
          FROM django_faktory_job WHERE id = r.id FOR UPDATE OFFSET 0) AS old
        WHERE NOT is_keyed OR jid = ANY (jids);
        UPDATE django_faktory_job SET unique_key = NULL
        WHERE is_keyed AND id = ANY (ids) AND unique_key = ANY (keys) AND unique_expires_at <= moment;
        moment := COALESCE(clock, clock_timestamp());
      END IF;
      EXIT WHEN size = 0;
      IF is_keyed THEN
        SELECT met || COALESCE(jsonb_object_agg(jid, 'refused'), '{}') INTO met FROM (
          SELECT j.jid, holder.jid IS NOT NULL
            OR row_number() OVER (PARTITION BY j.options ->> 'unique_key' ORDER BY places[nth]) > 1 AS is_taken
          FROM ROWS FROM (json_to_recordset(jobs) AS (jid text, options json)) WITH ORDINALITY AS j (jid, options, nth)
          LEFT JOIN LATERAL (
            SELECT jid FROM django_faktory_job
            WHERE unique_key = j.options ->> 'unique_key' AND jid <> j.jid OFFSET 0) AS holder ON TRUE
          WHERE j.options ->> 'unique_key' IS NOT NULL AND NOT met ? j.jid) AS claimant
        WHERE is_taken;
      END IF;
      IF attempts <> '{}' THEN
        DELETE FROM django_faktory_job WHERE id = ANY (ids) AND attempts ? jid AND NOT met ? jid;
      END IF;
    END IF;

    IF NOT has_options THEN
      INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for, backtrace,
        result_ttl, run_at, enqueued_at, attempt)
      SELECT jid, jobtype, queue, CASE WHEN at > moment THEN 'scheduled' ELSE 'enqueued' END, -priority, text, retry,
        reserve_for, backtrace, result_ttl, CASE WHEN at > moment THEN at END,
        CASE WHEN at > moment THEN NULL ELSE moment + make_interval(secs => places[nth] / 1e6) END,
        COALESCE((attempts ->> jid)::int, 0)
      FROM ROWS FROM (json_to_recordset(jobs) AS (jid text, jobtype text, queue text, priority smallint, text text,
        retry int, reserve_for int, backtrace smallint, result_ttl int, at timestamptz)) WITH ORDINALITY
        AS j (jid, jobtype, queue, priority, text, retry, reserve_for, backtrace, result_ttl, at, nth)
      ON CONFLICT DO NOTHING;
      -- Nothing is stored for a lone job whose jid is: it is replaced, or it stays.
      EXIT WHEN FOUND OR size <> 1 OR round > 1;
    ELSE
      WITH job AS (
        SELECT j.*, o.*, places[nth] AS place, COALESCE(at > moment, FALSE) AS waits, GREATEST(at, moment) AS begins
        FROM ROWS FROM (json_to_recordset(jobs) AS (jid text, jobtype text, queue text, priority smallint, text text,
          retry int, reserve_for int, backtrace smallint, result_ttl int, at timestamptz, options json)) WITH ORDINALITY
          AS j (jid, jobtype, queue, priority, text, retry, reserve_for, backtrace, result_ttl, at, options, nth)
        CROSS JOIN LATERAL json_to_record(COALESCE(options, '{}')) AS o (expires_at timestamptz, expires_in float,
          unique_key text, unique_for float, unique_until_start boolean, lock_key text, limit_key text, about text)
        WHERE NOT met ? jid),
      pushed AS (
        INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for,
          backtrace, result_ttl, run_at, enqueued_at, attempt, created_at, expires_at, unique_key, unique_expires_at,
          unique_until_start, lock_key, limit_key, about)
        SELECT jid, jobtype, queue,
          -- A job is blocked from the start if its lock is taken, or another job of its key is ready (ADR 0015).
          CASE WHEN waits THEN 'scheduled' WHEN lock_key IS NOT NULL AND (
              row_number() OVER (PARTITION BY lock_key, queue, priority, waits ORDER BY place) > 1
              OR (SELECT id FROM django_faktory_joblock AS held
                WHERE held.lock_key = job.lock_key AND held.expires_at > moment LIMIT 1) IS NOT NULL
              OR (SELECT id FROM django_faktory_job AS ready
                WHERE ready.lock_key = job.lock_key AND ready.state = (SELECT 'enqueued')
                  AND ready.queue = job.queue AND ready.sort_priority = -job.priority
                ORDER BY ready.enqueued_at, ready.id LIMIT 1) IS NOT NULL)
            THEN 'blocked' ELSE 'enqueued' END,
          -priority, text, retry, reserve_for, backtrace, result_ttl,
          CASE WHEN waits THEN at END, CASE WHEN NOT waits THEN moment + make_interval(secs => place / 1e6) END,
          COALESCE((attempts ->> jid)::int, 0), moment,
          -- No duration ends after the calendar.
          LEAST(expires_at, CASE WHEN expires_in IS NOT NULL
            THEN LEAST(begins + make_interval(secs => LEAST(expires_in, 3e11)), '9999-12-31T00:00:00Z') END),
          unique_key, CASE WHEN unique_key IS NOT NULL
            THEN LEAST(begins + make_interval(secs => LEAST(unique_for, 3e11)), '9999-12-31T00:00:00Z') END,
          unique_until_start, lock_key, limit_key, about
        FROM job ORDER BY nth
        ON CONFLICT DO NOTHING
        RETURNING jid, state, lock_key)
      SELECT COALESCE(jsonb_object_agg(jid, 'stored'), '{}'),
        COALESCE(array_agg(DISTINCT lock_key) FILTER (WHERE state = 'blocked'), '{}')
      INTO stored, blocked FROM pushed;
      met := met || stored;
      RETURN QUERY SELECT 'blocked', unnest(blocked);
      IF is_keyed THEN
        EXIT WHEN (SELECT count(*) FROM jsonb_object_keys(met)) >= size;
        -- Another push took a jid or a key between the look and the INSERT: look again, and see its row.
        IF round = 10 OR EXISTS (SELECT FROM jsonb_object_keys(attempts) AS a (jid) WHERE NOT met ? a.jid) THEN
          RAISE serialization_failure USING MESSAGE = 'another push took the same unique keys meanwhile';
        END IF;
      ELSE
        EXIT WHEN stored <> '{}' OR size <> 1 OR round > 1;
      END IF;
    END IF;
  END LOOP;
  IF is_keyed THEN
    RETURN QUERY SELECT 'refused', key FROM jsonb_each_text(met) WHERE value = 'refused';
  END IF;
END
$$;
