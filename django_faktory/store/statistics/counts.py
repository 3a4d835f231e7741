"""Counts for INFO, metrics and the admin: from one snapshot, and equal on every node (W22).

Numbers of jobs are sums of deltas (ADR 0047): they cost the same for any number of jobs, and are never older than the
last write.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, Count, Value, When

from ...core.lifecycle import State
from ...models import Batch, Queue, WorkerProcess
from ..dialects import dialect_of, triggers
from ..dialects.values import TOTALS
from ..store import Store
from ..transactions import read as read_rows
from ..transactions import run
from ..workers import living

_QUEUES, _WORKERS = "queues", "workers"
_SETS = (State.BLOCKED, State.DEAD, State.RETRIES, State.SCHEDULED, State.WORKING)

Row = tuple[str, str, Any, int]
"""Kind, name and number; for a queue 1 if it is paused."""

Numbers = dict[str, int]


@dataclass(slots=True)
class AllCounts:
    """Everything that is counted, by name."""

    queues: Numbers
    """Enqueued and blocked jobs of every queue that is known or has such jobs, in the order of the names."""
    sets: Numbers
    """Jobs by state; blocked jobs are in the sizes of their queues too."""
    workers: Numbers
    """Live worker processes by state."""
    totals: Numbers
    """Ended jobs, failures and late reports since the beginning."""
    paused: set[str] = field(default_factory=set)
    numbers: dict[str, Numbers] = field(default_factory=dict)
    """Live jobs by state and queue, ended ones by state and day, and the totals of each day."""

    def of(self, *states: State) -> int:
        """Return the number of jobs in these states."""
        return sum(sum(self.numbers.get(state, {}).values()) for state in states)

    def in_queue(self, queue: str, *states: State) -> int:
        """Return the number of live jobs of a queue in these states."""
        return sum(self.numbers.get(state, {}).get(queue, 0) for state in states)

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


def read(*, using: str, worker_timeout_s: float = 60) -> AllCounts:
    """Read all counts with one statement. Raises FunctionsMissing if the database does not count jobs."""
    sql, values = _build_statement(using, worker_timeout_s)

    def verb(connection: BaseDatabaseWrapper) -> list[Row]:
        triggers.check(connection)
        with connection.cursor() as cursor:
            cursor.execute(sql, values)
            return list(cursor.fetchall())

    # In a snapshot PostgreSQL plans without sequential scans. Sessions of requests allow them (ADR 0043).
    return _sum_up(run(using, verb, snapshot=True))


def snapshot(store: Store) -> dict[str, Any]:
    """Read the counts now, in the format of `Broker.info`."""
    return read(using=store.alias, worker_timeout_s=store.worker_timeout_s).info()


def count_batches(*, using: str) -> Numbers:
    """Return the numbers of unfinished batches: open and committed. Reads an entry of an index for each."""
    is_open = Case(
        When(committed_at=None, then=Value("open")),
        When(reopened_until__isnull=False, then=Value("open")),
        default=Value("committed"),
    )
    live = Batch.objects.using(using).filter(finished_at=None).order_by()
    rows = live.annotate(stage=is_open).values("stage").annotate(number=Count("pk")).values_list("stage", "number")
    return {"open": 0, "committed": 0} | dict(read_rows(rows))


@lru_cache(maxsize=8)
def _build_statement(using: str, worker_timeout_s: float) -> tuple[str, tuple[Any, ...]]:
    """Build the statement. Cached: Django takes longer to compile its part than the database to answer."""
    connection = connections[using]
    live_workers = WorkerProcess.objects.using(using).filter(living(worker_timeout_s)).order_by()
    workers, values = live_workers.values("state").annotate(n=Count("pk")).query.get_compiler(using).as_sql()
    queues = Queue._meta.db_table  # noqa: SLF001  (documented)
    return (
        f"""
SELECT kind, name, SUM(amount), 0 FROM {dialect_of(connection).current_deltas} AS delta
GROUP BY kind, name HAVING SUM(amount) <> 0
UNION ALL SELECT '{_QUEUES}', name, 0, CASE WHEN paused_at IS NULL THEN 0 ELSE 1 END FROM {queues}
UNION ALL SELECT '{_WORKERS}', state, n, 0 FROM ({workers}) AS part""",
        tuple(values),
    )


def _sum_up(rows: Iterable[Row]) -> AllCounts:
    numbers: dict[str, Numbers] = {}
    paused: set[str] = set()
    for kind, name, number, is_paused in rows:
        numbers.setdefault(kind, {})[name] = int(number)
        if is_paused:
            paused.add(name)
    queues = numbers.pop(_QUEUES, {})
    for state in (State.ENQUEUED, State.BLOCKED):
        for name, number in numbers.get(state, {}).items():
            queues[name] = queues.get(name, 0) + number
    counts = AllCounts(
        queues={name: queues[name] for name in sorted(queues)},
        sets={},
        workers=dict.fromkeys(WorkerProcess.Phase.values, 0) | numbers.pop(_WORKERS, {}),
        totals={kind: sum(numbers.get(kind, {}).values()) for kind in TOTALS},
        paused=paused,
        numbers=numbers,
    )
    counts.sets = {str(state): counts.of(state) for state in _SETS}
    return counts
