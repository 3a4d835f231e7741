"""The hot verbs in each database's own SQL: push, claim, end (ADR 0003). All else is the ORM's.

PostgreSQL does each in one statement; SQLite and MariaDB share a portable way of a few statements.
"""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper

from ...errors import FaktoryError
from .base import Dialect
from .mariadb import MARIADB
from .postgresql import POSTGRESQL
from .sqlite import SQLITE

_BY_VENDOR: dict[str, Dialect] = {"postgresql": POSTGRESQL, "sqlite": SQLITE, "mysql": MARIADB}


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """The dialect for this connection's database. Raises FaktoryError for one we do not speak."""
    try:
        return _BY_VENDOR[connection.vendor]
    except KeyError:
        raise FaktoryError(
            f"FAKTORY['DATABASE']: expected PostgreSQL, MariaDB or SQLite, got {connection.vendor}; "
            "name the alias of such a database"
        ) from None
