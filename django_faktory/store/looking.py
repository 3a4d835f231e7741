"""One look at whether time has done anything to jobs: one statement, whatever it finds. Changes nothing.

Django builds a query anew each time it is used, which costs several times what the database takes to answer this one:
its text is made once for each database.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet
from django.db.models.functions import Now

from ..cron_models import CronEntry
from ..models import Gate, Job
from .failures import reserved_jobs
from .locks import held_locks
from .transactions import run
from .upkeep import by_time, expiring
from .workers import silent_ones


class Look(NamedTuple):
    """What a look saw."""

    due_in_s: float | None
    """Until the next scheduled or retrying job is due, 0 or less if one is; None where none waits."""
    lapsed: bool = False
    """Whether locks are over."""
    over: bool = False
    """Whether reservations are over (W19); like the next two, False where that was not asked."""
    silent: bool = False
    """Whether workers have fallen silent (W20)."""
    expired: bool = False
    """Whether jobs have expired."""
    tick_in_s: float | None = None
    """Until the next tick of a cron entry; None where none is to come."""
    opens_in_s: float | None = None
    """Until a gate lets the next set of jobs go; None where none waits for that."""


def look(*, using: str, now: datetime | None = None, worker_timeout_s: float | None = None) -> Look:
    """When the next job is due; with `worker_timeout_s` also whether anything else is to be done.

    Each part reads the head of an index, whatever waits behind it.
    """

    def verb(connection: BaseDatabaseWrapper) -> Look:
        sql, values, heads = _text(using, worker_timeout_s)
        with connection.cursor() as cursor:
            cursor.execute(sql, values)
            row = cursor.fetchone()
        clock, *times = (value if value is None else _time(connection, value) for value in row[: heads + 3])
        ahead = [None if time is None else (time - (now or clock)).total_seconds() for time in times]  # type: ignore[operator]  # the clock is never None
        due_in_s = min((seconds for seconds in ahead[2:] if seconds is not None), default=None)
        lapsed, over, silent, expired, *_ = (*map(bool, row[heads + 3 :]), False, False, False)
        return Look(due_in_s, lapsed, over, silent, expired, tick_in_s=ahead[0], opens_in_s=ahead[1])

    return run(using, verb, atomic=False)


@lru_cache(maxsize=8)
def _text(using: str, worker_timeout_s: float | None) -> tuple[str, tuple[Any, ...], int]:
    """The statement, its values, and how many columns after the first three, the time, the next tick and the next gate
    that opens, are times of due jobs.

    Each time is the first of an index, compared outside of the subquery: asked whether a row exists before a time,
    PostgreSQL may read the table, where its statistics say that many rows are so.
    """
    connection = connections[using]
    ticks = CronEntry.objects.using(using).filter(next_at__isnull=False)
    opening = Gate.objects.using(using).filter(opens_at__isnull=False)
    due = [jobs.filter(run_at__isnull=False) for jobs in by_time(connection, using=using)]
    heads = [_first(ticks, "next_at", using), _first(opening, "opens_at", using)]
    heads += [_first(jobs, "run_at", using) for jobs in due]
    now, now_values = _now(using)
    passed = [_first(held_locks(using=using), "expires_at", using)]
    if worker_timeout_s is not None:
        passed.append(_first(reserved_jobs(using=using), "reserved_until", using))
        silent, values = _compiled(silent_ones(worker_timeout_s, using=using).values("pk"), using)
        passed.append((f"EXISTS ({silent})", values))
        passed.append(_first(expiring(using=using), "expires_at", using))
    parts = [(now, now_values), *heads]
    for sql, values in passed:
        parts.append((sql, values) if sql.startswith("EXISTS") else (f"{sql} <= {now}", (*values, *now_values)))
    return (
        f"SELECT {', '.join(sql for sql, _ in parts)}",
        tuple(value for _, some in parts for value in some),
        len(heads) - 2,
    )


def _first(rows: QuerySet[Any], column: str, using: str) -> tuple[str, tuple[Any, ...]]:
    """The lowest value of the column: the head of an index."""
    sql, values = _compiled(rows.order_by(column).values(column)[:1], using)
    return f"({sql})", values


def _compiled(rows: QuerySet[Any], using: str) -> tuple[str, tuple[Any, ...]]:
    sql, values = rows.query.get_compiler(using).as_sql()
    return sql, tuple(values)


def _now(using: str) -> tuple[str, tuple[Any, ...]]:
    sql, values = Job.objects.using(using).query.get_compiler(using).compile(Now())
    return sql, tuple(values)


def _time(connection: BaseDatabaseWrapper, value: Any) -> datetime:
    """As the ORM reads this database's times."""
    column = Job._meta.get_field("run_at").get_col(Job._meta.db_table)  # noqa: SLF001  (Django's documented name)
    for convert in connection.ops.get_db_converters(column):
        value = convert(value, column, connection)
    found: datetime = value
    return found
