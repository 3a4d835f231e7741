-- Count what a statement changed in the table of jobs by state and queue (ADR 0047). Of a trigger for each statement.
CREATE OR REPLACE FUNCTION faktory_count_jobs_1 ()
RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    INSERT INTO django_faktory_delta (kind, name, amount) SELECT state, queue, COUNT(*) FROM added GROUP BY state, queue;
  ELSIF TG_OP = 'DELETE' THEN
    INSERT INTO django_faktory_delta (kind, name, amount) SELECT state, queue, -COUNT(*) FROM removed GROUP BY state, queue;
  ELSE
    INSERT INTO django_faktory_delta (kind, name, amount)
    SELECT state, queue, SUM(amount) FROM (
      SELECT state, queue, 1 AS amount FROM added UNION ALL SELECT state, queue, -1 FROM removed) AS changed
    GROUP BY state, queue HAVING SUM(amount) <> 0;
  END IF;
  RETURN NULL;
END $$;

-- Count what a statement changed in the history by state and day (ADR 0047). Of a trigger for each statement.
CREATE OR REPLACE FUNCTION faktory_count_history_1 ()
RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP <> 'INSERT' THEN
    INSERT INTO django_faktory_delta (kind, name, amount)
    SELECT state, to_char(day, 'YYYY-MM-DD'), -COUNT(*) FROM removed GROUP BY state, day;
  END IF;
  IF TG_OP <> 'DELETE' THEN
    INSERT INTO django_faktory_delta (kind, name, amount)
    SELECT state, to_char(day, 'YYYY-MM-DD'), COUNT(*) FROM added GROUP BY state, day;
  END IF;
  RETURN NULL;
END $$;
