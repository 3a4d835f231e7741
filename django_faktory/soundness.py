"""What is true of each job's row, whoever wrote it: one expression, for one CHECK constraint.

One and not eight, with lists as single constants: PostgreSQL reads a table's constraints anew for each statement that
writes to it, as long as their texts are. As eight they took 50 of the 85 microseconds of an INSERT, so they take 23.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, F, Func, Q, When
from django.db.models.sql.compiler import SQLCompiler

from .lifecycle import State


class OneOf(Func):
    """Whether this column has one of these plain words."""

    output_field = models.BooleanField()

    def __init__(self, column: str, words: Sequence[str]) -> None:
        super().__init__(F(column))
        self.words = list(words)

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *_: Any, **__: Any) -> tuple[str, Any]:  # noqa: ARG002
        """Build the expression of any database."""
        column, params = compiler.compile(self.source_expressions[0])
        return f"{column} IN ({', '.join(['%s'] * len(self.words))})", [*params, *self.words]

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, Any]:  # noqa: ARG002
        """Build that of PostgreSQL, which would make an array of IN each time."""
        column, params = compiler.compile(self.source_expressions[0])
        return f"{column} = ANY (%s)", [*params, f"{{{','.join(self.words)}}}"]


_WAITING = [str(state) for state in (State.ENQUEUED, State.BLOCKED)]
_LATER = [str(state) for state in (State.SCHEDULED, State.RETRIES)]
_ENDED = [str(state) for state in (State.DEAD, State.SUCCEEDED, State.DISCARDED, State.EXPIRED)]

# Where they stand they are false. The plain value Django would write for MariaDB so that all of it is compared as text.
NEVER_AT_GATE, NEVER_WITH_PASS = Q(gate__isnull=True), Q(passes__isnull=True)

JOB_IS_SOUND = Q(weight__gte=-100, weight__lte=100) & Q(
    Case(
        # It has its place among those that wait, and no pass of a gate before it runs; at a gate nobody else is.
        When(OneOf("state", _WAITING), then=Q(enqueued_at__isnull=False, passes__isnull=True)),
        When(gate__isnull=False, then=NEVER_AT_GATE),
        # Somebody holds it, and will lose it one day.
        When(state=str(State.WORKING), then=Q(attempt__gte=1, reserved_until__isnull=False)),
        When(passes__isnull=False, then=NEVER_WITH_PASS),
        # It becomes due one day; it is deleted one day; there are no other states.
        When(OneOf("state", _LATER), then=Q(run_at__isnull=False)),
        default=Q(OneOf("state", _ENDED), finished_at__isnull=False, purge_at__isnull=False),
        output_field=models.BooleanField(),
    )
)
