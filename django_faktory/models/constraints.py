"""Invariants of every live job's row, as one expression for one CHECK constraint.

One, not eight, with lists as single constants: PostgreSQL parses a table's constraints again for each statement that
writes to it, at a cost that grows with their texts. As eight they took 50 of the 85 µs of an INSERT, as one 23 µs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, F, Func, Q, When
from django.db.models.sql.compiler import SQLCompiler

from ..core.lifecycle import State


class OneOf(Func):
    """Test that a column has one of these values, as one constant on PostgreSQL."""

    output_field = models.BooleanField()

    def __init__(self, column: str, words: Sequence[str]) -> None:
        super().__init__(F(column))
        self.words = list(words)

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *_: Any, **__: Any) -> tuple[str, Any]:  # noqa: ARG002
        """Build the expression for every database except PostgreSQL."""
        column, params = compiler.compile(self.source_expressions[0])
        return f"{column} IN ({', '.join(['%s'] * len(self.words))})", [*params, *self.words]

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, Any]:  # noqa: ARG002
        """Build the expression for PostgreSQL, which would otherwise convert IN to an array each time."""
        column, params = compiler.compile(self.source_expressions[0])
        return f"{column} = ANY (%s)", [*params, f"{{{','.join(self.words)}}}"]


_QUEUED = [str(state) for state in (State.ENQUEUED, State.BLOCKED)]
_LATER = [str(state) for state in (State.SCHEDULED, State.RETRIES)]

# Always false at their position in the CASE. With a plain value instead, Django would compare the whole expression as
# text on MariaDB.
NEVER_AT_LIMITER, NEVER_WITH_PERMIT = Q(limiter__isnull=True), Q(permits__isnull=True)

JOB_CONSTRAINT = Q(sort_priority__gte=-100, sort_priority__lte=100) & Q(
    Case(
        # A waiting job has a position in its queue, and no permit before it runs; only waiting jobs are blocked at a
        # limiter.
        When(OneOf("state", _QUEUED), then=Q(enqueued_at__isnull=False, permits__isnull=True)),
        When(limiter__isnull=False, then=NEVER_AT_LIMITER),
        # A working job was claimed, and its reservation ends at a known time.
        When(state=str(State.WORKING), then=Q(attempt__gte=1, reserved_until__isnull=False)),
        When(permits__isnull=False, then=NEVER_WITH_PERMIT),
        # Any other job becomes due, or is dead and deleted at a known time; there are no other states.
        When(OneOf("state", _LATER), then=Q(run_at__isnull=False)),
        default=Q(state=str(State.DEAD), finished_at__isnull=False, purge_at__isnull=False),
        output_field=models.BooleanField(),
    )
)
