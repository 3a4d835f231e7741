"""Numbers of jobs as sums of deltas: fold them, recount them, and take numbers away (ADR 0047).

Triggers add a delta in the transaction of each change (`store.dialects.triggers`), so a sum is right whatever changed
the rows.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import date

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.lifecycle import ENDED
from ..dialects import dialect_of
from ..dialects.base import HISTORY, JOB, marks
from ..dialects.triggers import name_of_day
from ..dialects.values import TOTALS
from ..transactions import run


def fold(*, using: str) -> bool:
    """Replace deltas by their sums if there are enough of them; return whether there were."""
    dialect = dialect_of(connections[using])
    is_due = run(using, dialect.needs_fold, atomic=False)
    if is_due:
        run(using, dialect.fold)
    return is_due


def recount(*, using: str, with_history: bool = True) -> dict[tuple[str, str], int]:
    """Count the live jobs, and the ended ones if asked; correct the numbers, and return by how much.

    One statement counts the rows and reads the numbers. So a change is in both or in neither.
    """
    counted = f"SELECT state AS kind, queue AS name, COUNT(*) AS amount FROM {JOB} GROUP BY state, queue"
    ignored = TOTALS if with_history else (*TOTALS, *map(str, ENDED))
    if with_history:
        day = name_of_day("day", connections[using])
        counted += f" UNION ALL SELECT state, {day}, COUNT(*) FROM {HISTORY} GROUP BY state, {day}"

    def verb(connection: BaseDatabaseWrapper) -> dict[tuple[str, str], int]:
        numbers = dialect_of(connection).current_deltas
        return _add(
            connection,
            f"SELECT kind, name, SUM(amount) FROM ({counted} UNION ALL SELECT kind, name, -amount FROM {numbers} AS d"
            f" WHERE kind NOT IN ({marks(ignored)})) AS found GROUP BY kind, name HAVING SUM(amount) <> 0",
            ignored,
        )

    return run(using, verb)


def subtract(connection: BaseDatabaseWrapper, kinds: Collection[str]) -> None:
    """Set all numbers of these kinds to 0."""
    numbers = dialect_of(connection).current_deltas
    sql = f"SELECT kind, name, -SUM(amount) FROM {numbers} AS d WHERE kind IN ({marks(kinds)}) GROUP BY kind, name"
    _add(connection, sql, kinds)


def forget_days(connection: BaseDatabaseWrapper, first: date, end: date) -> None:
    """Set the numbers of ended jobs of these days to 0: their rows were not deleted one by one."""
    numbers = dialect_of(connection).current_deltas
    sql = f"SELECT kind, name, -SUM(amount) FROM {numbers} AS d WHERE kind IN ({marks(ENDED)}) AND name >= %s"
    _add(connection, f"{sql} AND name < %s GROUP BY kind, name", [*map(str, ENDED), first.isoformat(), end.isoformat()])


def _add(connection: BaseDatabaseWrapper, sql: str, values: Collection[str]) -> dict[tuple[str, str], int]:
    """Add a delta for each kind, name and amount that a SELECT returns; return them."""
    with connection.cursor() as cursor:
        cursor.execute(sql, list(values))
        found = {(kind, name): int(amount) for kind, name, amount in cursor.fetchall()}
        dialect_of(connection).add_deltas(cursor, [(*number, amount) for number, amount in found.items()])
    return found
