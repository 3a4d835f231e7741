"""Iterate over all jobs of a state; each statement reads a bounded part of the state's index.

`ids_of` yields ids, `portions` any columns; `portion` reads one portion, for callers that store the position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, F, Func, Value
from django.db.models.sql.compiler import SQLCompiler

from ..core.lifecycle import State
from ..models import Job, JobQuerySet
from .transactions import read

PORTION = 2000

_CLAIM_ORDER = ("queue", "sort_priority", "enqueued_at", "id")
_ORDERS = {
    State.ENQUEUED: _CLAIM_ORDER,
    State.BLOCKED: _CLAIM_ORDER,
    State.SCHEDULED: ("run_at", "id"),
    State.RETRIES: ("run_at", "id"),
    State.WORKING: ("reserved_until", "id"),
    State.SUCCEEDED: ("purge_at", "id"),
}


def index_order(state: State, *, using: str) -> tuple[str, ...]:
    """Return the columns by which an index orders the jobs of this state."""
    of_failed = ("id",) if connections[using].features.supports_partial_indexes else ("purge_at", "id")
    return _ORDERS.get(state, of_failed)


def in_index_order(state: State, *, using: str) -> JobQuerySet:
    """Return the jobs of this state in the order of its index.

    Without this order PostgreSQL may scan the table to find the first of many.
    """
    return Job.objects.using(using).in_state(state).order_by(*index_order(state, using=using))


def ids_of(jobs: JobQuerySet, state: State, *, queue: str | None = None, size: int = PORTION) -> Iterator[list[int]]:
    """Yield the ids of the given jobs that are in this state, in no fixed order.

    At most `size` at a time. `jobs` may have any filters, also ones without an index: they are applied to the ids
    read from the index. Jobs stored after the iteration began are left out.
    """
    using = jobs.db
    # Without this bound, jobs that are pushed as fast as they are read would keep the iteration running.
    newest = Job.objects.using(using).order_by("-pk").values_list("pk", flat=True)[:1]
    newest_id = next(iter(read(newest)), 0)
    has_filters = jobs.query.where.children
    for rows in portions(state, ("pk",), using=using, queue=queue, size=size):
        ids = [pk for (pk,) in rows if pk <= newest_id]
        if has_filters and ids:
            matching = jobs.filter(pk__in=ids).values_list("pk", flat=True)
            ids = read(matching)
        yield ids


def portions(
    state: State, columns: Sequence[str], *, using: str, queue: str | None = None, size: int = PORTION
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield these columns of all jobs of the state in index order.

    With `queue`, only jobs of that queue; allowed for enqueued and blocked jobs.
    """
    place: Sequence[Any] | None = None
    while True:
        rows, place = portion(state, columns, using=using, queue=queue, after=place, size=size)
        yield rows
        if place is None:
            return


def portion(
    state: State,
    columns: Sequence[str],
    *,
    using: str,
    queue: str | None = None,
    after: Sequence[Any] | None = None,
    size: int = PORTION,
) -> tuple[list[tuple[Any, ...]], tuple[Any, ...] | None]:
    """Return one of `portions` and the position of the next; None as position at the end."""
    order = index_order(state, using=using)
    jobs = in_index_order(state, using=using)
    if queue is not None:
        order = order[1:]  # the first column is the queue, equal for all rows
        jobs = jobs.filter(queue=queue)
    if after is not None:
        jobs = jobs.filter(After(order, after))
    values = jobs.values_list(*columns, *order)[:size]
    # Each portion is read outside a transaction: one snapshot for all of them would keep dead rows from being vacuumed.
    rows = read(values)
    # Continue after a position instead of an OFFSET: rows that leave the index in between do not shift the next
    # portion.
    place = tuple(rows[-1][len(columns) :]) if len(rows) == size else None
    return [row[: len(columns)] for row in rows], place


class After(Func):
    """Whether a row is after these values in the order of these columns."""

    output_field = BooleanField()

    def __init__(self, columns: Sequence[str], values: Sequence[str | int | datetime]) -> None:
        fields: list[Any] = [Job._meta.get_field(column) for column in columns]  # noqa: SLF001  (Django's documented name)
        operands = [Value(value, output_field=field) for value, field in zip(values, fields, strict=True)]
        super().__init__(*map(F, columns), *operands)

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *_: Any, **__: Any) -> tuple[str, Any]:
        """Build a row comparison, or its OR terms on MariaDB, where no index serves row comparisons."""
        compiled = [compiler.compile(expression) for expression in self.source_expressions]
        half = len(compiled) // 2
        columns, values = compiled[:half], compiled[half:]
        if connection.vendor != "mysql":
            sides = (", ".join(sql for sql, _ in side) for side in (columns, values))
            return "({}) > ({})".format(*sides), [param for _, params in compiled for param in params]
        terms, params = [], []
        for place in range(half):
            pairs = list(zip(columns[: place + 1], values[: place + 1], strict=True))
            signs = ["="] * place + [">"]
            terms.append(" AND ".join(f"{c} {sign} {v}" for ((c, _), (v, _)), sign in zip(pairs, signs, strict=True)))
            params += [param for pair in pairs for _, pair_params in pair for param in pair_params]
        return f"(({') OR ('.join(terms)}))", params
