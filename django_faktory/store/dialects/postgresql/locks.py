"""PostgreSQL's statement that finds the ready jobs of lock keys (ADR 0015)."""

from __future__ import annotations

from ..base import JOB

# The state is compared with a sub-select: with a literal, the planner chooses the partial index of that state, and
# walks over all ready jobs to find those of one key.
# LIMIT bounds the work for a key with many ready jobs.
READY = f"""
SELECT ready.id, ready.lock_key, ready.queue, ready.sort_priority FROM unnest(%s::text[]) AS keys (key)
CROSS JOIN LATERAL (
  SELECT id, lock_key, queue, sort_priority FROM {JOB}
  WHERE lock_key = keys.key COLLATE "C" AND state = (SELECT 'enqueued')
  ORDER BY queue, sort_priority, enqueued_at, id LIMIT 1000) AS ready"""
