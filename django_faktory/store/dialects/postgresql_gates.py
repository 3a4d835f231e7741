"""What PostgreSQL's claim says of limits: whom they concern, and which queues give out nothing. ADR 0016."""

from __future__ import annotations

from .base import GATE, LIMIT, QUEUE

# Names of tasks and queues with limits: read once a claim, from a table that is nearly always empty or small.
IS_GATED = f"""(j.limit_key IS NOT NULL
  OR j.jobtype = ANY (ARRAY(SELECT name::text FROM {LIMIT} WHERE scope = 'task'))
  OR j.queue = ANY (ARRAY(SELECT name::text FROM {LIMIT} WHERE scope = 'queue')))"""


def withheld(clock: int) -> str:
    """The queues that give out nothing: paused, or with a limit whose gate is shut."""
    return f"""ARRAY(SELECT name::text FROM {QUEUE} WHERE paused_at IS NOT NULL
    UNION ALL SELECT name::text FROM {GATE} WHERE scope = 'queue'
      AND (in_use >= concurrency OR opens_at > COALESCE(${clock}, STATEMENT_TIMESTAMP())))"""
