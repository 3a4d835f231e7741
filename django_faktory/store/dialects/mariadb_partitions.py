"""Partitions of the history on MariaDB (ADR 0049). Each change needs the table alone for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date

from django.db import OperationalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from ..database_errors import LOCK_TIMEOUTS, error_code
from .base import HISTORY
from .partitions import DAY, Partition, Partitions

TRIES, PAUSE_S = 50, 0.01
"""A statement that waited for the table would make all later ones wait behind it, a second at least. So it is tried
at moments when no transaction uses the table."""

_PARTITIONS = """
SELECT partition_name, CAST(TRIM(BOTH "'" FROM partition_description) AS DATE) FROM information_schema.partitions
WHERE table_schema = DATABASE() AND table_name = %s AND partition_method = 'RANGE COLUMNS'
  AND partition_description <> 'MAXVALUE'"""


class MariadbPartitions(Partitions):
    """RANGE COLUMNS without gaps: a partition begins where the one before it ends."""

    def read(self, connection: BaseDatabaseWrapper) -> list[Partition] | None:
        with connection.cursor() as cursor:
            cursor.execute(_PARTITIONS, [HISTORY])
            rows = sorted(cursor.fetchall(), key=lambda row: row[1])
        firsts = [date.min, *(end for _, end in rows)]
        return [Partition(name, first, end) for (name, end), first in zip(rows, firsts, strict=False)] or None

    def convert(self, connection: BaseDatabaseWrapper) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT UTC_DATE(), EXISTS (SELECT 1 FROM {HISTORY})")
            today, has_rows = cursor.fetchone()
            if not has_rows and self.read(connection) is None:
                days = f"{_definition('kept', today)}, {_definition(f'd{today:%Y%m%d}', today + DAY)}"
                cursor.execute(
                    f"ALTER TABLE {HISTORY} DROP PRIMARY KEY, ADD PRIMARY KEY (id, day)"
                    f" PARTITION BY RANGE COLUMNS (day) ({days})"
                )

    def add(self, connection: BaseDatabaseWrapper, first: date, end: date) -> None:
        # Only at the end: after a jump of the clock, the last partition has the days before it too.
        if first >= max(one.end for one in self.read(connection) or []):
            _alter(connection, f"ADD PARTITION ({_definition(f'd{first:%Y%m%d}', end)})")

    def empty(self, connection: BaseDatabaseWrapper, partition: Partition, forget: Callable[[], None]) -> bool:
        name = connection.ops.quote_name(partition.name)
        with connection.cursor() as cursor:
            _when_unused(cursor, f"LOCK TABLES {HISTORY} WRITE NOWAIT")
            try:
                # A row may have come since the caller has looked. By state, with which the index begins.
                rows = f"{HISTORY} PARTITION ({name})"
                cursor.execute(f"SELECT MAX(purge_at) < UTC_TIMESTAMP(6) FROM {rows} GROUP BY state")
                are_due = all(is_due for (is_due,) in cursor.fetchall())
                if are_due:
                    cursor.execute(f"ALTER TABLE {HISTORY} DROP PARTITION {name}")
            finally:
                cursor.execute("UNLOCK TABLES")
        if are_due:
            # DROP PARTITION commits, and calls no trigger.
            with transaction.atomic(using=connection.alias):
                forget()
        return are_due

    def remove(self, connection: BaseDatabaseWrapper, partition: Partition) -> None:
        if any(one.name == partition.name for one in self.read(connection) or []):
            _alter(connection, f"DROP PARTITION {connection.ops.quote_name(partition.name)}")


def _definition(name: str, end: date) -> str:
    return f"PARTITION {name} VALUES LESS THAN ('{end.isoformat()}')"


def _alter(connection: BaseDatabaseWrapper, change: str) -> None:
    with connection.cursor() as cursor:
        _when_unused(cursor, f"ALTER TABLE {HISTORY} NOWAIT {change}")


def _when_unused(cursor: CursorWrapper, statement: str) -> None:
    for tries_left in reversed(range(TRIES)):
        try:
            cursor.execute(statement)
        except OperationalError as error:
            if error_code(error) not in LOCK_TIMEOUTS or not tries_left:
                raise
            time.sleep(PAUSE_S)
        else:
            return
