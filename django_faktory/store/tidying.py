"""Clean up after ourselves on PostgreSQL, sooner than autovacuum comes by. Source: ADR 0009.

Each job leaves dead entries at the head of the index of ready jobs, over which every claim walks. Autovacuum looks once
a minute, by when a fast queue has left a million.
"""

from __future__ import annotations

import math
import threading
import time
from typing import NamedTuple

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..errors import BrokerUnavailable
from ..logs import get_logger
from ..poolers import is_pooled
from .dialects.base import JOB
from .transactions import run

logger = get_logger(__name__)

DEAD_ROWS = 50_000
"""Walking over so many costs a claim a quarter of a millisecond, cleaning them up a tenth of a second."""

REST = 20
"""Times as long as a vacuum takes, no node begins the next: vacuums take 5 % of the time, whatever nodes there are."""

BYTES_PER_S = 100e6
"""What a vacuum reads of indexes in a second: PostgreSQL says when the last one ended, not how long it took."""

SHORTEST_REST_S = 5.0

# No row where the table is not ours to vacuum, or a vacuum is already running. A vacuum writes these statistics at its
# end, autovacuum too, so that every node sees what any of them has done.
_DEAD = """
SELECT stat.n_dead_tup, EXTRACT(EPOCH FROM CLOCK_TIMESTAMP() - GREATEST(stat.last_vacuum, stat.last_autovacuum)),
  pg_indexes_size(class.oid)
FROM pg_stat_user_tables AS stat JOIN pg_class AS class ON class.oid = stat.relid
WHERE class.oid = to_regclass(%s) AND pg_has_role(class.relowner, 'USAGE')
  AND NOT EXISTS (SELECT 1 FROM pg_stat_progress_vacuum AS running WHERE running.relid = class.oid)"""

# The dead entries of the index are what costs, however few pages of the table they concern: with 50,000 of them at the
# head of a queue a claim reads 793 pages, after a vacuum without INDEX_CLEANUP as many, after one with it 33. To give
# space back would take a lock that claims wait for.
_VACUUM = f"VACUUM (SKIP_LOCKED, INDEX_CLEANUP ON, TRUNCATE OFF, PARALLEL 0) {JOB}"

# Five times the pace of autovacuum. 2,000,000 rows with 108,000 dead ones: 5 s, in place of 0.5 s at full speed.
_PACE = "SET vacuum_cost_delay = 2; SET vacuum_cost_limit = 1000"
_FULL_SPEED = "RESET vacuum_cost_delay; RESET vacuum_cost_limit"


class Dead(NamedTuple):
    """What PostgreSQL's statistics say of the table of jobs."""

    rows: int = 0
    """Dead rows; 0 where a vacuum runs, where the table is not ours, and on databases that clean up by themselves."""
    vacuumed_s_ago: float = math.inf
    """Seconds since the last vacuum ended, whoever ran it."""
    index_bytes: int = 0

    @property
    def is_resting(self) -> bool:
        """Whether the last vacuum ended so lately that the next one has to wait."""
        return self.vacuumed_s_ago < max(SHORTEST_REST_S, REST * self.index_bytes / BYTES_PER_S)


def dead(*, using: str) -> Dead:
    """Read the statistics."""
    if connections[using].vendor != "postgresql":
        return Dead()

    def verb(connection: BaseDatabaseWrapper) -> Dead:
        with connection.cursor() as cursor:
            cursor.execute(_DEAD, [JOB])
            row = cursor.fetchone()
        return Dead(int(row[0]), math.inf if row[1] is None else float(row[1]), int(row[2])) if row else Dead()

    return run(using, verb, atomic=False)


def dead_rows(*, using: str) -> int:
    """How many dead rows the table of jobs has that are ours to clean up."""
    return dead(using=using).rows


def vacuum(*, using: str) -> None:
    """Clean up the table of jobs. Not inside a transaction, and however long it takes: only a change of the table's
    definition waits for it."""
    with connections[using].cursor() as cursor:
        has_session = not is_pooled(connections[using].connection)
        if has_session:  # else the pace would be set for another client
            cursor.execute(_PACE)
        try:
            cursor.execute(_VACUUM)
        finally:
            if has_session:
                cursor.execute(_FULL_SPEED)


class Tidier:
    """Vacuums in a thread of its own when it is worth it: due jobs must not wait until a large table is read.

    Each node has one. What the database says of the last vacuum keeps them from vacuuming one after the other.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._thread: threading.Thread | None = None
        self._left = 0  # dead rows that an open snapshot may still see

    def look(self) -> bool:
        """Start it if there is enough to do; returns whether it did."""
        if (self._thread and self._thread.is_alive()) or not self._is_due():
            return False
        self._thread = threading.Thread(target=self._vacuum, name="faktory-vacuum", daemon=True)
        self._thread.start()
        return True

    def join(self, timeout_s: float) -> None:
        """Wait for the one that runs, if any does."""
        if self._thread:
            self._thread.join(timeout_s)

    def _is_due(self) -> bool:
        seen = dead(using=self.alias)
        self._left = min(self._left, seen.rows)
        return seen.rows >= self._left + DEAD_ROWS and not seen.is_resting

    def _vacuum(self) -> None:
        began = time.monotonic()
        try:
            vacuum(using=self.alias)
            self._left = dead_rows(using=self.alias)
            logger.debug("vacuumed seconds=%.2f left=%d", time.monotonic() - began, self._left)
        except (Error, BrokerUnavailable) as error:
            logger.warning("could not vacuum the table of jobs error=%s", error)
        finally:
            connections[self.alias].close()
