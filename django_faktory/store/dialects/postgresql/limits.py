"""PostgreSQL's condition for queues that a limiter or a pause closes (ADR 0016)."""

from __future__ import annotations

from ..base import LIMITER, QUEUE


def closed_queues(clock: int) -> str:
    """Return SQL for the array of queues without claims: paused, or with a limiter that is full or not open yet."""
    return f"""ARRAY(SELECT name::text FROM {QUEUE} WHERE paused_at IS NOT NULL
    UNION ALL SELECT name::text FROM {LIMITER} WHERE scope = 'queue'
      AND (is_paused OR in_use >= concurrency OR opens_at > COALESCE(${clock}, STATEMENT_TIMESTAMP())))"""
