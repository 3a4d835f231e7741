"""Call the stored functions: one `SELECT * FROM faktory_…($1, …)` for each (ADR 0043).

A `Function` is a `Statement`, so that a message can contain both; but the plans of its statements are PostgreSQL's own.
On sessions of our own its SELECT is prepared. Elsewhere it is sent through libpq unprepared; with psycopg2, and where
something observes the cursor, through a cursor.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from . import functions
from .pipeline import Rows, prepare
from .prepared import USES_BEFORE, Statement, Use, execute_on, keeps_session


class Command(Statement):
    """A statement whose plan never ages: prepared once in each session that is ours, and sent unprepared in others."""

    def __init__(self, name: str, types: Sequence[str], sql: str, *, gives_rows: bool = True) -> None:
        super().__init__(name, types, sql, gives_rows=gives_rows, ages=False)

    def command(self, connection: BaseDatabaseWrapper) -> str:
        """Return the name of the prepared statement, or the statement itself."""
        use = self.uses.get(connection.connection)
        if use is not None and use.name and Statement.works:
            return use.name
        self.check(connection)
        if use is None:
            use = self.uses[connection.connection] = Use()
        use.uses += 1
        if use.uses > USES_BEFORE and Statement.works and keeps_session(connection):
            name = f"{self.name}_{secrets.token_hex(6)}"
            prepare(connection, name, self.sql)
            use.name = name
            return name
        return self.sql

    def prepare_if_worthwhile(self, cursor: CursorWrapper) -> Use | None:
        """Return None: a cursor sends the statement unprepared."""
        self.check(cursor.db)
        return None

    def check(self, connection: BaseDatabaseWrapper) -> None:
        """Raise FunctionsMissing if the statement cannot run there."""


class Function(Command):
    """A stored function, as a statement that returns its rows."""

    def __init__(self, stored: functions.StoredFunction) -> None:
        places = ", ".join(f"${place}" for place in range(1, len(stored.types) + 1))
        super().__init__(stored.name, stored.types, f"SELECT * FROM {stored.name}({places})")

    def check(self, connection: BaseDatabaseWrapper) -> None:
        functions.check(connection)


@functools.cache
def function(name: str) -> Function:
    """Return the function of this name, for a call that is part of a message."""
    return Function(functions.read()[name])


def call(connection: BaseDatabaseWrapper, name: str, values: Sequence[Any]) -> Rows:
    """Call a function and return its rows. Raises FunctionsMissing if the database lacks it."""
    [rows] = execute_on(connection, [(function(name), values)])
    return rows
