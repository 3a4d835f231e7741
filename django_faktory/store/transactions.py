"""Run a function of the store in a transaction: `run` retries collisions and translates database errors.

Retried: deadlocks, serialization failures, lock timeouts, a busy SQLite, and statements that name a prepared statement
lost behind a pooler; from then on none is prepared. Translated: a database that cannot be reached or is read-only
raises BrokerUnavailable (W30), and one that refuses a value raises InvalidPayload. `database_errors` has the codes.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from django.db import Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet

from ..core.logs import get_logger
from ..errors import BrokerUnavailable, InvalidPayload, LockTimeout
from . import sharing
from .database_errors import (
    DEADLOCKS,
    LOCK_TIMEOUTS,
    READ_ONLY,
    ErrorKind,
    error_code,
    first_line,
    kind_of,
    refused_data,
    remedy,
)
from .dialects import dialect_of
from .dialects.base import Dialect
from .dialects.postgresql.prepared import LOST

logger = get_logger(__name__)

ATTEMPTS = 6
DEADLOCK_ATTEMPTS = 12
"""Maximum attempts if the latest one was a deadlock victim, which costs no waiting time. MariaDB has deadlocks even
between short transactions, because it also locks gaps of indexes and the rows that it reads past (ADR 0024)."""
MAX_PAUSE_S = 0.32
RETRY_PAUSES_S = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Pauses of `retry_skipped` in seconds."""

_refusals: Counter[str] = Counter()
"""Number of writes that a read-only database refused, by alias. 0 unless a failover happened."""

_refusals_at_connect: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""The value of `_refusals` when each connection was made: a smaller value marks a connection to an old primary."""


class _ThreadState(threading.local):
    lock_wait_s: float | None = None
    """Limit in seconds of `limited_lock_wait`."""


_thread_state = _ThreadState()
_lock_waits: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
"""Lock timeout in seconds that is set for a session, by connection; no entry if it is the server's default."""

T = TypeVar("T")
U = TypeVar("U")

limit_attempt: Callable[[BaseDatabaseWrapper], AbstractContextManager[object]] = nullcontext
"""Context manager of each attempt. `db_watchdog` sets it, per process, to limit how long a connection may wait."""


def after_commit(alias: str, function: Callable[..., object], *args: Any) -> None:
    """Call the function after the commit of the open transaction, or at once without one; log its exceptions.

    A failure must not reach the caller, because the transaction is committed, nor stop later functions. A lost
    connection costs one line: a later sweep of the maintenance does the same work. Do not pass a `partial` to Django's
    `on_commit(robust=True)` instead: Django fails when it logs the name of a `partial`.
    """

    def call() -> None:
        try:
            function(*args)
        except (BrokerUnavailable, Error) as error:
            if isinstance(error, Error) and kind_of(error) is ErrorKind.DEFECT:
                raise
            logger.warning(
                "a step after a commit failed, maintenance repeats it alias=%s error=%s", alias, first_line(error)
            )

    transaction.on_commit(call, using=alias, robust=True)


def retry_skipped(alias: str, step: Callable[[Sequence[U]], Sequence[U]], items: Sequence[U]) -> None:
    """Call `step` with the items, and again with the items it returns, which it skipped because of locked rows.

    Pauses `RETRY_PAUSES_S` between the attempts; items that the last attempt skips are left to a maintenance sweep.
    Inside a transaction it makes one attempt: the locks of the transaction would stay while it waits.
    """
    for pause_s in (0.0, *RETRY_PAUSES_S):
        time.sleep(pause_s)
        items = step(items)
        if not items or connections[alias].in_atomic_block:
            return


def run(
    alias: str,
    verb: Callable[[BaseDatabaseWrapper], T],
    *,
    atomic: bool = True,
    writes: bool = False,
    snapshot: bool = False,
    raises_lock_timeout: bool = True,
    max_pause_s: float = MAX_PAUSE_S,
) -> T:
    """Run `verb(connection)` in a new transaction, and return its result. Blocks; up to `ATTEMPTS` attempts, or
    `DEADLOCK_ATTEMPTS` if they end in deadlocks, with pauses of at most `max_pause_s`.

    `verb` must be safe to repeat. With `atomic=False` it is one statement that commits by itself; pass `writes` if it
    is not a SELECT. With `snapshot` it only reads: all its statements see the same snapshot, and it takes no lock.

    Raise InvalidPayload if the database refuses a value. Inside a caller's transaction, `verb` runs once as part of
    it, and other database errors reach the caller unchanged: only the caller can roll back. Otherwise raise
    BrokerUnavailable if the database is unavailable, and LockTimeout inside `limited_lock_wait`; with
    `raises_lock_timeout=False`, a lock timeout is retried like other collisions.
    """
    connection = connections[alias]
    if connection.in_atomic_block:
        # No retry: a failed statement has aborted the caller's transaction, or its earlier statements would be lost.
        try:
            with dialect_of(connection).bounded_statements(connection):
                return verb(connection)
        except (Error, UnicodeEncodeError) as error:
            _raise_refused_data(error)
            if advice := remedy(error):
                raise BrokerUnavailable(f"database unavailable: {first_line(error)}{advice}") from error
            raise
    for attempt in range(1, DEADLOCK_ATTEMPTS + 1):
        try:
            with limit_attempt(connection), dialect_of(connection).bounded_statements(connection):
                return _execute_verb(connection, verb, atomic=atomic, writes=writes, snapshot=snapshot)
        except (Error, UnicodeEncodeError) as error:
            _raise_unless_retried(connection, error, attempt, raises_lock_timeout=raises_lock_timeout)
        # Random, so that two transactions that collided do not meet again; up to 10 ms, doubled each time.
        time.sleep(random.uniform(0, min(max_pause_s, 0.005 * 2**attempt)))
    raise AssertionError("unreachable")


def read(rows: QuerySet[Any, T]) -> list[T]:
    """Return these rows, with the retries and errors of `run`."""
    return run(rows.db, lambda _: list(rows), atomic=False)


def select(sql: str, values: Sequence[Any], *, using: str) -> list[tuple[Any, ...]]:
    """Return the rows of this SELECT, with the retries and errors of `run`."""

    def verb(connection: BaseDatabaseWrapper) -> list[tuple[Any, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(sql, values)
            return list(cursor.fetchall())

    return run(using, verb, atomic=False)


def run_each(
    alias: str,
    step: Callable[[Sequence[U]], Sequence[T]],
    items: Sequence[U],
    on_refused: Callable[[U, InvalidPayload], T],
) -> list[T]:
    """Return the answers of `step`, which takes a set in one transaction; halve a set in which the database refuses a
    value, so that the other items are not affected. `on_refused` returns the answer for an item that is refused alone.

    Inside a caller's transaction, raise InvalidPayload: only the caller can roll back.
    """
    try:
        return [*step(items)]
    except InvalidPayload as error:
        if connections[alias].in_atomic_block:
            raise
        if len(items) == 1:
            return [on_refused(items[0], error)]
    half = len(items) // 2
    parts = (items[:half], items[half:])
    return [answer for part in parts for answer in run_each(alias, step, part, on_refused)]


@contextmanager
def limited_lock_wait(seconds: float) -> Iterator[None]:
    """Limit how long this thread's transactions wait for a lock; after that they raise LockTimeout without a retry.

    MariaDB counts whole seconds, and does not wait at all for less than 0.1 s. SQLite has its own busy timeout.
    """
    outer_limit_s = _thread_state.lock_wait_s
    _thread_state.lock_wait_s = seconds
    try:
        yield
    finally:
        _thread_state.lock_wait_s = outer_limit_s


def _raise_unless_retried(
    connection: BaseDatabaseWrapper, error: Exception, attempt: int, *, raises_lock_timeout: bool
) -> None:
    """Raise what this error means to the caller of `run`, or return if another attempt may succeed."""
    _raise_refused_data(error)
    code, kind = error_code(error), kind_of(error)
    # A pooler has taken the session with its prepared statements; the next attempt sends plain SQL.
    if code in LOST and attempt < ATTEMPTS:
        return
    if kind is ErrorKind.DEFECT:
        raise error
    if code in READ_ONLY:
        _refusals[connection.alias] += 1
        _discard(connection)
    # Before the check for collisions, of which a lock timeout is one.
    if raises_lock_timeout and code in LOCK_TIMEOUTS and _thread_state.lock_wait_s is not None:
        raise LockTimeout(f"database unavailable: {first_line(error)}") from error
    if kind is not ErrorKind.COLLISION or attempt >= (DEADLOCK_ATTEMPTS if code in DEADLOCKS else ATTEMPTS):
        # The session may be broken: the next transaction starts on a new connection.
        connection.close()
        sharing.record(error)
        raise BrokerUnavailable(f"database unavailable: {first_line(error)}{remedy(error)}") from error
    logger.debug("transaction collided, trying again attempt=%d error=%s", attempt, first_line(error))


def _raise_refused_data(error: Exception) -> None:
    if kind_of(error) is ErrorKind.DATA:
        raise refused_data(error) from error


def _limit_lock_wait(connection: BaseDatabaseWrapper, dialect: Dialect) -> str:
    """Set the session's lock timeout if it differs.

    Behind a transaction pooler, where the session may serve another client next, set nothing and return the statement
    with which the transaction must begin; otherwise return "".
    """
    if not dialect.has_lock_wait:
        return ""
    limit_s = _thread_state.lock_wait_s
    connection.ensure_connection()
    # Django's wrapper may reconnect, so the limit is recorded for the driver's connection.
    driver_connection = connection.connection
    if _lock_waits.get(driver_connection) == limit_s:
        return ""
    if not dialect.keeps_session(connection):
        return dialect.lock_wait(limit_s, of_transaction=True) if limit_s is not None else ""
    _execute(connection, dialect.lock_wait(limit_s))
    if limit_s is None:
        del _lock_waits[driver_connection]
    else:
        _lock_waits[driver_connection] = limit_s
    return ""


def _execute(connection: BaseDatabaseWrapper, sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def _execute_verb(
    connection: BaseDatabaseWrapper,
    verb: Callable[[BaseDatabaseWrapper], T],
    *,
    atomic: bool,
    writes: bool,
    snapshot: bool,
) -> T:
    dialect = dialect_of(connection)
    replace_unusable_session(connection)
    if snapshot and connection.get_autocommit():
        return _run_in_snapshot(connection, dialect, verb)
    # Usually neither this thread nor any session has a limit.
    has_limit = _thread_state.lock_wait_s is not None or _lock_waits
    set_lock_wait = _limit_lock_wait(connection, dialect) if has_limit else ""
    if not atomic and not set_lock_wait:
        if not writes:
            return verb(connection)
        with dialect.write_queue(connection):
            return verb(connection)
    with dialect.write_queue(connection), transaction.atomic(using=connection.alias):
        if set_lock_wait:
            _execute(connection, set_lock_wait)
        return verb(connection)


def _run_in_snapshot(connection: BaseDatabaseWrapper, dialect: Dialect, verb: Callable[[BaseDatabaseWrapper], T]) -> T:
    """Run `verb` in a read-only snapshot transaction, begun by explicit statements.

    Django's `atomic` has one kind of transaction, which on SQLite takes the write lock.
    """
    try:
        for sql in dialect.begin_snapshot:
            _execute(connection, sql)
        result = verb(connection)
        _execute(connection, "COMMIT")
    except BaseException:
        connection.close()  # ends the transaction in any state; Django does not know of it and cannot roll it back
        raise
    return result


def leads_to_old_primary(connection: BaseDatabaseWrapper) -> bool:
    """Return whether this session is from before the latest refused write, so that it may lead to an old primary.

    A thread that only reads would never be refused, and would keep reading stale data.
    """
    if not _refusals:  # the usual case
        return False
    return _refusals_at_connect.get(connection.connection, 0) < _refusals[connection.alias]


def replace_unusable_session(connection: BaseDatabaseWrapper) -> None:
    """Replace a session that the server has ended or that may lead to an old primary.

    Does nothing inside a transaction that the caller began without `atomic`.
    """
    if connection.connection is not None:
        if not connection.autocommit:
            return
        if dialect_of(connection).was_ended(connection) or leads_to_old_primary(connection):
            _discard(connection)
    if connection.connection is None and (refusals := _refusals[connection.alias]):
        connection.ensure_connection()
        _refusals_at_connect[connection.connection] = refusals


def _discard(connection: BaseDatabaseWrapper) -> None:
    """Close the connection and its session: `close` alone would return the session to Django's connection pool."""
    if getattr(connection, "pool", None) and connection.connection is not None:
        connection.connection.close()
    connection.close()
