"""Run the hot operations (push, claim, end) in each database's own SQL (ADR 0043); all others use the ORM.

`dialect_of` returns the dialect of a connection. PostgreSQL needs one statement per operation; SQLite and MariaDB share
a portable implementation of a few statements.
"""

from __future__ import annotations

from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper

from ...errors import FaktoryError
from .base import Dialect
from .mariadb import MARIADB
from .postgresql.dialect import POSTGRESQL
from .sqlite import SQLITE

# Django reports MariaDB as "mysql"; `checks.settings` refuses MySQL itself, and versions without SKIP LOCKED.
_BY_VENDOR: dict[str, Dialect] = {"postgresql": POSTGRESQL, "sqlite": SQLITE, "mysql": MARIADB}


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """Return the dialect for this connection's database. Raises FaktoryError for any other database."""
    try:
        return _BY_VENDOR[connection.vendor]
    except KeyError:
        raise FaktoryError(
            f"FAKTORY['DATABASE']: expected PostgreSQL, MariaDB or SQLite, got {connection.vendor}; "
            "name the alias of such a database"
        ) from None


def clock_of(connection: BaseDatabaseWrapper, now: datetime | None = None) -> datetime:
    """Return `now` if it is given, otherwise the database's time."""
    if now is not None:
        return now
    with connection.cursor() as cursor:
        return dialect_of(connection).now(cursor)
