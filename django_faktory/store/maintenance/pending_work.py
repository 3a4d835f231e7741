"""Check in one query whether any time-based work is due. Changes nothing.

Django compiles a query each time it is used, which takes several times as long as the database needs to answer this
one. So the SQL text is compiled once per database.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

from ...models import Job, Limiter, MaintenanceTurn
from ...models.cron import CronEntry
from ..cron.entries import find_unscheduled
from ..dialects.bounds import Bounds, Drawn
from ..jobs.failures import reserved_jobs
from ..locks.locks import unmarked_locks
from ..transactions import select
from ..workers import find_stale_workers
from .due import find_delayed_jobs, find_expiring_jobs


class PendingWork(NamedTuple):
    """Result of `find_pending_work`: when work is due, and which kinds of work are pending."""

    due_in_s: float | None
    """Seconds until the next scheduled or retrying job is due, at most 0 if one is due; None if there is none."""
    has_expired_locks: bool = False
    """Whether locks have expired."""
    has_expired_reservations: bool = False
    """Whether reservations have expired (W19). Like the next three, False if it was not requested."""
    has_silent_workers: bool = False
    """Whether workers have stopped sending heartbeats (W20)."""
    has_expired_jobs: bool = False
    """Whether jobs have expired."""
    has_unscheduled_entries: bool = False
    """Whether rows of cron entries were written without their next tick."""
    tick_in_s: float | None = None
    """Seconds until the next run of a cron entry; None if there is none."""
    opens_in_s: float | None = None
    """Seconds until a limiter makes the next set of jobs ready; None if no job waits for a rate."""
    turn_in_s: float | None = None
    """Seconds until the next turn at one of the given steps may be taken; None if none of them has a row."""
    due_at: datetime | None = None
    """When the next scheduled or retrying job is due."""


def find_pending_work(
    *,
    using: str,
    now: datetime | None = None,
    worker_timeout_s: float | None = None,
    steps: tuple[str, ...] = (),
    bounds: Bounds | None = None,
) -> PendingWork:
    """Return when the next job and the next turn at one of `steps` are due; with `worker_timeout_s` also whether other
    work is pending.

    Each part reads the head of an index, so its cost does not depend on the number of stored jobs. `bounds` has a bound
    for queries with the same parameters, before which PostgreSQL keeps entries of ended jobs (ADR 0046).
    """
    sql, values, heads = _build_statement(using, worker_timeout_s, steps)
    bounds = bounds or Bounds()
    look = bounds.look([_TIMES])
    if is_postgresql := connections[using].vendor == "postgresql":
        names, _, starts, _, late = look.values
        # An xid for each bound, but not for each second: bounds are used while queries from the beginning take long.
        values = (names, starts, late, *values, not look.full)
    [row] = select(sql, values, using=using)
    clock, *times = (value if value is None else _convert_time(connections[using], value) for value in row[: heads + 4])
    # Compared with the database's clock: the clocks of two nodes may differ.
    delays_s = [None if time is None else (time - (now or clock)).total_seconds() for time in times]  # type: ignore[operator]  # the first column is never NULL
    due_in_s = min((seconds for seconds in delays_s[3:] if seconds is not None), default=None)
    due_at = min(filter(None, times[3:]), default=None)
    checks = [*row[heads + 4 :]]
    if is_postgresql:
        *checks, seen, xid = checks
        # No bound passes what is over: it stays until a step has committed.
        drawn = [] if any(checks) else [Drawn(_TIMES, 0, due_at, seen, xid, clock)]  # type: ignore[arg-type]
        bounds.conclude(look, [(_TIMES, 0)], drawn)
    has_expired_locks, *requested = map(bool, checks)
    has_expired_reservations, has_silent_workers, has_expired_jobs, has_unscheduled_entries = requested or [False] * 4
    return PendingWork(
        due_in_s=due_in_s,
        has_expired_locks=has_expired_locks,
        has_expired_reservations=has_expired_reservations,
        has_silent_workers=has_silent_workers,
        has_expired_jobs=has_expired_jobs,
        has_unscheduled_entries=has_unscheduled_entries,
        tick_in_s=delays_s[0],
        opens_in_s=delays_s[1],
        turn_in_s=delays_s[2],
        due_at=due_at,
    )


@lru_cache(maxsize=8)
def _build_statement(
    using: str, worker_timeout_s: float | None, steps: tuple[str, ...]
) -> tuple[str, tuple[Any, ...], int]:
    """Return the statement, its values, and the number of columns with the times of due jobs.

    Before these it has four columns: the database's time, the next cron run, the next limiter that opens and the next
    turn. Each time is the first entry of an index (of a turn: of a small table), compared outside the subquery. For an
    EXISTS with a time condition, PostgreSQL may scan the table if its statistics suggest that many rows match.
    """
    connection = connections[using]
    # Rows without a time are left out: SQLite and MariaDB sort NULL first, so it would be the head of the index.
    ticks = CronEntry.objects.using(using).filter(next_at__isnull=False)
    opening = Limiter.objects.using(using).filter(opens_at__isnull=False)
    due = [jobs.filter(run_at__isnull=False) for jobs in find_delayed_jobs(connection, using=using)]
    heads = [_compile_first(ticks, "next_at", using), _compile_first(opening, "opens_at", using)]
    # Rows of steps that another version of this package has do not count.
    heads.append(_compile_first(MaintenanceTurn.objects.using(using).filter(step__in=steps or [""]), "next_at", using))
    heads += [_compile_first(_behind_bound(jobs, "run_at"), "run_at", using) for jobs in due]
    now, now_values = _compile_now(using)
    checks = [_compile_first_over(unmarked_locks(using=using), "expires_at", using)]
    if worker_timeout_s is not None:
        checks.append(_compile_first_over(reserved_jobs(using=using), "reserved_until", using))
        # A condition is cheap here: the tables have one row per worker process, or per cron entry.
        stale, values = _compile(find_stale_workers(worker_timeout_s, using=using).values("pk"), using)
        checks.append((f"EXISTS ({stale})", values))
        checks.append(_compile_first_over(find_expiring_jobs(using=using), "expires_at", using))
        unscheduled, values = _compile(find_unscheduled(using=using).values("pk"), using)
        checks.append((f"EXISTS ({unscheduled})", values))
    parts = [(now, now_values), *heads]
    for sql, values in checks:
        parts.append((sql, values) if sql.startswith("EXISTS") else (f"{sql} <= {now}", (*values, *now_values)))
    bound = ""
    if connection.vendor == "postgresql":
        bound = _BOUND
        parts.append((_SEEN, ()))
    return (
        f"{bound}SELECT {', '.join(sql for sql, _ in parts)}",
        tuple(value for _, params in parts for value in params),
        len(heads) - 3,
    )


_TIMES = ""
"""Name of the bound of times, which no queue has."""
_BOUND = """
WITH bound (at) AS (
  SELECT starts[cardinality(starts)] FROM faktory_starts_1(%s, %s, %s, pg_current_snapshot()) AS f (starts))
"""
_SEEN = "pg_current_snapshot()::text, CASE WHEN %s THEN pg_current_xact_id()::text::bigint END"


def _compile_first_over(rows: QuerySet[Any], column: str, using: str) -> tuple[str, tuple[Any, ...]]:
    # With an end: later entries may be those of jobs that ended before their time was over.
    return _compile_first(_behind_bound(rows, column, **{f"{column}__lte": Now()}), column, using)


def _behind_bound(rows: QuerySet[Any], column: str, **conditions: Any) -> QuerySet[Any]:
    """Leave out times before the bound, and rows that do not meet the conditions, on PostgreSQL."""
    if connections[rows.db].vendor != "postgresql":
        return rows
    return rows.filter(**{f"{column}__gte": RawSQL("SELECT at FROM bound", ())}, **conditions)


def _compile_first(rows: QuerySet[Any], column: str, using: str) -> tuple[str, tuple[Any, ...]]:
    """Return a subquery for the lowest value of the column: the head of an index."""
    sql, values = _compile(rows.order_by(column).values(column)[:1], using)
    return f"({sql})", values


def _compile(rows: QuerySet[Any], using: str) -> tuple[str, tuple[Any, ...]]:
    sql, values = rows.query.get_compiler(using).as_sql()
    return sql, tuple(values)


def _compile_now(using: str) -> tuple[str, tuple[Any, ...]]:
    sql, values = Job.live.using(using).query.get_compiler(using).compile(Now())
    return sql, tuple(values)


def _convert_time(connection: BaseDatabaseWrapper, value: Any) -> datetime:
    """Convert a value as the ORM converts this database's times."""
    column = Job._meta.get_field("run_at").get_col(Job._meta.db_table)  # noqa: SLF001  (Django's documented name)
    # Raw SQL returns times in the database's own type, such as text on SQLite.
    for convert in connection.ops.get_db_converters(column):
        value = convert(value, column, connection)
    moment: datetime = value
    return moment
