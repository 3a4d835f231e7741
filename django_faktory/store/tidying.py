"""Clean up after ourselves on PostgreSQL, sooner than autovacuum comes by. Source: ADR 0009.

Each job leaves dead entries at the head of the index of ready jobs, over which every claim walks. Autovacuum looks once
a minute, by when a fast queue has left a million.
"""

from __future__ import annotations

import threading
import time

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..errors import BrokerUnavailable
from ..logs import get_logger
from .dialects.base import JOB
from .transactions import run

logger = get_logger(__name__)

DEAD_ROWS = 50_000
"""Walking over so many costs a claim a quarter of a millisecond, cleaning them up a tenth of a second."""

REST = 20
"""Times as long as a vacuum took, there is none: it takes no more than 5 % of the time, however large the table."""

# Nothing is told of a table that is not ours to vacuum, or that somebody is at already.
_DEAD = """
SELECT stat.n_dead_tup FROM pg_stat_user_tables AS stat JOIN pg_class AS class ON class.oid = stat.relid
WHERE class.oid = to_regclass(%s) AND pg_has_role(class.relowner, 'USAGE')
  AND NOT EXISTS (SELECT 1 FROM pg_stat_progress_vacuum AS running WHERE running.relid = class.oid)"""

# The dead entries of the index are what costs, however few pages of the table they concern; giving space back would
# take a lock that claims wait for.
_VACUUM = f"VACUUM (SKIP_LOCKED, INDEX_CLEANUP ON, TRUNCATE OFF, PARALLEL 0) {JOB}"


def dead_rows(*, using: str) -> int:
    """How many dead rows the table of jobs has that are ours to clean up, as PostgreSQL's statistics know it.

    0 where another one is at it, and on databases that clean up by themselves.
    """
    if connections[using].vendor != "postgresql":
        return 0

    def verb(connection: BaseDatabaseWrapper) -> int:
        with connection.cursor() as cursor:
            cursor.execute(_DEAD, [JOB])
            row = cursor.fetchone()
        return int(row[0]) if row else 0

    return run(using, verb, atomic=False)


def vacuum(*, using: str) -> None:
    """Clean up the table of jobs. Not inside a transaction, and however long it takes: nobody waits for it, but who
    alters the table."""
    with connections[using].cursor() as cursor:
        cursor.execute(_VACUUM)


class Tidier:
    """Vacuums in a thread of its own when it is worth it: due jobs must not wait until a large table is read."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._thread: threading.Thread | None = None
        self._left = 0  # dead rows that somebody's open snapshot may still see
        self._rests_until = 0.0

    def look(self) -> bool:
        """Start it if there is enough to do; returns whether it did."""
        if (self._thread and self._thread.is_alive()) or time.monotonic() < self._rests_until:
            return False
        dead = dead_rows(using=self.alias)
        self._left = min(self._left, dead)
        if dead < self._left + DEAD_ROWS:
            return False
        self._thread = threading.Thread(target=self._vacuum, name="faktory-vacuum", daemon=True)
        self._thread.start()
        return True

    def join(self, timeout_s: float) -> None:
        """Wait for the one that runs, if any does."""
        if self._thread:
            self._thread.join(timeout_s)

    def _vacuum(self) -> None:
        began = time.monotonic()
        try:
            vacuum(using=self.alias)
            self._left = dead_rows(using=self.alias)
            logger.debug("vacuumed seconds=%.2f left=%d", time.monotonic() - began, self._left)
        except (Error, BrokerUnavailable) as error:
            logger.warning("could not vacuum the table of jobs error=%s", error)
        finally:
            self._rests_until = time.monotonic() + REST * (time.monotonic() - began)
            connections[self.alias].close()
