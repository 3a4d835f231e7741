"""Run our own statements: prepared once in each session that is ours, and unprepared in others (ADR 0043).

`execute_on` sends a `Command` through libpq (`pipeline`); through a cursor with psycopg2, and where something observes
it. Behind a pooler that changes sessions between transactions, detected before the first use, none is prepared.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from ....core.logs import get_logger
from . import functions
from .pipeline import Rows, can_pipeline, has_psycopg3, prepare, run_and_commit, run_prepared
from .pooler import is_pooled

logger = get_logger(__name__)

USES_BEFORE = 2
"""Uses of a command on a connection before it is prepared.

A connection that lives for one request gains nothing from a command prepared for one use.
"""

LOST = frozenset({"26000", "42P05"})
"""SQLSTATEs: a prepared statement does not exist, or already exists."""

_PLACE = re.compile(r"\$(\d+)")

Call = tuple["Command", Sequence[Any]]


class Command:
    """SQL with parameters `$1, $2, …` of the given types; run it with `execute_on`.

    It is never planned again for other data, so its plan must not depend on the stored data: it looks nothing up, or
    calls a function (ADR 0043).
    """

    works = True
    """Whether connections keep their sessions. Set to False for the whole process once a connection did not."""

    _without_pooler: ClassVar[WeakKeyDictionary[Any, None]] = WeakKeyDictionary()
    """Connections that were checked and have no pooler."""

    def __init__(self, name: str, types: Sequence[str], sql: str, *, gives_rows: bool = True) -> None:
        self.name, self.gives_rows = name, gives_rows
        # Each `$n` is cast, because a message does not name the types. A cursor needs a value for each occurrence.
        self.sql = _PLACE.sub(lambda match: f"{match[0]}::{types[int(match[1]) - 1]}", sql)
        self._plain = _PLACE.sub("%s", self.sql)
        self._places = [int(place) - 1 for place in _PLACE.findall(sql)]
        # Keyed by the driver's connection: prepared statements end with its session, and Django reconnects with a new
        # one. No mutex: a connection is used by one thread at a time.
        self._uses: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def prepared_name(self, connection: BaseDatabaseWrapper) -> str:
        """Return the name of the prepared statement in this session, or ""."""
        return self._names.get(connection.connection, "") if Command.works else ""

    def text(self, connection: BaseDatabaseWrapper) -> str:
        """Return the name of the prepared statement, or the SQL; prepares it first if it is worthwhile."""
        if name := self.prepared_name(connection):
            return name
        self.check(connection)
        raw = connection.connection
        uses = self._uses[raw] = self._uses.get(raw, 0) + 1
        if uses <= USES_BEFORE or not keeps_session(connection):
            return self.sql
        # A unique name: if a pooler was not detected, a process must not run a statement that another process, perhaps
        # of another version, has prepared.
        name = f"{self.name}_{secrets.token_hex(6)}"
        prepare(connection, name, self.sql)
        self._names[raw] = name
        return name

    def plain(self, values: Sequence[Any]) -> tuple[str, Sequence[Any]]:
        """Return the SQL and values for a cursor."""
        return self._plain, [values[place] for place in self._places]

    def check(self, connection: BaseDatabaseWrapper) -> None:
        """Raise FunctionsMissing if the statement cannot run there."""


def keeps_session(connection: BaseDatabaseWrapper) -> bool:
    """Return whether this connection keeps one session of the server.

    Checked once per connection, before its first prepared statement: inside a transaction of the project a failure
    would be too late, and PgBouncer from 1.21 on closes connections that name a statement it did not see being
    prepared.
    """
    raw = connection.connection
    if not Command.works or raw in Command._without_pooler:  # noqa: SLF001
        return Command.works
    # The query is sent by the driver's own cursor, so Django does not translate its errors.
    with connection.wrap_database_errors:
        has_pooler = is_pooled(raw)
    if not has_pooler:
        Command._without_pooler[raw] = None  # noqa: SLF001
        return True
    # For the whole process: its other connections most likely go through the same pooler.
    Command.works = False
    logger.info("a pooler is between us and PostgreSQL: going on without prepared statements")
    return False


def can_join(connection: BaseDatabaseWrapper) -> bool:
    """Return whether several statements can be sent as one message and one transaction.

    Not with psycopg2, which returns only the last statement's rows, and not if the server binds values
    (`server_side_binding`): it binds those of a single statement.
    """
    return has_psycopg3() and not connection.settings_dict["OPTIONS"].get("server_side_binding")


def execute_on(connection: BaseDatabaseWrapper, calls: Sequence[Call]) -> list[Rows]:
    """Run commands with their values and return the rows of each.

    If they can be joined, they take one round trip, and outside a transaction they are one transaction. A cursor is
    created only if one is needed: creating it takes as long as sending a statement.
    """
    connection.close_if_health_check_failed()  # both as Django does for a cursor
    connection.ensure_connection()
    try:
        # With a closed connection, use a cursor: it raises Django's usual error.
        if connection.connection.closed or not can_pipeline(connection):
            return _run_by_cursor(connection, calls)
        try:
            return run_prepared(connection, _texts(connection, calls))
        except Error as error:
            # Inside a transaction it is broken; the next one sends unprepared statements.
            if not disable_if_lost(error) or connection.in_atomic_block:
                raise
        return run_prepared(connection, _texts(connection, calls))
    except Error as error:
        if name := functions.undefined(error):
            raise functions.missing(connection, name) from error
        raise


def execute_and_commit(connection: BaseDatabaseWrapper, calls: Sequence[Call]) -> list[Rows] | None:
    """Run commands and COMMIT, unless one failed, in one message. None, with nothing done, if this is impossible.

    Django's own commit after it finds no open transaction, and does nothing.
    """
    # Only in the outermost block: COMMIT inside a savepoint would also commit the caller's outer transaction.
    is_outermost = len(connection.atomic_blocks) == 1 and connection.commit_on_exit
    if not (is_outermost and can_pipeline(connection)):
        return None
    try:
        return run_and_commit(connection, _texts(connection, calls))
    except Error as error:
        # The caller has to roll back, whether or not prepared statements are lost.
        disable_if_lost(error)
        raise


def _texts(connection: BaseDatabaseWrapper, calls: Sequence[Call]) -> list[tuple[str, Sequence[Any]]]:
    return [(command.text(connection), values) for command, values in calls]


def disable_if_lost(error: Error) -> bool:
    """Return whether the error means that a pooler took prepared statements from this session.

    If so, this process uses no prepared statements from then on.
    """
    if getattr(error.__cause__, "sqlstate", None) not in LOST:
        return False
    Command.works = False
    logger.warning("prepared statements are lost between transactions (a pooler?): going on without them")
    return True


def _run_by_cursor(connection: BaseDatabaseWrapper, calls: Sequence[Call]) -> list[Rows]:
    with connection.cursor() as cursor:
        for command, _ in calls:
            command.check(connection)
        texts = [command.plain(values) for command, values in calls]
        results: list[Rows] = []
        if can_join(connection):
            # As one text, PostgreSQL runs the statements as one transaction, unless one is open.
            cursor.execute("; ".join(sql for sql, _ in texts), [value for _, values in texts for value in values])
        for place, (command, _) in enumerate(calls):
            if not can_join(connection):
                cursor.execute(*texts[place])
            elif place:
                cursor.nextset()
            results.append(cursor.fetchall() if command.gives_rows else [])
        return results
