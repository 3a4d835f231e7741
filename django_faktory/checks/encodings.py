"""System check of the encodings of the databases that store jobs or an outbox: each text must be storable.

A text that the encoding cannot store is refused: the push raises InvalidPayload, and a result ends its job as dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register
from django.db.backends.base.base import BaseDatabaseWrapper

from .settings import written_databases

_NARROW_COLUMNS = """SELECT table_name, column_name, character_set_name, CONCAT(
  'ALTER TABLE ', table_name, ' MODIFY `', column_name, '` ', column_type, ' CHARACTER SET utf8mb4',
  IF(is_nullable = 'YES', '', ' NOT NULL'), IF(column_default IS NULL, '', CONCAT(' DEFAULT ', column_default)))
FROM information_schema.columns
WHERE table_schema = DATABASE() AND LEFT(table_name, 15) = 'django_faktory_' AND character_set_name <> 'utf8mb4'
ORDER BY table_name, ordinal_position"""


@register(Tags.database)
def check_encoding(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check that the server, its tables and the session can store every text."""
    named = [connection for connection in written_databases() if connection.alias in (databases or ())]
    return [message for connection in named for message in _check_database(connection)]


def _check_database(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    if connection.vendor == "postgresql":
        [(encoding,)] = _select(connection, "SHOW server_encoding")
        remedy = (
            "An encoding cannot be changed: dump the database with pg_dump, CREATE DATABASE … ENCODING 'UTF8' "
            "TEMPLATE template0, and restore the dump there."
        )
        return [] if encoding == "UTF8" else [_error(connection, f"encoding {encoding}", "UTF8", remedy)]
    if connection.vendor != "mysql":
        return []
    [(session,)] = _select(connection, "SELECT @@character_set_connection")
    if session != "utf8mb4":
        return [_error(connection, f"charset {session} of the session", "utf8mb4", '"OPTIONS": {"charset": "utf8mb4"}')]
    columns = _select(connection, _NARROW_COLUMNS)
    if not columns:
        return []
    table, column, charset, _ = columns[0]
    # Not CONVERT TO, which would also change the collation of names: they are compared byte for byte.
    remedy = "; ".join(["ALTER DATABASE CHARACTER SET utf8mb4", *(row[3] for row in columns)])
    return [_error(connection, f"charset {charset} of {table}.{column}", "utf8mb4", remedy)]


def _select(connection: BaseDatabaseWrapper, sql: str) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


def _error(connection: BaseDatabaseWrapper, actual: str, expected: str, remedy: str) -> Error:
    return Error(
        f"DATABASES[{connection.alias!r}]: {actual}: expected {expected}, which can store every text of a job",
        hint=remedy,
        id="django_faktory.E018",
    )
