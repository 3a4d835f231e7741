"""Queries of jobs: which of the two tables a query reads, `django_faktory_job` or `django_faktory_history` (ADR 0048).

A query that names states reads only the tables that can have them. Others read both, by a UNION ALL in place of the
table: PostgreSQL and SQLite read the indexes of both in order. MariaDB would build the whole union first, so there
filters, order and limit of the query are repeated in each part.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

from django.apps import apps
from django.core.exceptions import FullResultSet
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.sql import AND, Query
from django.db.models.sql.compiler import SQLCompiler
from django.db.models.sql.datastructures import BaseTable

from ..core.lifecycle import ENDED, State

LIVE_TABLE, HISTORY_TABLE = "django_faktory_job", "django_faktory_history"
LIVE, HISTORY, BOTH = frozenset({LIVE_TABLE}), frozenset({HISTORY_TABLE}), frozenset({LIVE_TABLE, HISTORY_TABLE})


def tables_of(states: Iterable[State | str]) -> frozenset[str]:
    """Return the tables that can have jobs in these states."""
    return frozenset(HISTORY_TABLE if state in ENDED else LIVE_TABLE for state in states)


class JobQuery(Query):
    """A query that reads one table of jobs, or both."""

    tables: frozenset[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tables = BOTH

    def combine(self, rhs: Query, connector: str) -> None:
        """Merge another query of jobs into this one."""
        super().combine(rhs, connector)
        tables = getattr(rhs, "tables", BOTH)
        self.tables = self.tables & tables if connector == AND else self.tables | tables


class JobTable(BaseTable):
    """The tables of jobs that a query reads, under the name of the first one."""

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, tuple[Any, ...]]:
        """Return what stands in FROM."""
        query: Any = compiler.query
        sql, own_params = super().as_sql(compiler, connection)
        if query.tables == LIVE:
            return sql, own_params
        quote = connection.ops.quote_name
        # As the compiler names columns: Django quotes an alias from 6.1 on.
        alias = sql.removeprefix(quote(self.table_name)).strip() or quote(self.table_name)
        if query.tables == HISTORY:
            return f"{quote(HISTORY_TABLE)} {alias}", ()
        select = f"SELECT {', '.join(f'{alias}.{quote(column)}' for column in _needed(compiler))} FROM"
        if connection.vendor != "mysql":
            parts = [f"{select} {quote(table)} {alias}" for table in sorted(BOTH)]
            return f"({' UNION ALL '.join(parts)}) {alias}", ()
        condition, params = _repeated(compiler, alias)
        parts = [f"({select} {quote(table)} {alias}{condition})" for table in sorted(BOTH)]
        return f"({' UNION ALL '.join(parts)}) {alias}", (*params, *params)


JobQuery.base_table_class = JobTable


@cache
def columns_of_jobs() -> dict[str, str]:
    """Return the columns that both tables have, by the names of their fields."""
    fields: Any = apps.get_model("django_faktory.Job")._meta.concrete_fields  # noqa: SLF001  (documented)
    return {field.name: field.column for field in fields}


def _order_of(query: Any) -> list[tuple[str, bool]] | None:
    """Return the columns by which the query is ordered, each with whether it descends; None if not by columns alone."""
    names = [
        name.replace("pk", "id") if name in ("pk", "-pk") else name for name in query.order_by if isinstance(name, str)
    ]
    columns = columns_of_jobs()
    if len(names) < len(query.order_by) or any(name.lstrip("-") not in columns for name in names):
        return None
    return [(columns[name.lstrip("-")], name.startswith("-")) for name in names]


def _needed(compiler: SQLCompiler) -> list[str]:
    """Return the columns that the query reads: a MariaDB that builds the union writes no others."""
    query: Any = compiler.query
    order = _order_of(query)
    if order is None or query.group_by is not None or query.extra or query.distinct_fields:
        return list(columns_of_jobs().values())
    expressions = [query.where, *(expression for expression, *_ in compiler.select or ())]
    needed = {column.target.column for column in query._gen_cols(expressions)} | {"id"}  # noqa: SLF001
    needed |= {column for column, _ in order}
    return [column for column in columns_of_jobs().values() if column in needed]


def _repeated(compiler: SQLCompiler, alias: str) -> tuple[str, list[Any]]:
    """Return the filters, order and limit of the query, as far as each part of its union can repeat them."""
    query: Any = compiler.query
    sql, params = "", list[Any]()
    if query.get_external_cols() or query.group_by is not None:
        return sql, params
    with suppress(FullResultSet):
        where, where_params = compiler.compile(query.where)
        sql, params = f" WHERE {where}", [*where_params]
    order = _order_of(query)
    if query.high_mark is not None and not query.distinct and order is not None:
        quote = compiler.connection.ops.quote_name
        terms = ", ".join(f"{alias}.{quote(column)}{' DESC' * descends}" for column, descends in order)
        sql += f"{' ORDER BY ' * bool(terms)}{terms} LIMIT {query.high_mark}"
    return sql, params
