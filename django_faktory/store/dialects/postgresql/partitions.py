"""Partitions of the history on PostgreSQL (ADR 0049).

No statement waits for a lock on the whole table that writers or readers of it would wait behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from ....core.lifecycle import KEPT
from ..base import HISTORY
from ..partitions import DAY, Partition, Partitions, find
from .prepared import keeps_session

LOCK_WAIT_MS = 50
"""Statements that read the partition wait behind a lock for at most this long."""
DETACH_WAIT_MS = 2000
"""No statement waits behind DETACH CONCURRENTLY, which waits for each transaction that has read the table."""

_MUTEX = 5_218_806_127_240_961_313
"""Key of the advisory lock of changes of partitions."""

_IS_PARTITIONED = f"SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass('{HISTORY}')"

# The bounds are read as dates here, because their text depends on the session's DateStyle.
_PARTITIONS = f"""
SELECT one.oid::regclass::text, (bounds.texts[1])::date, (bounds.texts[2])::date, inhdetachpending
FROM pg_class AS parent
LEFT JOIN (pg_inherits JOIN pg_class AS one ON one.oid = inhrelid) ON inhparent = parent.oid
LEFT JOIN LATERAL (SELECT regexp_match(
  pg_get_expr(one.relpartbound, one.oid), $$FROM \\((?:'([^']+)'|MINVALUE)\\) TO \\('([^']+)'\\)$$) AS texts
) AS bounds ON TRUE
WHERE parent.oid = to_regclass('{HISTORY}') AND parent.relkind = 'p' ORDER BY 2 NULLS FIRST"""

# Tables that were detached; an interrupted removal leaves an empty one.
_DETACHED = f"""
SELECT oid::regclass::text FROM pg_class
WHERE relname ~ '^{HISTORY}_[0-9]{{8}}$' AND relkind = 'r' AND NOT relispartition
  AND relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('{HISTORY}'))"""

# A transaction that has read the table and may last: a dump, an analyst.
_READERS = f"""
SELECT EXISTS (SELECT FROM pg_locks JOIN pg_stat_activity USING (pid)
  WHERE relation = '{HISTORY}'::regclass AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND xact_start < clock_timestamp() - interval '1 second' AND pid <> pg_backend_pid())"""


class PostgresqlPartitions(Partitions):
    """RANGE without a default partition: with one, no day can be added that has rows, and none detached."""

    def read(self, connection: BaseDatabaseWrapper) -> list[Partition] | None:
        with connection.cursor() as cursor:
            cursor.execute(_PARTITIONS)
            rows = cursor.fetchall()
        # One row at least, if the table has partitions. A default partition has no end.
        found = [Partition(name, first or date.min, end, pending) for name, first, end, pending in rows if end]
        return found if rows else None

    def convert(self, connection: BaseDatabaseWrapper) -> None:
        with _alone(connection) as cursor:
            cursor.execute(_IS_PARTITIONED)
            if cursor.fetchone() != (False,):
                return
            cursor.execute(f"LOCK TABLE {HISTORY} IN ACCESS EXCLUSIVE MODE")
            cursor.execute(f"SELECT EXISTS (SELECT FROM {HISTORY})")
            if cursor.fetchone() == (True,):
                return
            cursor.execute(
                "SELECT pg_get_indexdef(indexrelid) FROM pg_index"
                f" WHERE indrelid = '{HISTORY}'::regclass AND NOT indisprimary"
            )
            indexes = [sql for (sql,) in cursor.fetchall()]
            schema = _schema(cursor)
            plain = f"{HISTORY}_plain"
            cursor.execute(f"ALTER TABLE {HISTORY} RENAME TO {plain}")
            columns = f"LIKE {plain} INCLUDING ALL EXCLUDING INDEXES"
            cursor.execute(f"CREATE TABLE {schema}.{HISTORY} ({columns}) PARTITION BY RANGE (day)")
            cursor.execute(f"DROP TABLE {plain}")
            cursor.execute(f"ALTER TABLE {HISTORY} ADD PRIMARY KEY (id, day)")
            for sql in indexes:
                cursor.execute(sql)
            cursor.execute("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")
            [today] = cursor.fetchone()
            _attach(cursor, KEPT, KEPT + DAY)
            _attach(cursor, today, today + DAY)

    def add(self, connection: BaseDatabaseWrapper, first: date, end: date) -> None:
        with _alone(connection) as cursor:
            if find(self.read(connection) or [], first) is None:
                _attach(cursor, first, end)

    def empty(self, connection: BaseDatabaseWrapper, partition: Partition, forget: Callable[[], None]) -> bool:
        with _alone(connection) as cursor:
            cursor.execute(f"LOCK TABLE {partition.name} IN ACCESS EXCLUSIVE MODE")
            # The end of an index. EXISTS read the whole table, whose statistics may be missing.
            cursor.execute(f"SELECT COALESCE(max(purge_at) < clock_timestamp(), TRUE) FROM {partition.name}")
            [are_due] = cursor.fetchone()
            if are_due:
                cursor.execute(f"TRUNCATE {partition.name}")
                forget()
            return bool(are_due)

    def remove(self, connection: BaseDatabaseWrapper, partition: Partition) -> None:
        with connection.cursor() as cursor:
            cursor.execute(_READERS)
            if connection.in_atomic_block or cursor.fetchone() == (True,):
                return
            has_session = keeps_session(connection)
            if has_session:  # behind a pooler SET would apply to another client's statements
                cursor.execute(f"SET lock_timeout = {DETACH_WAIT_MS}")
            try:
                how = "FINALIZE" if partition.is_detaching else "CONCURRENTLY"
                cursor.execute(f"ALTER TABLE {HISTORY} DETACH PARTITION {partition.name} {how}")
            finally:
                if has_session:
                    cursor.execute("RESET lock_timeout")
        self.find_detached(connection)

    def find_detached(self, connection: BaseDatabaseWrapper) -> list[str]:
        with _alone(connection) as cursor:
            cursor.execute(_DETACHED)
            return [name for (name,) in cursor.fetchall() if not _drop_empty(cursor, name)]


@contextmanager
def _alone(connection: BaseDatabaseWrapper) -> Iterator[CursorWrapper]:
    """Open a transaction in which no other one changes partitions."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL lock_timeout = {LOCK_WAIT_MS}")
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_MUTEX])
        yield cursor


def _schema(cursor: CursorWrapper) -> str:
    cursor.execute(f"SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = '{HISTORY}'::regclass")
    [schema] = cursor.fetchone()
    return str(schema)


def _attach(cursor: CursorWrapper, first: date, end: date) -> None:
    is_kept = first == KEPT
    name = f"{_schema(cursor)}.{HISTORY}_{'kept' if is_kept else format(first, '%Y%m%d')}"
    # As a table, then attached: CREATE TABLE … PARTITION OF would wait for each reader, and writers behind it.
    cursor.execute(f"CREATE TABLE {name} (LIKE {HISTORY} INCLUDING ALL EXCLUDING IDENTITY)")
    lower = "MINVALUE" if is_kept else f"'{first.isoformat()}'"
    cursor.execute(f"ALTER TABLE {HISTORY} ATTACH PARTITION {name} FOR VALUES FROM ({lower}) TO ('{end.isoformat()}')")


def _drop_empty(cursor: CursorWrapper, name: str) -> bool:
    cursor.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
    cursor.execute(f"SELECT EXISTS (SELECT FROM {name})")
    [has_rows] = cursor.fetchone()
    if not has_rows:
        cursor.execute(f"DROP TABLE {name}")
    return not has_rows
