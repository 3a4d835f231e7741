"""Prepare hot statements once per connection: planning a claim costs more than running it (ADR 0006).

`execute` runs a `Statement` by PREPARE and EXECUTE through Django's cursor, so that any driver works and the query log
shows it; `execute_on` runs it through libpq (`pipeline`) if nothing observes the cursor. Statements are replanned every
REPLAN_S, because a plan made while a table was small must not be kept. Behind a pooler that changes sessions between
transactions, which is detected before the first use, they are sent unprepared.
"""

from __future__ import annotations

import re
import secrets
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from ....core.logs import get_logger
from ..cursor_hooks import has_own_cursor
from . import functions
from .pipeline import Result, Rows, SentStatements, can_pipeline, has_psycopg3, run_and_commit, run_prepared
from .pooler import is_pooled

logger = get_logger(__name__)

REPLAN_S = 2.0
"""Maximum age of a plan, in seconds."""
USES_BEFORE = 2
"""Uses of a statement on a connection before it is prepared.

A connection that lives for one request gains nothing from a statement prepared for one use.
"""

LOST = frozenset({"26000", "42P05"})
"""SQLSTATEs: a prepared statement does not exist, or already exists."""

# `$n` is for PREPARE; a statement that is sent unprepared needs the driver's `%s`.
_PLACE = re.compile(r"\$(\d+)")

Call = tuple["Statement", Sequence[Any]]


def unnest(*places: int | str) -> str:
    """Return SQL that turns the array parameters `$n` of these places into rows.

    A subquery hides the array's length from the planner. Otherwise a plan made for the given array looks cheaper than a
    plan for any array, and PostgreSQL plans the statement at each use: 400 µs for the end of a single job.
    """
    return f"unnest({', '.join(f'(SELECT ${place})' for place in places)})"


def clock(place: int) -> str:
    """Return SQL for the time in this parameter, or the database's, as `now`."""
    return f"(SELECT COALESCE(${place}, STATEMENT_TIMESTAMP()) AS now) AS clock"


class Use:
    """Uses of one statement on one connection, and the name and age of its plan if it is prepared."""

    __slots__ = ("name", "planned_at", "used_at", "uses")

    def __init__(self) -> None:
        self.uses = 0
        self.used_at = 0.0
        self.planned_at = 0.0
        self.name = ""

    def take_name(self, *, ages: bool) -> str:
        """Return the prepared name if the plan is recent enough, else ""."""
        now = time.monotonic()
        if not self.name or (ages and now - self.planned_at > REPLAN_S):
            return ""
        # Counts as a use: otherwise `prepare_if_worthwhile` would take the statement for a rare one, and not replan it.
        self.uses += 1
        self.used_at = now
        return self.name


class Statement:
    """SQL with parameters `$1, $2, …` of the given types; run it with `execute`.

    `ages` is whether its plan depends on the stored data, so that it has to be replanned.
    """

    works = True
    """Whether connections keep their sessions. Set to False for the whole process once a connection did not."""

    _without_pooler: ClassVar[WeakKeyDictionary[Any, None]] = WeakKeyDictionary()
    """Connections that were checked and have no pooler."""

    def __init__(
        self, name: str, types: Sequence[str], sql: str, *, gives_rows: bool = True, ages: bool = True
    ) -> None:
        self.name, self.types, self.sql, self.gives_rows, self.ages = name, types, sql, gives_rows, ages
        # A `$n` may occur several times; a cursor needs a value for each occurrence, cast to the type that PREPARE
        # declares.
        self._places = [int(place) - 1 for place in _PLACE.findall(sql)]
        self._plain = _PLACE.sub(lambda match: f"%s::{types[int(match[1]) - 1]}", sql)
        self._execute = f"({', '.join(['%s'] * len(types))})"
        self.uses: WeakKeyDictionary[Any, Use] = WeakKeyDictionary()
        """Keyed by the driver's connection: prepared statements end with its session, and Django reconnects with a new
        one."""

    def command(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return what to send without a cursor: the name of a plan that is recent enough; None: use a cursor."""
        use = self.uses.get(connection.connection) if Statement.works else None
        return (use and use.take_name(ages=self.ages)) or None

    def prepare_if_worthwhile(self, cursor: CursorWrapper) -> Use | None:
        """Prepare the statement if worthwhile; None: send it unprepared."""
        connection = cursor.db.connection
        # No mutex: a connection is used by one thread at a time.
        use = self.uses.get(connection)
        if use is None:
            use = self.uses[connection] = Use()
        use.uses += 1
        now, last_used_at = time.monotonic(), use.used_at
        use.used_at = now
        if not Statement.works or use.uses <= USES_BEFORE or not can_join(cursor.db) or has_own_cursor(cursor.db):
            return None  # a backend with its own cursor may change `search_path`, to which a plan is bound
        if not use.name or (self.ages and now - use.planned_at > REPLAN_S):
            if now - last_used_at > REPLAN_S:
                return None  # used so seldom that each use would replan it
            if not keeps_session(cursor.db):
                return None
            self._prepare(cursor, use)
        return use

    def text(self, use: Use | None, values: Sequence[Any]) -> tuple[str, Sequence[Any]]:
        """Return the SQL to send and its values."""
        if use:
            return f"EXECUTE {use.name}{self._execute}", values
        return self._plain, [values[place] for place in self._places]

    def _prepare(self, cursor: CursorWrapper, use: Use) -> None:
        deallocate = f"DEALLOCATE {use.name}; " if use.name else ""
        # A unique name: if a pooler was not detected, a process must not run a statement that another process, perhaps
        # of another version, has prepared.
        name = f"faktory_{self.name}_{secrets.token_hex(6)}"
        use.name = ""  # if the PREPARE fails, the old name is gone
        cursor.execute(f"{deallocate}PREPARE {name} ({', '.join(self.types)}) AS {self.sql}")
        use.name, use.planned_at = name, time.monotonic()


def keeps_session(connection: BaseDatabaseWrapper) -> bool:
    """Return whether this connection keeps one session of the server.

    Checked once per connection, before its first prepared statement: inside a transaction of the project a failure
    would be too late, and PgBouncer from 1.21 on closes connections that name a statement it did not see being
    prepared.
    """
    raw = connection.connection
    if not Statement.works or raw in Statement._without_pooler:  # noqa: SLF001
        return Statement.works
    # The query is sent by the driver's own cursor, so Django does not translate its errors.
    with connection.wrap_database_errors:
        has_pooler = is_pooled(raw)
    if not has_pooler:
        Statement._without_pooler[raw] = None  # noqa: SLF001
        return True
    # For the whole process: its other connections most likely go through the same pooler.
    Statement.works = False
    logger.info("a pooler is between us and PostgreSQL: going on without prepared statements")
    return False


def can_join(connection: BaseDatabaseWrapper) -> bool:
    """Return whether several statements can be sent as one message and one transaction.

    Not with psycopg2, which returns only the last statement's rows, and not if the server binds values
    (`server_side_binding`): it cannot bind the values of EXECUTE, and the driver prepares statements itself.
    """
    return has_psycopg3() and not connection.settings_dict["OPTIONS"].get("server_side_binding")


def execute_on(connection: BaseDatabaseWrapper, calls: Sequence[Call]) -> list[Rows]:
    """Run statements like `execute`, and create a cursor only if one is needed.

    Creating a cursor takes as long as sending a statement.
    """
    connection.close_if_health_check_failed()  # both as Django does for a cursor
    connection.ensure_connection()
    try:
        # With a closed connection, use a cursor: it raises Django's usual error.
        named = [] if connection.connection.closed else _prepared_calls(connection, calls)
        if named:
            try:
                return run_prepared(connection, named)
            except Error as error:
                # Outside a transaction the failed message has changed nothing, so it may be sent again without prepared
                # statements.
                if not _disable_if_lost(error) or connection.in_atomic_block:
                    raise
        with connection.cursor() as cursor:
            return execute(cursor, calls)
    except Error as error:
        if name := functions.undefined(error):
            raise functions.missing(connection, name) from error
        raise


def execute(cursor: CursorWrapper, calls: Sequence[Call]) -> list[Rows]:
    """Run statements with their values and return the rows of each.

    If they can be joined, they take one round trip, and outside a transaction they are one transaction.
    """
    try:
        return _send(cursor, [(*call, call[0].prepare_if_worthwhile(cursor)) for call in calls])
    except Error as error:
        if not _disable_if_lost(error) or cursor.db.in_atomic_block:
            raise  # the transaction is broken; the next one sends unprepared statements
        return _send(cursor, [(*call, None) for call in calls])


def execute_and_commit(connection: BaseDatabaseWrapper, calls: Sequence[Call]) -> list[Rows] | None:
    """Run statements and COMMIT, unless one failed, in one message. None, with nothing done, if this is impossible.

    Django's own commit after it finds no open transaction, and does nothing.
    """
    if not can_pipeline(connection) or not can_join(connection):
        return None
    # Without a plan that is recent enough, a cursor prepares the statements first, with messages of their own.
    named = _prepared_calls(connection, calls)
    if not named:
        with connection.cursor() as cursor:
            uses = [statement.prepare_if_worthwhile(cursor) for statement, _ in calls]
        named = [(use.name, values) for use, (_, values) in zip(uses, calls, strict=True) if use]
    if len(named) < len(calls):
        return None
    try:
        return run_and_commit(connection, named)
    except Error as error:
        # The caller has to roll back, whether or not prepared statements are lost.
        _disable_if_lost(error)
        raise


class PreparedSession:
    """Prepared statements of a connection that an event loop borrows (ADR 0021).

    Conditions that only the connection's thread can change are checked once, in `of`.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._uses: dict[Statement, Use] = {}
        poll = select.poll()  # kept, because creating one takes as long as a poll
        poll.register(connection.connection.pgconn.socket, select.POLLIN)
        self._poll = poll.poll
        """Return the socket's events after at most this many milliseconds; empty if it has no input."""

    @classmethod
    def of(cls, connection: BaseDatabaseWrapper) -> PreparedSession | None:
        """Return the session, or None if its statements must go through the thread."""
        raw = connection.connection
        if raw is None or raw.closed or connection.in_atomic_block or not connection.autocommit:
            return None
        return cls(connection) if Statement.works and can_pipeline(connection) else None

    def begin(
        self,
        calls: Sequence[Call],
        on_rows: Callable[[list[Rows]], Result | Callable[[], Result]],
        on_error: Callable[[Error], Callable[[], Result]],
    ) -> SentStatements[Result] | None:
        """Send statements without waiting for their rows; None, with nothing done, unless all are prepared."""
        # Input between two messages is the session's end, a notice or a notification: the thread finds out which.
        if not Statement.works or self._poll(0):
            return None
        named: list[tuple[str, Sequence[Any]]] = []
        for statement, values in calls:
            use = self._uses.get(statement) or statement.uses.get(self._connection.connection)
            if use is None or not (name := use.take_name(ages=statement.ages)):
                return None
            self._uses[statement] = use
            named.append((name, values))
        return SentStatements(self._connection, named, on_rows, on_error, poll=self._poll)


def _prepared_calls(connection: BaseDatabaseWrapper, calls: Sequence[Call]) -> list[tuple[str, Sequence[Any]]]:
    """Return commands and values if all statements may bypass the cursor, else an empty list."""
    if not can_pipeline(connection):
        return []
    named: list[tuple[str, Sequence[Any]]] = []
    for statement, values in calls:
        command = statement.command(connection)
        if command is None:
            return []
        named.append((command, values))
    return named


def _disable_if_lost(error: Error) -> bool:
    """Return whether the error means that a pooler took prepared statements from this session.

    If so, this process uses no prepared statements from then on.
    """
    if getattr(error.__cause__, "sqlstate", None) not in LOST:
        return False
    Statement.works = False
    logger.warning("prepared statements are lost between transactions (a pooler?): going on without them")
    return True


def _send(cursor: CursorWrapper, calls: Sequence[tuple[Statement, Sequence[Any], Use | None]]) -> list[Rows]:
    if can_pipeline(cursor.db):
        prepared = [(use.name, values) for _, values, use in calls if use]
        # A mixture cannot be pipelined: unprepared statements need the cursor to bind their values.
        if len(prepared) == len(calls):
            return run_prepared(cursor.db, prepared)
    results: list[Rows] = []
    if not can_join(cursor.db):
        for statement, values, _ in calls:
            cursor.execute(*statement.text(None, values))
            results.append(_rows(cursor, statement))
        return results
    # As one text, PostgreSQL runs the statements as one transaction, unless one is open.
    texts = [statement.text(use, values) for statement, values, use in calls]
    cursor.execute("; ".join(sql for sql, _ in texts), [value for _, values in texts for value in values])
    for statement, _, _ in calls:
        if results:
            cursor.nextset()
        results.append(_rows(cursor, statement))
    return results


def _rows(cursor: CursorWrapper, statement: Statement) -> Rows:
    return cursor.fetchall() if statement.gives_rows else []
