"""Call the stored functions: one `SELECT * FROM faktory_…($1, …)` for each (ADR 0043)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from . import functions
from .pipeline import Rows
from .prepared import Command, execute_on


class Function(Command):
    """A stored function, as a command that returns its rows."""

    def __init__(self, stored: functions.StoredFunction) -> None:
        self.types = stored.types
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
