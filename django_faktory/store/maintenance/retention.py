"""Retention of the history by days (ADR 0049): add partitions ahead, and empty those whose rows are all due.

A row leaves with its partition, or alone: if most rows of its day stay longer, or if the partition cannot be emptied.
Tables without partitions, and rows without a day of their own, are left to `due.purge`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from functools import partial
from math import ceil
from typing import Any

from django.db import Error, connections
from django.db.models import QuerySet
from django.db.models.functions import Now

from ...core.lifecycle import ENDED, KEPT
from ...core.logs import get_logger
from ...models import History
from .. import alarm_records
from ..database_errors import LOCK_TIMEOUTS, error_code, first_line
from ..dialects.partitions import DAY, Partition
from ..statistics import deltas
from ..store import Store
from ..transactions import read, run
from .background import BackgroundStep
from .turns import NodeTurns

logger = get_logger(__name__)

AHEAD = timedelta(days=14)
"""Time for which partitions exist in advance: so long may no server run, or the table be locked by a reader."""

MAX_PARTITIONS = 60
"""Each of them costs a read of the whole history some time. Beyond it, rows go to the latest one."""

IN_USE, LONGEST = 42, 31 * DAY
"""Most jobs leave within this number of partitions, which are so long for that, and at most this long."""

HELD = timedelta(hours=6)
"""Rows leave alone that are due for longer than the width of their partition and this. Longer than most dumps."""

FEW, MANY_TIMES = 10_000, 10
"""Of a partition in which so few rows stay, and so many times as many are due, those that stay are moved."""

EXPORT_WITHIN = timedelta(days=7)
"""Rows that cannot be exported stay for this time after they are due."""

CHUNK = 500
TURN, LEASE_S = "retention", 3600.0
"""An export may take longer than other steps; it is repeated by another node if its node was killed."""


class Retention(BackgroundStep):
    """Empties partitions: it may wait for an export or a lock."""

    def __init__(self, store: Store) -> None:
        super().__init__("retention", self._run_in_turn)
        self._store = store
        self._turns = NodeTurns([TURN], using=store.alias, lease_s=LEASE_S)
        self._look_at: dict[str, datetime] = {}  # when something of a partition may be due next
        self._exported: set[str] = set()  # partitions that could not be emptied since
        self._logged: set[str] = set()

    def _run_in_turn(self) -> None:
        if self._store.dialect.partitions.read(self._store.connection) is None:
            return
        self._turns.add()
        if self._turns.take(TURN):
            try:
                self.run()
            finally:
                self._turns.finish(TURN, pause_s=0, took_s=0)

    def run(self) -> None:
        """Add the partitions that are missing, and delete what is due."""
        connection, partitions = self._store.connection, self._store.dialect.partitions
        today = self._store.now().astimezone(UTC).date()
        for one in partitions.read(connection) or []:
            if one.is_detaching:
                self._change("detach", one.first, partial(partitions.remove, connection, one))
        found = partitions.read(connection)
        if found is None:
            return
        for first, end in missing(found, today, self._store.result_ttl_s):
            if self._change("add", first, partial(partitions.add, connection, first, end)) is None:
                break
        for one in found:
            if one.end <= today and not one.is_kept and not one.is_detaching:
                self._retire(one)
        for name in partitions.find_detached(connection):
            if self._is_new(name):
                logger.warning("a detached partition has jobs, attach it again or drop it table=%s", name)

    def _change(self, what: str, day: date, change: Callable[[], object]) -> bool | None:
        """Make one change; return whether it was made, None if a lock prevents it. The next round tries it again."""
        try:
            return change() is not False
        except Error as error:
            if error_code(error) in LOCK_TIMEOUTS:
                return None
            if self._is_new(first_line(error)):
                logger.warning(
                    "cannot change the partitions of the history, its jobs leave by rows change=%s day=%s error=%s",
                    what,
                    day,
                    first_line(error),
                )
            return False

    def _is_new(self, reason: str) -> bool:
        """Return whether no line was logged for this reason yet."""
        is_new = reason not in self._logged
        self._logged.add(reason)
        return is_new

    def _retire(self, partition: Partition) -> None:
        """Empty the partition if all its rows are due; otherwise delete those that have been due for long."""
        now, partitions, connection = self._store.now(), self._store.dialect.partitions, self._store.connection
        if now < self._look_at.get(partition.name, now):
            return
        rows = History.objects.using(self._store.alias).filter(day__gte=partition.first, day__lt=partition.end)
        last = _first_of(rows, "-purge_at")
        if last is not None and last < now:
            if partition.name not in self._exported and not export_first(self._store, partition.first, rows, last):
                return
            self._exported.add(partition.name)
            forget = partial(deltas.forget_days, connection, partition.first, partition.end)
            if self._change("empty", partition.first, partial(partitions.empty, connection, partition, forget)):
                last = None
        if last is None:
            self._change("remove", partition.first, partial(partitions.remove, connection, partition))
            return
        first = _first_of(rows, "purge_at") or last
        leaves_at = first + min(partition.end - partition.first, LONGEST) + HELD
        if now < leaves_at:
            self._look_at[partition.name] = min(last, leaves_at)
        elif last >= now and self._stay_few(rows, now):
            self._move(rows.filter(purge_at__gte=now))
            self._retire(partition)
        else:
            while delete_due(self._store, rows, limit=CHUNK) == CHUNK:
                self._turns.take(TURN)

    def _stay_few(self, rows: QuerySet[History], now: datetime) -> bool:
        stay = _count(rows.filter(purge_at__gte=now), FEW + 1)
        return stay <= FEW and _count(rows.filter(purge_at__lt=now), MANY_TIMES * stay) >= MANY_TIMES * stay

    def _move(self, rows: QuerySet[History]) -> None:
        """Move rows to the partition whose rows leave one by one."""
        while ids := read(rows.values_list("pk", flat=True)[:CHUNK]):
            chosen = rows.filter(pk__in=ids)
            run(self._store.alias, lambda _, chosen=chosen: chosen.update(day=KEPT))  # type: ignore[misc]


def missing(partitions: list[Partition], today: date, result_ttl_s: float = 0) -> Iterator[tuple[date, date]]:
    """Yield the first day and the end of each partition to add. Most jobs are kept for `result_ttl_s`."""
    if not any(one.is_kept for one in partitions):
        yield KEPT, KEPT + DAY
    days = [one for one in partitions if not one.is_kept]
    # By their ends: on MariaDB the oldest one begins where those before it began.
    kept_for = max(today - min((one.end for one in days), default=today), timedelta(seconds=result_ttl_s))
    width = min(max(DAY, ceil(kept_for / DAY / IN_USE) * DAY), LONGEST)
    day, count = today, len(partitions)
    while day <= today + AHEAD and count < MAX_PARTITIONS:
        taken = next((one for one in partitions if one.first <= day < one.end), None)
        if taken:
            day = taken.end
            continue
        end = min([day + width, *(one.first for one in days if one.first > day)])
        yield day, end
        day, count = end, count + 1


def delete_due(store: Store, rows: QuerySet[History], *, limit: int) -> int:
    """Delete at most `limit` of these rows that are due, and return how many."""
    due = rows.filter(purge_at__lt=store.clock() or Now()).order_by("purge_at")
    found: list[Any] = []
    for part in _by_index(due):
        found += read(part.values_list("pk", "purge_at")[: limit - len(found)])
    if not found:
        return 0
    # Nothing changes these rows any more: none needs a lock.
    chosen = rows.filter(pk__in=[pk for pk, _ in found])
    if not export_first(store, None, chosen, max(purge_at for _, purge_at in found)):
        return 0
    return run(store.alias, lambda _: chosen.delete()[0])


def purge(store: Store, *, limit: int) -> int:
    """Delete at most `limit` rows that are due and have no day of their own; return how many."""
    rows = History.objects.using(store.alias).all()
    partitions = store.dialect.partitions.read(store.connection)
    if partitions is not None:
        rows = rows.filter(day__lt=max((one.end for one in partitions if one.is_kept), default=KEPT))
    return delete_due(store, rows, limit=limit)


def export_first(store: Store, day: date | None, rows: QuerySet[History], due_at: datetime) -> bool:
    """Export rows before they are deleted; return whether they may go. They may if it has failed for long enough."""
    if store.export is None:
        return True
    try:
        store.export(day, rows)
    except Exception:  # the project's code
        is_over = due_at < store.now() - EXPORT_WITHIN
        logger.exception("export of the history failed day=%s deleted=%s", day, is_over)
        alarm_records.record_failed_export(using=store.alias)
        return is_over
    alarm_records.forget_failed_export(using=store.alias)
    return True


def _by_index(rows: QuerySet[History]) -> list[QuerySet[History]]:
    """Return queries that each read the index of `purge_at`, which begins with the state on MariaDB."""
    if connections[rows.db].features.supports_partial_indexes:
        return [rows]
    return [rows.filter(state=str(state)) for state in sorted(ENDED)]


def _first_of(rows: QuerySet[History], order: str) -> datetime | None:
    moments: list[Any] = []
    for part in _by_index(rows):
        moments += read(part.order_by(order).values_list("purge_at", flat=True)[:1])
    return (max if order.startswith("-") else min)(moments, default=None)


def _count(rows: QuerySet[History], limit: int) -> int:
    return run(rows.db, lambda _: rows[:limit].count(), atomic=False) if limit else 0
