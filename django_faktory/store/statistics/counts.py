"""Counts for INFO, metrics and the admin: from one snapshot, and equal on every node (W22).

`read_exact_counts` is exact; `read_bounded_counts` stops at a limit. The `shared_…` functions share their reads between
callers.
"""

from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Count, QuerySet

from ...core.lifecycle import State
from ...models import Batch, Counter, Job, Queue, WorkerProcess
from .. import scan
from ..dialects import dialect_of
from ..dialects.values import TOTALS
from ..queues import Waiting
from ..shared_reads import shared
from ..store import Store
from ..transactions import run
from ..workers import living

_COUNTER = Counter._meta.db_table  # noqa: SLF001  (documented)
_QUEUES, _BATCHES, _WORKERS, _TOTAL = "queues", "batches", "workers", "totals"
_DUE = "due"
_WHOLE = frozenset({str(State.WORKING), _WORKERS, _TOTAL})
"""Kinds that are always counted completely: they have at most as many rows as worker processes have threads."""

Row = tuple[str, str, int, float]
"""Kind, name, count, and the age in seconds of the oldest job; for a queue 1 if it is paused, for a total its value."""

_QUEUED = frozenset(map(str, (State.ENQUEUED, State.BLOCKED)))
_SETS = (State.BLOCKED, State.DEAD, State.RETRIES, State.SCHEDULED, State.WORKING)

Part = tuple[str, tuple[Any, ...]]


class CountLimits(NamedTuple):
    """Rows that one statement counts, chosen so that it reads fewer than 2,000 pages.

    With these sizes PostgreSQL uses the index even before a vacuum, when it has to look into the table for each row.
    """

    at_once: int = 5_000
    """Rows of each set of jobs and of batches in the first statement."""
    queues: int = 30_000
    """Rows of the table of queues in the first statement."""
    portion: int = 20_000
    """Rows of one set in each further statement."""

    def is_full(self, kind: str, count: int) -> bool:
        """Return whether a set may have more rows than the first statement counted."""
        return kind not in _WHOLE and count >= (self.queues if kind == _QUEUES else self.at_once)


SIZES = CountLimits()


@dataclass(slots=True)
class AllCounts:
    """Everything that is counted, by name."""

    queues: dict[str, int] = field(default_factory=dict)
    """Enqueued and blocked jobs of every queue that is known or has such jobs."""
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """The same in detail, and how long the oldest jobs have waited; queues without jobs are left out."""
    paused: set[str] = field(default_factory=set)
    sets: dict[str, int] = field(default_factory=dict)
    """Jobs by state; blocked jobs are in the sizes of their queues too."""
    workers: dict[str, int] = field(default_factory=dict)
    """Live worker processes by state."""
    batches: dict[str, int] = field(default_factory=dict)
    """Unfinished batches: open and committed."""
    totals: dict[str, int] = field(default_factory=dict)
    """Ended jobs, failures and late reports since the beginning."""
    full: set[str] = field(default_factory=set)
    """Kinds of sets of which only the first rows were counted; they may be larger."""

    @property
    def is_complete(self) -> bool:
        """Return whether every set was counted completely."""
        return not self.full

    @property
    def has_all_queues(self) -> bool:
        """Return whether every queue and every job in a queue was counted."""
        return not self.full & {*_QUEUED, _QUEUES}

    def of(self, state: State) -> int:
        """Return the number of jobs in a state; not for finished states other than dead."""
        # The sizes of queues include blocked jobs (ADR 0015).
        if state is State.ENQUEUED:
            return sum(self.queues.values()) - self.sets[str(State.BLOCKED)]
        return self.sets[str(state)]

    def is_partial(self, state: State) -> bool:
        """Return whether only the first jobs of this state were counted."""
        return str(state) in self.full or (_DUE in self.full and state in (State.SCHEDULED, State.RETRIES))

    def info(self) -> dict[str, Any]:
        """Return the counts in the format of `Broker.info`."""
        return {
            "queues": self.queues,
            "sets": self.sets,
            "total_processed": self.totals["processed"],
            "total_failures": self.totals["failed"],
            "total_late": self.totals["late"],
            # Blocked jobs count as enqueued: clients of the protocol do not know that state (ADR 0015).
            "total_enqueued": sum(self.queues.values()),
            "total_queues": len(self.queues),
            "workers": sum(self.workers.values()),
        }


def read_bounded_counts(*, using: str, worker_timeout_s: float = 60, sizes: CountLimits = SIZES) -> AllCounts:
    """Read all counts with one statement, each up to `sizes`."""
    # In a snapshot PostgreSQL plans without sequential scans. Sessions of requests allow them (ADR 0043).
    return run(
        using, lambda connection: _sum_up(_read_first(connection, worker_timeout_s, sizes), sizes), snapshot=True
    )


def read_exact_counts(*, using: str, worker_timeout_s: float = 60, sizes: CountLimits = SIZES) -> AllCounts:
    """Read all counts from one snapshot, large sets in portions, in a read-only transaction.

    No statement reads more than about 2,000 pages of a vacuumed table. In the caller's transaction each portion sees
    what that transaction sees.
    """

    def verb(connection: BaseDatabaseWrapper) -> AllCounts:
        rows = _read_first(connection, worker_timeout_s, sizes)
        result = _sum_up(rows, sizes)
        further_rows: list[Row] = []
        for counted_set in _build_sets(using, sizes):
            if counted_set.kind in result.full:
                further_rows += _count_further_rows(connection, counted_set, sizes.portion)
        if further_rows:
            result = _sum_up(rows + further_rows, sizes)
        result.full = set()
        return result

    # One snapshot: a job that changes its state between two statements would count twice or not at all.
    return run(using, verb, snapshot=True)


def shared_bounded_counts(*, using: str, worker_timeout_s: float = 60) -> AllCounts:
    """Return `read_bounded_counts`, shared by the callers of this process: see `shared_reads`."""
    return _shared(read_bounded_counts, using, worker_timeout_s)


def shared_counts(*, using: str, worker_timeout_s: float = 60) -> AllCounts:
    """Return `read_exact_counts`, shared by the callers of this process: see `shared_reads`."""
    # Shared separately: callers of `shared_bounded_counts` do not wait for the portions of `read_exact_counts`.
    result = _shared(read_bounded_counts, using, worker_timeout_s)
    return result if result.is_complete else _shared(read_exact_counts, using, worker_timeout_s)


def _shared(read: Callable[..., AllCounts], using: str, worker_timeout_s: float) -> AllCounts:
    read_now = partial(read, using=using, worker_timeout_s=worker_timeout_s)
    return shared((read, worker_timeout_s), read_now, using=using)


def snapshot(store: Store) -> dict[str, Any]:
    """Read the counts now, in the format of `Broker.info`."""
    return read_exact_counts(using=store.alias, worker_timeout_s=store.worker_timeout_s).info()


# --- sets, and the statements that count them ---


class CountedSet(NamedTuple):
    """Rows in index order, and the SQL that sums up a part of them."""

    kind: str
    rows: QuerySet[Any]
    order: tuple[str, ...]
    size: int
    """Rows that the first statement counts."""
    columns: tuple[str, ...]
    """Columns that the summary needs. The index contains them and `order`, so the table is not read."""
    summary: str
    """Name, count and age, with `{age}` for the age of the oldest job; may end with GROUP BY."""
    groups: str = ""

    def part(self, connection: BaseDatabaseWrapper, size: int, after: Sequence[Any] | None = None) -> Part:
        """Build a SELECT that sums up the next rows after a position."""
        rows = _after(self.rows, self.order, after).values(*self.columns)[:size]
        sql, values = _compile(rows, connection)
        summary = self.summary.format(age=dialect_of(connection).age("MIN(enqueued_at)"))
        return f"SELECT '{self.kind}', {summary} FROM ({sql}) AS part {self.groups}", values

    def place(self, size: int, after: Sequence[Any] | None = None) -> QuerySet[Any]:
        """Return a query for the position of the last of the next rows."""
        return _after(self.rows, self.order, after).values_list(*self.order)[size - 1 : size]


def _after(rows: QuerySet[Any], order: tuple[str, ...], place: Sequence[Any] | None) -> QuerySet[Any]:
    if place is None:
        return rows
    if len(order) == 1:
        return rows.filter(**{f"{order[0]}__gt": place[0]})
    return rows.filter(scan.After(order, place))


def _build_sets(using: str, sizes: CountLimits) -> list[CountedSet]:
    of_queues = "queue, COUNT(*), {age}"
    is_open = "CASE WHEN committed_at IS NULL OR reopened_until IS NOT NULL THEN 'open' ELSE 'committed' END"
    sets = [
        _build_job_set(
            using, state, sizes, columns=("queue", "enqueued_at"), summary=of_queues, groups="GROUP BY queue"
        )
        for state in (State.ENQUEUED, State.BLOCKED)
    ]
    # Scheduled and retrying jobs share a partial index, so one query in its order covers both.
    if connections[using].features.supports_partial_indexes:
        sets.append(_build_due_set(using, sizes))
    else:  # without that index, one query over both states would read and sort every row
        sets += [_build_job_set(using, state, sizes) for state in (State.SCHEDULED, State.RETRIES)]
    sets.append(_build_job_set(using, State.DEAD, sizes))
    names = Queue.objects.using(using).order_by("name")
    live = Batch.objects.using(using).filter(finished_at=None).order_by("pk")
    return [
        *sets,
        CountedSet(_QUEUES, names, ("name",), sizes.queues, ("name", "paused_at"),
                   "name, 1, CASE WHEN paused_at IS NULL THEN 0 ELSE 1 END"),
        CountedSet(_BATCHES, live, ("pk",), sizes.at_once, ("committed_at", "reopened_until"),
                   f"{is_open}, COUNT(*), 0", f"GROUP BY {is_open}"),
    ]  # fmt: skip


def _build_job_set(
    using: str,
    state: State,
    sizes: CountLimits,
    *,
    columns: tuple[str, ...] = ("id",),
    summary: str = "",
    groups: str = "",
) -> CountedSet:
    rows, order = scan.in_index_order(state, using=using), scan.index_order(state, using=using)
    return CountedSet(str(state), rows, order, sizes.at_once, columns, summary or f"'{state}', COUNT(*), 0", groups)


def _build_due_set(using: str, sizes: CountLimits) -> CountedSet:
    """Return the set of scheduled and retrying jobs, which share an index."""
    order = scan.index_order(State.SCHEDULED, using=using)
    rows = Job.live.using(using).in_state(State.SCHEDULED, State.RETRIES).order_by(*order)
    return CountedSet(_DUE, rows, order, sizes.at_once, ("state",), "state, COUNT(*), 0", "GROUP BY state")


def _read_first(connection: BaseDatabaseWrapper, worker_timeout_s: float, sizes: CountLimits) -> list[Row]:
    return _fetch_rows(connection, *_build_first_statement(connection.alias, worker_timeout_s, sizes))


@lru_cache(maxsize=8)
def _build_first_statement(using: str, worker_timeout_s: float, sizes: CountLimits) -> Part:
    """Build the first statement.

    Cached: with few jobs stored, Django takes longer to build it than the database to answer.
    """
    connection = connections[using]
    parts = [counted_set.part(connection, counted_set.size) for counted_set in _build_sets(using, sizes)]
    # A column of the index of running jobs, so that the table is not read.
    working = Job.live.using(using).working().order_by().values("reserved_until")
    sql, values = _compile(working, connection)
    parts.append((f"SELECT '{State.WORKING}', '{State.WORKING}', COUNT(*), 0 FROM ({sql}) AS part", values))
    live_workers = WorkerProcess.objects.using(using).filter(living(worker_timeout_s)).order_by()
    sql, values = _compile(live_workers.values("state").annotate(n=Count("pk")), connection)
    parts.append((f"SELECT '{_WORKERS}', state, n, 0 FROM ({sql}) AS part", values))
    parts += [(f"SELECT '{_TOTAL}', '{name}', 0, SUM({name}) FROM {_COUNTER}", ()) for name in TOTALS]
    # One statement sees one snapshot on every database.
    return " UNION ALL ".join(sql for sql, _ in parts), tuple(value for _, params in parts for value in params)


def _count_further_rows(connection: BaseDatabaseWrapper, counted_set: CountedSet, portion: int) -> list[Row]:
    """Count the rows of a set that the first statement left out."""
    rows: list[Row] = []
    # The position is found by OFFSET in the same index, which reads each page twice. Alternatives were not faster
    # (ADR 0031).
    place = counted_set.place(counted_set.size).first()
    while place is not None:
        rows += _fetch_rows(connection, *counted_set.part(connection, portion, place))
        place = counted_set.place(portion, place).first()
    return rows


def _sum_up(rows: Iterable[Row], sizes: CountLimits) -> AllCounts:
    result = AllCounts(
        sets=dict.fromkeys(sorted(map(str, _SETS)), 0),
        workers=dict.fromkeys(WorkerProcess.Phase.values, 0),
        batches={"open": 0, "committed": 0},
    )
    counted: Sums[str] = Sums()
    known: list[str] = []
    waiting = result.waiting
    for kind, name, count, value in rows:
        if kind == _QUEUES:  # first, because there may be 20,000 of these rows
            known.append(name)
            if value:
                result.paused.add(name)
            continue
        counted[kind] += count
        if kind in _QUEUED:
            waiting[name] = waiting.get(name, Waiting()).add(kind, count, float(value))
        elif kind == _TOTAL:
            result.totals[name] = int(value or 0)
        else:
            sums = result.workers if kind == _WORKERS else result.batches if kind == _BATCHES else result.sets
            sums[name] = sums.get(name, 0) + count
    counted[_QUEUES] = len(known)
    # Rows of blocked jobs are grouped by queue, so the loop added them to the queues' sizes.
    result.sets[str(State.BLOCKED)] = counted[str(State.BLOCKED)]
    result.full = {kind for kind, count in counted.items() if sizes.is_full(kind, count)}
    queues = dict.fromkeys(known, 0) | {name: found.size for name, found in waiting.items()}
    result.queues = {name: queues[name] for name in sorted(queues)}
    return result


def _fetch_rows(connection: BaseDatabaseWrapper, sql: str, values: Sequence[Any]) -> list[Row]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return list(cursor.fetchall())


def _compile(rows: QuerySet[Any], connection: BaseDatabaseWrapper) -> Part:
    sql, values = rows.query.get_compiler(connection=connection).as_sql()
    return sql, tuple(values)
