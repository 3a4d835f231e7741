-- Names of the tasks or queues (`kind`: 'task' or 'queue') whose jobs need a permit. Inlined as `faktory_closed_queues_1`.
CREATE OR REPLACE FUNCTION faktory_limited_names_1 (
  kind text
)
RETURNS SETOF text
LANGUAGE sql STABLE AS $$
  SELECT name::text FROM django_faktory_limit WHERE scope = kind
$$;
