-- Count what a statement changed in the table of jobs by state and queue (ADR 0047). Of a trigger for each statement.
--
-- A transaction has one row for each number, which no other transaction writes.
CREATE OR REPLACE FUNCTION faktory_count_jobs_1 ()
RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    INSERT INTO django_faktory_delta AS d (mark, kind, name, amount)
    SELECT pg_current_xact_id(), state, queue, COUNT(*) FROM added GROUP BY state, queue
    ON CONFLICT (mark, kind, name) DO UPDATE SET amount = d.amount + excluded.amount;
  ELSIF TG_OP = 'DELETE' THEN
    INSERT INTO django_faktory_delta AS d (mark, kind, name, amount)
    SELECT pg_current_xact_id(), state, queue, -COUNT(*) FROM removed GROUP BY state, queue
    ON CONFLICT (mark, kind, name) DO UPDATE SET amount = d.amount + excluded.amount;
  ELSE
    INSERT INTO django_faktory_delta AS d (mark, kind, name, amount)
    SELECT pg_current_xact_id(), state, name, SUM(amount) FROM (
      SELECT state, queue AS name, 1 AS amount FROM added
      UNION ALL
      SELECT state, queue, -1 FROM removed) AS changed
    GROUP BY state, name HAVING SUM(amount) <> 0
    ON CONFLICT (mark, kind, name) DO UPDATE SET amount = d.amount + excluded.amount;
  END IF;
  RETURN NULL;
END $$;

-- Count what a statement changed in the history by state and day (ADR 0047). Of a trigger for each statement.
--
-- A transaction has one row for each number, which no other transaction writes.
CREATE OR REPLACE FUNCTION faktory_count_history_1 ()
RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    INSERT INTO django_faktory_delta AS d (mark, kind, name, amount)
    SELECT pg_current_xact_id(), state, to_char(day, 'YYYY-MM-DD'), COUNT(*) FROM added GROUP BY state, to_char(day, 'YYYY-MM-DD')
    ON CONFLICT (mark, kind, name) DO UPDATE SET amount = d.amount + excluded.amount;
  ELSIF TG_OP = 'DELETE' THEN
    INSERT INTO django_faktory_delta AS d (mark, kind, name, amount)
    SELECT pg_current_xact_id(), state, to_char(day, 'YYYY-MM-DD'), -COUNT(*) FROM removed GROUP BY state, to_char(day, 'YYYY-MM-DD')
    ON CONFLICT (mark, kind, name) DO UPDATE SET amount = d.amount + excluded.amount;
  ELSE
    INSERT INTO django_faktory_delta AS d (mark, kind, name, amount)
    SELECT pg_current_xact_id(), state, name, SUM(amount) FROM (
      SELECT state, to_char(day, 'YYYY-MM-DD') AS name, 1 AS amount FROM added
      UNION ALL
      SELECT state, to_char(day, 'YYYY-MM-DD'), -1 FROM removed) AS changed
    GROUP BY state, name HAVING SUM(amount) <> 0
    ON CONFLICT (mark, kind, name) DO UPDATE SET amount = d.amount + excluded.amount;
  END IF;
  RETURN NULL;
END $$;
