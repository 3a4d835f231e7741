"""Count rows of several sets in one statement, each up to a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db.models import QuerySet

from ..chunks import chunks
from ..transactions import select

AT_ONCE = 200
"""Counts in one statement: SQLite allows 2,000 columns."""

Part = tuple[str, tuple[Any, ...]]


def counts(sets: Sequence[QuerySet[Any]], *, max_count: int, using: str) -> list[int]:
    """Return the number of rows of each set, at most `max_count` each.

    No set is read to its end. Sets in the order of an index are read through it: see `scan.in_index_order`.
    """
    parts = [_compile_count(rows.values("pk")[:max_count], using) for rows in sets]
    return [int(value) for portion in chunks(parts, AT_ONCE) for value in _execute(portion, using)]


def _compile_count(rows: QuerySet[Any], using: str) -> Part:
    try:
        sql, values = rows.query.get_compiler(using).as_sql()
    # Django compiles no SQL for a set that is always empty, such as `pk__in=[]`.
    except EmptyResultSet:
        return "0", ()
    # The LIMIT of the inner query ends the count early.
    return f"(SELECT COUNT(*) FROM ({sql}) counted)", tuple(values)


def _execute(parts: Sequence[Part], using: str) -> tuple[Any, ...]:
    [row] = select(
        f"SELECT {', '.join(sql for sql, _ in parts)}", [value for _, values in parts for value in values], using=using
    )
    return row
