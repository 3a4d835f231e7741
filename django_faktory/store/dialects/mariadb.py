"""Dialect for MariaDB 10.6 and later (SKIP LOCKED). Django sets the session's time zone to UTC."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

from django.db import OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from ...core.lifecycle import KEPT, State
from ..database_errors import error_code
from .base import DELTA, JOB, insert_sql, marks, utc
from .idle_sessions import is_readable
from .job_columns import replaceable
from .mariadb_partitions import MariadbPartitions
from .portable import PortableDialect

LEAST_WAIT_S = 0.1
"""Shortest lock wait in seconds: the server counts whole seconds, so a shorter limit means not to wait at all."""

CERTAINLY_ACCEPTED = 64 * 1024
"""Characters of values below which a statement is not measured."""

RESERVED = 1024
"""Bytes of a packet that are not the statement's."""

_max_packets: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

NO_PARTITION = 1526

CLAIMED_WITHIN_S = 0.1
"""Time in seconds within which a running claim is expected to end."""


class MariadbDialect(PortableDialect):
    """Dialect for MariaDB.

    An upsert's assignments run from left to right and see earlier ones: `state`, which their condition reads, comes
    last.
    """

    partitions = MariadbPartitions()
    skip_lock = " FOR UPDATE SKIP LOCKED"
    plain_lock = " FOR UPDATE"
    # MySQL deprecates VALUES() in favour of an alias for the new row, which MariaDB does not have.
    upsert_tail = "ON DUPLICATE KEY UPDATE " + ", ".join(
        f"{column} = IF({replaceable()}, VALUES({column}), {column})"
        for column in PortableDialect._replaced  # noqa: SLF001
    )
    own_mark = "CONNECTION_ID()"
    add_tail = f"ON DUPLICATE KEY UPDATE amount = {DELTA}.amount + VALUES(amount)"

    # REPEATABLE READ applies to the next transaction only; Django's default is READ COMMITTED.
    begin_snapshot = (
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
    )
    names_of_json = (
        "SELECT name FROM JSON_TABLE(%s, '$[*]' COLUMNS (name VARCHAR(255) CHARACTER SET utf8mb4 PATH '$')) AS given"
    )

    def age(self, moment: str) -> str:
        # Counted in microseconds: TIMESTAMPDIFF drops the fraction of its unit.
        return f"TIMESTAMPDIFF(MICROSECOND, {moment}, UTC_TIMESTAMP(6)) / 1e6"

    def now(self, cursor: CursorWrapper) -> datetime:
        cursor.execute("SELECT UTC_TIMESTAMP(6)")
        moment: datetime = cursor.fetchone()[0]
        return utc(moment)

    def write_rows(self, cursor: CursorWrapper, rows: Sequence[tuple[Any, ...]], tail: str = "") -> None:
        """Insert the rows; the driver turns `executemany` into statements of at most 64 KiB."""
        cursor.executemany(insert_sql(1, len(rows[0]), tail), rows)

    def delete(self, cursor: CursorWrapper, ids: Sequence[int]) -> int:
        """Delete locked jobs by their ids.

        Without LIMIT, if the jobs are most of a small table, the server scans all rows, and waits for each locked one
        (MariaDB 10.11).
        """
        cursor.execute(f"DELETE FROM {JOB} WHERE id IN ({marks(ids)}) LIMIT {len(ids)}", ids)
        return int(cursor.rowcount)

    def keep(
        self, cursor: CursorWrapper, ids: Sequence[int], state: State, ended_at: datetime, **values: object
    ) -> int:
        try:
            return super().keep(cursor, ids, state, ended_at, **values)
        except OperationalError as error:
            if error_code(error) != NO_PARTITION:
                raise
        # No server has added days for weeks.
        return super().keep(cursor, ids, state, ended_at, day=KEPT, **values)

    has_lock_wait = True

    def lock_wait(self, seconds: float | None, *, of_transaction: bool = False) -> str:  # noqa: ARG002  (InnoDB has a limit of the session only)
        """Return the SET statement for the session's lock wait, in whole seconds."""
        value = "DEFAULT" if seconds is None else 0 if seconds < LEAST_WAIT_S else math.ceil(seconds)
        return f"SET SESSION innodb_lock_wait_timeout = {value}"

    def bounded_statements(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[object]:
        """Raise error 1153 before a statement above `max_allowed_packet` is sent.

        The server would close the connection, which looks like an outage (2006), and would lose the caller's
        transaction.
        """
        return connection.execute_wrapper(_refuse_long_statement)

    def was_ended(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether data or an end of file waits: MariaDB sends nothing else to an idle session."""
        return is_readable(connection.connection.fileno())

    def free_connections(self, cursor: CursorWrapper) -> dict[str, int]:
        """Count the sessions of all accounts and of this one; the caller's is one of both."""
        cursor.execute(
            "SELECT @@global.max_connections, @@session.max_user_connections,"
            " (SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'THREADS_CONNECTED'),"
            " (SELECT COUNT(*) FROM information_schema.processlist WHERE user = SUBSTRING_INDEX(USER(), '@', 1))"
        )
        of_server, of_account, used, used_by_account = map(int, cursor.fetchone())
        free = {"max_connections of the server": of_server - used + 1}
        return free | ({"max_user_connections of the account": of_account - used_by_account + 1} if of_account else {})

    def await_claims(self, connection: BaseDatabaseWrapper) -> None:  # noqa: ARG002
        """Sleep for CLAIMED_WITHIN_S: MariaDB does not show which transactions have read a table.

        A claim takes some milliseconds; `limiters.sweep` counts the jobs of a claim that took longer than this.
        """
        # A longer wait would delay each new limit; later claims are counted by the sweep.
        time.sleep(CLAIMED_WITHIN_S)

    def after(self, moment: str, seconds: str) -> str:
        return f"({moment} + INTERVAL {seconds} SECOND)"


def _refuse_long_statement(
    execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]
) -> Any:
    # `executemany` sends rows together up to 64 KiB, and a longer row alone.
    rows = params if many else [params or ()]
    texts = max(([value for value in row if isinstance(value, str)] for row in rows), key=_total_length, default=[])
    if _total_length(texts) > CERTAINLY_ACCEPTED:
        connection = context["connection"]
        length = len(sql.encode()) + sum(len(connection.connection.literal(text)) for text in texts)
        if length >= (limit := _max_packet(connection)) - RESERVED:
            message = f"expected a statement of less than max_allowed_packet={limit} bytes, got {length}"
            raise OperationalError(1153, message)
    return execute(sql, params, many, context)


def _total_length(texts: Sequence[str]) -> int:
    return sum(map(len, texts))


def _max_packet(connection: BaseDatabaseWrapper) -> int:
    # By the driver's connection: the server reads the limit when a session begins.
    session = connection.connection
    if session not in _max_packets:
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@max_allowed_packet")
            _max_packets[session] = cursor.fetchone()[0]
    return _max_packets[session]


MARIADB = MariadbDialect()
