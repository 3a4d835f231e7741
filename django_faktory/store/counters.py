"""Fold the counter rows of connections into one row for each day, exactly, while they are written."""

from __future__ import annotations

from datetime import date

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..models import Counter
from .dialects import dialect_of
from .dialects.base import FOLDED, Tally
from .transactions import run

CHUNK = 500


def fold(*, using: str) -> int:
    """Add the counts of at most `CHUNK` rows to those of `FOLDED` and delete the rows; returns how many there were.

    A row that a transaction is counting in is skipped: nothing is waited for but another fold of the same day. A
    connection whose row is gone inserts a new one.
    """

    def verb(connection: BaseDatabaseWrapper) -> int:
        rows = Counter.objects.using(using).exclude(slot=FOLDED).order_by("day", "slot")
        if connections[using].features.has_select_for_update_skip_locked:
            rows = rows.select_for_update(skip_locked=True)
        found = list(rows[:CHUNK])
        sums: dict[date, Tally] = {}
        for row in found:
            had = sums.get(row.day, Tally())
            sums[row.day] = Tally(
                processed=had.processed + row.processed, failed=had.failed + row.failed, late=had.late + row.late
            )
        dialect = dialect_of(connection)
        with connection.cursor() as cursor:
            for day, tally in sorted(sums.items()):
                dialect.count_in(cursor, day, FOLDED, tally)
        for day in sums:
            slots = [row.slot for row in found if row.day == day]
            Counter.objects.using(using).filter(day=day, slot__in=slots).delete()
        return len(found)

    return run(using, verb)
