"""Fold the counter rows of connections into one row per day (ADR 0024).

Each connection counts in a row of its own, so that connections do not wait for each other. Folding loses no count
although connections keep writing.
"""

from __future__ import annotations

from datetime import date

from django.db.backends.base.base import BaseDatabaseWrapper

from ...models import Counter
from ..dialects import dialect_of
from ..dialects.base import FOLDED
from ..dialects.values import TOTALS, Tally
from ..transactions import run

CHUNK = 500


def fold(*, using: str) -> int:
    """Add up to `CHUNK` counter rows to the `FOLDED` row of their day, delete them, and return their number.

    Skips rows locked by a transaction that counts in them, so the only wait is for another fold of the same day. A
    connection inserts a new row if its row was deleted.
    """

    def verb(connection: BaseDatabaseWrapper) -> int:
        rows = Counter.objects.using(using).exclude(slot=FOLDED).order_by("day", "slot")
        locked_rows = list(rows.select_for_update(skip_locked=True)[:CHUNK])
        sums: dict[date, Tally] = {}
        for row in locked_rows:
            sums[row.day] = sums.get(row.day, Tally()) + Tally(*(getattr(row, name) for name in TOTALS))
        dialect = dialect_of(connection)
        with connection.cursor() as cursor:
            # Sorted, so that two folds lock the rows of several days in the same order.
            for day, tally in sorted(sums.items()):
                dialect.count_in(cursor, day, FOLDED, tally)
        # Exact, because the SELECT has locked these rows: no connection can count in them before the commit.
        for day in sums:
            slots = [row.slot for row in locked_rows if row.day == day]
            Counter.objects.using(using).filter(day=day, slot__in=slots).delete()
        return len(locked_rows)

    return run(using, verb)
