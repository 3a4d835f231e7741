"""Statements PostgreSQL plans once instead of at each use: planning the claim costs more than carrying it out.

By SQL's own PREPARE and EXECUTE, so that any driver and Django's query log see plain statements. A plan made while
the table was small must not outlive its time: it is made anew every few seconds. Behind a pooler that gives each
transaction another session PREPARE cannot work: that is noticed before the first, and statements then go as they are.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from ...logs import get_logger
from ...poolers import is_pooled
from .cursor_hooks import has_own_cursor
from .pipeline import Flight, Rows, Told, can_pipeline, has_psycopg3, run_last, run_prepared

logger = get_logger(__name__)

REPLAN_S = 2.0
USES_BEFORE = 2
"""A connection that lives for one request gains nothing from a statement prepared for one use."""

LOST = frozenset({"26000", "42P05"})
"""A prepared statement is not there, or already: SQLSTATEs."""

_PLACE = re.compile(r"\$(\d+)")

Call = tuple["Statement", Sequence[Any]]


class _Use:
    """How one connection has used one statement."""

    __slots__ = ("name", "planned_at", "used_at", "uses")

    def __init__(self) -> None:
        self.uses = 0
        self.used_at = 0.0
        self.planned_at = 0.0
        self.name = ""


class Statement:
    """SQL with `$1, $2, …` of the given types; run by `execute`. It `ages` where its plan depends on what is stored."""

    works = True
    """Whether sessions stay with their connection; set to False for all when one was seen that does not."""

    _known: ClassVar[WeakKeyDictionary[Any, None]] = WeakKeyDictionary()
    """Connections that no pooler was found on."""

    def __init__(
        self, name: str, types: Sequence[str], sql: str, *, gives_rows: bool = True, ages: bool = True
    ) -> None:
        self.name, self.types, self.sql, self.gives_rows, self.ages = name, types, sql, gives_rows, ages
        self._places = [int(place) - 1 for place in _PLACE.findall(sql)]
        self._plain = _PLACE.sub(lambda match: f"%s::{types[int(match[1]) - 1]}", sql)
        self._execute = f"({', '.join(['%s'] * len(types))})"
        self._uses: WeakKeyDictionary[Any, _Use] = WeakKeyDictionary()

    def ready(self, cursor: CursorWrapper) -> _Use | None:
        """How it is prepared on this connection; None where it goes as it is."""
        connection = cursor.db.connection
        use = self._uses.get(connection)
        if use is None:
            use = self._uses[connection] = _Use()
        use.uses += 1
        now, last = time.monotonic(), use.used_at
        use.used_at = now
        if not Statement.works or use.uses <= USES_BEFORE or not joins(cursor.db) or has_own_cursor(cursor.db):
            return None  # a backend with its own cursor may change `search_path`, to which a plan is bound
        if not use.name or (self.ages and now - use.planned_at > REPLAN_S):
            if now - last > REPLAN_S:
                return None  # so seldom used, it would be planned anew each time
            if not keeps_session(cursor.db):
                return None
            self._prepare(cursor, use)
        return use

    def at_hand(self, connection: BaseDatabaseWrapper) -> str:
        """Its name where it is prepared on this connection with a plan that is not too old, else ""."""
        use = self._uses.get(connection.connection)
        now = time.monotonic()
        if use is None or not use.name or (self.ages and now - use.planned_at > REPLAN_S):
            return ""
        use.uses += 1
        use.used_at = now
        return use.name

    def text(self, use: _Use | None, values: Sequence[Any]) -> tuple[str, Sequence[Any]]:
        """The SQL to send, and the values for its places."""
        if use:
            return f"EXECUTE {use.name}{self._execute}", values
        return self._plain, [values[place] for place in self._places]

    def _prepare(self, cursor: CursorWrapper, use: _Use) -> None:
        old = f"DEALLOCATE {use.name}; " if use.name else ""
        # A name that nobody else has: where a pooler was not found out, no process must carry out what another one,
        # of another version perhaps, has prepared.
        name = f"faktory_{self.name}_{secrets.token_hex(6)}"
        cursor.execute(f"{old}PREPARE {name} ({', '.join(self.types)}) AS {self.sql}")
        use.name, use.planned_at = name, time.monotonic()


def keeps_session(connection: BaseDatabaseWrapper) -> bool:
    """Whether this connection stays with one session of the server.

    Look once a connection, before something is lost: inside a transaction of the project's it would be too late, and
    PgBouncer, from 1.21 on, cuts connections that name a statement it did not see being prepared.
    """
    raw = connection.connection
    if not Statement.works or raw in Statement._known:  # noqa: SLF001
        return Statement.works
    with connection.wrap_database_errors:
        found = is_pooled(raw)
    if not found:
        Statement._known[raw] = None  # noqa: SLF001
        return True
    Statement.works = False
    logger.info("a pooler is between us and PostgreSQL: going on without prepared statements")
    return False


def joins(connection: BaseDatabaseWrapper) -> bool:
    """Whether several statements may go as one message, as one transaction: not where the server binds the values, nor
    with psycopg2, which gives the rows of the last one only.

    The server cannot bind those of EXECUTE either; the driver has a way of its own to prepare there.
    """
    return has_psycopg3() and not connection.settings_dict["OPTIONS"].get("server_side_binding")


def execute_on(connection: BaseDatabaseWrapper, calls: Sequence[Call]) -> list[Rows]:
    """`execute` with a cursor only where one is needed: to make one takes as long as to send a statement."""
    connection.close_if_health_check_failed()  # these two as for a cursor
    connection.ensure_connection()
    named = [] if connection.connection.closed else _at_hand(connection, calls)
    if named:
        try:
            return run_prepared(connection, named)
        except Error as error:
            if not _are_lost(error) or connection.in_atomic_block:
                raise
    with connection.cursor() as cursor:
        return execute(cursor, calls)


def execute(cursor: CursorWrapper, calls: Sequence[Call]) -> list[Rows]:
    """Run statements with their values and return the rows of each.

    Where they can be joined they make one round trip and, outside of a transaction, are one of their own.
    """
    try:
        return _send(cursor, [(*call, call[0].ready(cursor)) for call in calls])
    except Error as error:
        if not _are_lost(error) or cursor.db.in_atomic_block:
            raise  # a transaction is spoilt; the next one goes without
        return _send(cursor, [(*call, None) for call in calls])


def execute_last(connection: BaseDatabaseWrapper, calls: Sequence[Call]) -> list[Rows] | None:
    """`execute`, and COMMIT unless a statement failed, in one message; None where that cannot be, and nothing was done.
    Django, asked to commit after it, finds nothing left to do."""
    if not Statement.works or not can_pipeline(connection) or not joins(connection):
        return None
    named = _at_hand(connection, calls)
    if not named:
        with connection.cursor() as cursor:
            uses = [statement.ready(cursor) for statement, _ in calls]
        named = [(use.name, values) for use, (_, values) in zip(uses, calls, strict=True) if use]
    if len(named) < len(calls):
        return None
    try:
        return run_last(connection, named)
    except Error as error:
        _are_lost(error)
        raise


def begin(
    connection: BaseDatabaseWrapper, calls: Sequence[Call], then: Callable[[list[Rows]], Told]
) -> Flight[Told] | None:
    """`execute` for who must not wait, where all is prepared for it; else None, and nothing was done."""
    named = _at_hand(connection, calls)
    return Flight(connection, named, then) if named else None


def _at_hand(connection: BaseDatabaseWrapper, calls: Sequence[Call]) -> list[tuple[str, Sequence[Any]]]:
    """Their names and values, where all are prepared and may go straight; else nothing."""
    if not Statement.works or not can_pipeline(connection):
        return []
    named = [(statement.at_hand(connection), values) for statement, values in calls]
    return named if all(name for name, _ in named) else []


def _are_lost(error: Error) -> bool:
    """Whether this says that somebody takes prepared statements away; from then on none are used."""
    if getattr(error.__cause__, "sqlstate", None) not in LOST:
        return False
    Statement.works = False
    logger.warning("prepared statements are lost between transactions (a pooler?): going on without them")
    return True


def _send(cursor: CursorWrapper, calls: Sequence[tuple[Statement, Sequence[Any], _Use | None]]) -> list[Rows]:
    if can_pipeline(cursor.db):
        prepared = [(use.name, values) for _, values, use in calls if use]
        if len(prepared) == len(calls):
            return run_prepared(cursor.db, prepared)
    found: list[Rows] = []
    if not joins(cursor.db):
        for statement, values, _ in calls:
            cursor.execute(*statement.text(None, values))
            found.append(_rows(cursor, statement))
        return found
    texts = [statement.text(use, values) for statement, values, use in calls]
    cursor.execute("; ".join(sql for sql, _ in texts), [value for _, values in texts for value in values])
    for statement, _, _ in calls:
        if found:
            cursor.nextset()
        found.append(_rows(cursor, statement))
    return found


def _rows(cursor: CursorWrapper, statement: Statement) -> Rows:
    return cursor.fetchall() if statement.gives_rows else []
