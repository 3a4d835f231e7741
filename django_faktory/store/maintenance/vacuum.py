"""Vacuum the jobs table on PostgreSQL sooner than autovacuum does. ADR 0009.

Each finished job leaves dead entries at the head of the index of ready jobs, which every claim scans. Autovacuum looks
once a minute; by then a fast queue has left a million of them.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.logs import get_logger
from ..dialects.base import JOB
from ..dialects.postgresql.pooler import is_pooled
from ..transactions import run
from .background import BackgroundStep

logger = get_logger(__name__)

DEAD_ROWS = 50_000
"""Dead rows that make a vacuum worthwhile: scanning them costs a claim 0.25 ms, removing them takes 0.1 s."""

REST = 20
"""No node starts a vacuum until this many times the duration of the last one has passed.

Vacuums thus take at most 5 % of the time, for any number of nodes.
"""

BYTES_PER_S = 100e6
"""Bytes of indexes that a vacuum reads per second; an estimate, since PostgreSQL reports when the last vacuum ended,
but not its duration.
"""

SHORTEST_REST_S = 5.0

# Returns no row if we lack permission to vacuum the table or a vacuum is already running. Every vacuum, autovacuum too,
# writes these statistics at its end, so each node sees the vacuums of all nodes.
_DEAD_ROWS_SQL = """
SELECT stat.n_dead_tup, EXTRACT(EPOCH FROM CLOCK_TIMESTAMP() - GREATEST(stat.last_vacuum, stat.last_autovacuum)),
  pg_indexes_size(class.oid)
FROM pg_stat_user_tables AS stat JOIN pg_class AS class ON class.oid = stat.relid
WHERE class.oid = to_regclass(%s) AND pg_has_role(class.relowner, 'USAGE')
  AND NOT EXISTS (SELECT 1 FROM pg_stat_progress_vacuum AS running WHERE running.relid = class.oid)"""

# Dead index entries cause the cost, however few pages of the table they belong to. With 50,000 of them at the head
# of a queue a claim reads 793 pages; after a vacuum without INDEX_CLEANUP still 793, after one with it 33. TRUNCATE is
# off because returning space needs a lock that claims would wait for.
_VACUUM_SQL = f"VACUUM (SKIP_LOCKED, INDEX_CLEANUP ON, TRUNCATE OFF, PARALLEL 0) {JOB}"

# Five times autovacuum's usual pace, which the table's storage parameters set for autovacuum too. A table of 2,000,000
# rows with 108,000 dead ones takes 5 s, compared to 0.5 s at full speed.
_PACE = "SET vacuum_cost_delay = 2; SET vacuum_cost_limit = 1000"
_FULL_SPEED = "RESET vacuum_cost_delay; RESET vacuum_cost_limit"


class DeadRows(NamedTuple):
    """PostgreSQL's statistics on dead rows of the jobs table."""

    rows: int = 0
    """Dead rows; 0 if a vacuum runs, if we may not vacuum the table, and on databases that clean up by themselves."""
    vacuumed_s_ago: float = math.inf
    """Seconds since the last vacuum by any node, or autovacuum, ended."""
    index_bytes: int = 0

    def is_resting(self, *, min_rest_s: float = SHORTEST_REST_S, rest_factor: float = REST) -> bool:
        """Return whether the last vacuum ended too recently for another one."""
        return self.vacuumed_s_ago < max(min_rest_s, rest_factor * self.index_bytes / BYTES_PER_S)


def read_dead_rows(*, using: str) -> DeadRows:
    """Read the statistics of the jobs table; all zero on other databases."""
    if connections[using].vendor != "postgresql":
        return DeadRows()

    def verb(connection: BaseDatabaseWrapper) -> DeadRows:
        with connection.cursor() as cursor:
            cursor.execute(_DEAD_ROWS_SQL, [JOB])
            row = cursor.fetchone()
        return DeadRows(int(row[0]), math.inf if row[1] is None else float(row[1]), int(row[2])) if row else DeadRows()

    return run(using, verb, atomic=False)


def count_dead_rows(*, using: str) -> int:
    """Return the number of dead rows that a vacuum by us can remove."""
    return read_dead_rows(using=using).rows


def vacuum(*, using: str) -> None:
    """Vacuum the jobs table. Blocks until it is done; not allowed inside a transaction.

    Only a change of the table's definition has to wait for it.
    """
    with connections[using].cursor() as cursor:
        has_session = not is_pooled(connections[using].connection)
        if has_session:  # behind a pooler SET would apply to another client's statements
            cursor.execute(_PACE)
        try:
            cursor.execute(_VACUUM_SQL)
        finally:
            if has_session:
                cursor.execute(_FULL_SPEED)


class Vacuumer(BackgroundStep):
    """Runs vacuums when worthwhile.

    The node that has the turn of this step starts one. It ends its turn before the vacuum ends; the statistics of the
    last vacuum, which all nodes read, keep the next node from starting another one too soon.
    """

    def __init__(
        self,
        alias: str,
        *,
        min_dead_rows: int = DEAD_ROWS,
        min_rest_s: float = SHORTEST_REST_S,
        rest_factor: float = REST,
    ) -> None:
        super().__init__("vacuum", self._vacuum)
        self.alias = alias
        self._min_dead_rows = min_dead_rows
        self._min_rest_s, self._rest_factor = min_rest_s, rest_factor
        self._unremovable = 0  # dead rows that the last vacuum could not remove: an open snapshot may still see them

    def start_if_due(self) -> bool:
        """Start a vacuum if there are enough dead rows; return whether there are. None are counted while one runs."""
        is_due = self._is_due()
        if is_due:
            self.start()
        return is_due

    def _is_due(self) -> bool:
        statistics = read_dead_rows(using=self.alias)
        self._unremovable = min(self._unremovable, statistics.rows)
        if statistics.rows < self._unremovable + self._min_dead_rows:
            return False
        return not statistics.is_resting(min_rest_s=self._min_rest_s, rest_factor=self._rest_factor)

    def _vacuum(self) -> None:
        began = time.monotonic()
        vacuum(using=self.alias)
        self._unremovable = count_dead_rows(using=self.alias)
        logger.debug("vacuumed seconds=%.2f left=%d", time.monotonic() - began, self._unremovable)
