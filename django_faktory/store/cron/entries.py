"""Create, edit and pause cron entries, and compute when each is next due. ADR 0014.

`sync` applies the definitions in code, `save` a manual edit. Each operation locks the rows it changes. `runs` runs the
entries that are due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet

from ...core.cron import Schedule
from ...core.logs import get_logger
from ...errors import InvalidCron
from ...models.cron import CronEntry
from ..dialects import clock_of
from ..transactions import run

logger = get_logger(__name__)

ADOPT_AFTER_S = 60
"""Seconds to its next tick from which `adopt` looks for an earlier one."""


class CronDefinition(NamedTuple):
    """A cron entry as defined in code. JSON columns are JSON text here too."""

    name: str
    schedule: str
    zone: str
    jobtype: str
    queue: str = ""
    args: str = "[]"
    kwargs: str = "{}"
    job: str = "{}"
    missed: str = "once"
    window_s: int = 86_400
    overlap: str = "allow"


def sync(definitions: Iterable[CronDefinition], *, using: str, now: datetime | None = None) -> None:
    """Make the stored entries of code equal to these definitions; absent ones are marked as removed.

    Run histories and pauses stay. A name that an entry of the admin uses stays with that entry. Safe to run on all
    nodes at once.
    """
    definition_by_name = {definition.name: definition for definition in definitions}

    def verb(connection: BaseDatabaseWrapper) -> None:
        clock = clock_of(connection, now)
        rows = CronEntry.objects.using(using)
        known = set(rows.filter(name__in=definition_by_name).values_list("name", flat=True))
        new = [
            CronEntry(origin="code", **definition._asdict())
            for name, definition in sorted(definition_by_name.items())
            if name not in known
        ]
        for entry in new:
            entry.next_at = _compute_next(entry, clock)
        rows.bulk_create(new, ignore_conflicts=True)  # another node may insert them too
        # In name order: nodes that start at the same time would deadlock otherwise.
        for entry in rows.order_by("name").select_for_update():
            definition = definition_by_name.get(entry.name)
            if entry.origin == CronEntry.EntryOrigin.CODE:
                _apply_definition(entry, definition, clock)
            elif definition is not None:
                logger.error(
                    "cron entry of code has a name taken in the admin, rename one of them name=%s", definition.name
                )

    run(using, verb)


def save(entry: CronEntry, *, using: str, now: datetime | None = None) -> None:
    """Store a manual edit of this entry. A new schedule or time zone applies from now on.

    Only the fields of a definition are written, so ticks that other nodes take at the same time stay taken.
    """

    is_new = entry.pk is None

    def verb(connection: BaseDatabaseWrapper) -> None:
        clock = clock_of(connection, now)
        if is_new:
            entry.pk = None  # set by an attempt that was rolled back
            entry.next_at = _compute_next(entry, clock)
            entry.save(using=using, force_insert=True)
            return
        # Compared with the stored row, not with the form's copy: `next_at` moves while a person edits.
        for row in CronEntry.objects.using(using).filter(pk=entry.pk).select_for_update():
            _change_fields(row, {field: getattr(entry, field) for field in CronDefinition._fields}, clock)
            entry.next_at, entry.problem = row.next_at, row.problem

    run(using, verb)


def find_unscheduled(*, using: str) -> QuerySet[CronEntry]:
    """Return the entries whose rows were written without their next tick, and that no node has seen since."""
    return CronEntry.objects.using(using).filter(next_at=None, paused_at=None, removed_at=None, problem="")


def adopt(*, default_zone: str, using: str, now: datetime | None = None) -> None:
    """Schedule entries whose rows were not written by `save`: by a fixture, the ORM or SQL.

    Finds active rows without a next tick, and rows whose schedule or zone has an earlier one. A row without a zone gets
    the default. An entry that can never run is logged once.
    """

    def verb(connection: BaseDatabaseWrapper) -> None:
        active = CronEntry.objects.using(using).filter(paused_at=None, removed_at=None)
        if not (entries := list(active)):
            return
        clock = clock_of(connection, now)
        for entry in entries:
            # An entry that is due soon computes its next tick then.
            if entry.next_at and entry.next_at < clock + timedelta(seconds=ADOPT_AFTER_S):
                continue
            stored = {field: getattr(entry, field) for field in ("schedule", "zone", "next_at", "problem")}
            entry.zone = entry.zone or default_zone
            next_at = _compute_next(entry, clock)
            if entry.next_at is not None and next_at is not None:
                next_at = min(entry.next_at, next_at)
            found = {"zone": entry.zone, "next_at": next_at, "problem": entry.problem}
            # Guarded by what was read: another node or an edit may have changed the row.
            if not found.items() <= stored.items() and active.filter(pk=entry.pk, **stored).update(**found):
                log_problem(entry)

    run(using, verb, atomic=False)


def log_problem(entry: CronEntry) -> None:
    """Log why the entry never runs, if it has such a problem."""
    if entry.problem:
        logger.error("cron entry disabled, its schedule is invalid name=%s error=%s", entry.name, entry.problem)


def pause(ids: Sequence[int], *, using: str) -> int:
    """Pause these entries: none has a tick until it is resumed. Return how many were not paused before."""

    def change(entry: CronEntry, clock: datetime) -> bool:
        if entry.paused_at is not None:
            return False
        # Maintenance reads the smallest `next_at`; NULL keeps the paused entry out of it.
        entry.paused_at, entry.next_at = clock, None
        return True

    return _change_each(ids, change, using)


def resume(ids: Sequence[int], *, using: str, now: datetime | None = None) -> int:
    """Resume these entries from now on; return how many were paused.

    Ticks during the pause are skipped.
    """

    def change(entry: CronEntry, clock: datetime) -> bool:
        if entry.paused_at is None:
            return False
        entry.paused_at = None
        entry.next_at = _compute_next(entry, clock)
        return True

    return _change_each(ids, change, using, now)


def _change_each(
    ids: Sequence[int],
    change: Callable[[CronEntry, datetime], bool],
    using: str,
    now: datetime | None = None,
) -> int:
    def verb(connection: BaseDatabaseWrapper) -> int:
        clock = clock_of(connection, now)
        changed = 0
        for entry in CronEntry.objects.using(using).filter(pk__in=ids).order_by("name").select_for_update():
            if change(entry, clock):
                entry.save(using=using, update_fields=["paused_at", "next_at", "problem"])
                changed += 1
        return changed

    return run(using, verb)


def _apply_definition(entry: CronEntry, definition: CronDefinition | None, now: datetime) -> None:
    """Update an entry of code to its definition; None marks it as removed."""
    if definition is not None:
        # An entry that code defines again starts from now: ticks in between are skipped.
        was_removed, entry.removed_at = entry.removed_at is not None, None
        _change_fields(entry, definition._asdict(), now, restarts=was_removed)
    elif entry.removed_at is None:
        # The row stays with its history (ADR 0014).
        entry.removed_at, entry.next_at = now, None
        entry.save(using=entry._state.db, update_fields=["removed_at", "next_at"])  # noqa: SLF001  (documented)
        logger.info("cron entry is no longer defined in code name=%s", entry.name)


def _change_fields(entry: CronEntry, fields: dict[str, Any], now: datetime, *, restarts: bool = False) -> None:
    """Write the fields that differ. The next run stays unless the schedule or the zone changes."""
    changed = {field for field, value in fields.items() if getattr(entry, field) != value}
    if not changed and not restarts:
        return
    for field in changed:
        setattr(entry, field, fields[field])
    # A change of arguments or policies must not skip a run that is due already.
    if restarts or changed & {"schedule", "zone"}:
        entry.next_at = _compute_next(entry, now)
    using = entry._state.db  # noqa: SLF001  (documented)
    entry.save(using=using, update_fields=[*changed, "next_at", "problem", "removed_at"])


def _compute_next(entry: CronEntry, now: datetime) -> datetime | None:
    """Return when the entry is due; None if it never is, and `problem` may contain the reason."""
    entry.problem = ""
    if entry.paused_at is not None or entry.removed_at is not None:
        return None
    try:
        return Schedule.of(entry.schedule, entry.zone).after(now)
    except InvalidCron as error:
        entry.problem = str(error)
        return None
