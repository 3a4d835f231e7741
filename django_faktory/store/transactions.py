"""Run a verb: one transaction, tried again where two of them collided, foreign errors translated once.

What is retried: deadlocks, serialization failures, lock time-outs, a busy SQLite (reliability class D8), and what
named a prepared statement that a pooler took away: from then on none is used.
What is translated: a database that cannot be reached or cannot be written is BrokerUnavailable (W30).
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from django.db import InterfaceError, InternalError, OperationalError, ProgrammingError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..errors import BrokerUnavailable, LockTimeout
from ..logs import get_logger
from .dialects import dialect_of
from .dialects.prepared import LOST

logger = get_logger(__name__)

ATTEMPTS = 6
_COLLISIONS = frozenset({"40001", "40P01", "55P03", 1213, 1205, 1020})
_LOCK_TIMEOUTS = frozenset({"55P03", 1205})
_READ_ONLY = frozenset({"25006", 1290, 1792})
"""A primary that has become a standby: the next connection may find the new one."""

_refusals: Counter[str] = Counter()
"""How often a database took no writes, by alias; 0 in most processes for ever."""

_survived: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many of these were before each connection was made."""

_of_thread = threading.local()
_lock_waits: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
"""Seconds that a session waits for a lock, by connection; not in it where it is the server's default."""

T = TypeVar("T")

around: Callable[[BaseDatabaseWrapper], AbstractContextManager[object]] = nullcontext
"""What a process has set around each attempt: a limit to how long it may wait, see `deadlines`."""


def run(
    alias: str,
    verb: Callable[[BaseDatabaseWrapper], T],
    *,
    atomic: bool = True,
    writes: bool = False,
    snapshot: bool = False,
    raises_lock_timeout: bool = True,
) -> T:
    """Run `verb(connection)` in a transaction of its own and return what it returns.

    With `atomic=False` it is one statement and commits by itself; `writes` says that it is no SELECT. With `snapshot`
    it only reads: all its statements see the same moment, and it takes no lock. Inside a transaction of the caller's
    the verb joins it, once, and database errors reach the caller unchanged: only the caller can roll back.
    Raises BrokerUnavailable where the database cannot be used just now, and LockTimeout inside of `limited_lock_wait`;
    with `raises_lock_timeout=False` a lock that is not free in time is one more collision.
    """
    connection = connections[alias]
    if connection.in_atomic_block:
        return verb(connection)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with around(connection):
                _leave_an_old_primary(connection)
                return _carry_out(connection, verb, atomic=atomic, writes=writes, snapshot=snapshot)
        except (OperationalError, InterfaceError, InternalError) as error:
            is_read_only = error_code(error) in _READ_ONLY
            if isinstance(error, InternalError) and not is_read_only:
                raise
            if is_read_only:
                _refusals[alias] += 1
                _discard(connection)
            if raises_lock_timeout:
                _raise_lock_timeout(error)
            if attempt == ATTEMPTS or not is_collision(error):
                connection.close()
                raise BrokerUnavailable(f"database unavailable: {first_line(error)}{_remedy(error)}") from error
            logger.debug("transaction collided, trying again attempt=%d error=%s", attempt, first_line(error))
        except ProgrammingError as error:
            if attempt == ATTEMPTS or error_code(error) not in LOST:
                raise
        time.sleep(random.uniform(0, 0.005 * 2**attempt))
    raise AssertionError("unreachable")


@contextmanager
def limited_lock_wait(seconds: float) -> Iterator[None]:
    """Limit how long verbs of this thread wait for a lock: then they raise LockTimeout, and are not tried again.

    MariaDB counts whole seconds, and does not wait at all for less than 0.1 s. SQLite has its own busy timeout.
    """
    before = _lock_wait_s()
    _of_thread.lock_wait_s = seconds
    try:
        yield
    finally:
        _of_thread.lock_wait_s = before


def _lock_wait_s() -> float | None:
    return getattr(_of_thread, "lock_wait_s", None)


def _raise_lock_timeout(error: Exception) -> None:
    if error_code(error) in _LOCK_TIMEOUTS and _lock_wait_s() is not None:
        raise LockTimeout(f"database unavailable: {first_line(error)}") from error


def _limit_lock_wait(connection: BaseDatabaseWrapper) -> str:
    """Set the session's limit if it is another one; returns the statement to begin the transaction with instead, where
    the session may be another client's in a moment."""
    wanted = _lock_wait_s()
    if wanted is None and not _lock_waits:
        return ""  # nearly always
    dialect = dialect_of(connection)
    if not dialect.has_lock_wait:
        return ""
    connection.ensure_connection()
    raw = connection.connection
    if _lock_waits.get(raw) == wanted:
        return ""
    if not dialect.keeps_session(connection):
        return dialect.lock_wait(wanted, of_transaction=True) if wanted is not None else ""
    _execute(connection, dialect.lock_wait(wanted))
    if wanted is None:
        del _lock_waits[raw]
    else:
        _lock_waits[raw] = wanted
    return ""


def _execute(connection: BaseDatabaseWrapper, sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def _carry_out(
    connection: BaseDatabaseWrapper,
    verb: Callable[[BaseDatabaseWrapper], T],
    *,
    atomic: bool,
    writes: bool,
    snapshot: bool,
) -> T:
    if snapshot and connection.get_autocommit():
        return _read(connection, verb)
    lock_wait = _limit_lock_wait(connection)
    if not atomic and not lock_wait:
        if not writes:
            return verb(connection)
        with dialect_of(connection).write_queue(connection):
            return verb(connection)
    with dialect_of(connection).write_queue(connection), transaction.atomic(using=connection.alias):
        if lock_wait:
            _execute(connection, lock_wait)
        return verb(connection)


def _read(connection: BaseDatabaseWrapper, verb: Callable[[BaseDatabaseWrapper], T]) -> T:
    """Django knows one kind of transaction, which on SQLite takes the lock that writers need: begin another by hand."""
    for sql in dialect_of(connection).begin_snapshot:
        _execute(connection, sql)
    try:
        found = verb(connection)
        _execute(connection, "COMMIT")
    except BaseException:
        connection.close()  # which ends the transaction, whatever state it is in
        raise
    return found


def is_at_hand(connection: BaseDatabaseWrapper) -> bool:
    """Whether a verb could be carried out on it without more ado: it is open, in no transaction, and not suspected to
    be an old primary's."""
    raw = connection.connection
    if raw is None or connection.in_atomic_block or not connection.autocommit:
        return False
    return not (refusals := _refusals[connection.alias]) or _survived.get(raw, 0) >= refusals


def _leave_an_old_primary(connection: BaseDatabaseWrapper) -> None:
    """Once a write was refused, connections made before that are made anew: who only reads would never be refused, and
    on the old primary's connection see nothing but the past."""
    if not (refusals := _refusals[connection.alias]) or (connection.connection and not connection.autocommit):
        return
    if connection.connection is not None and _survived.get(connection.connection, 0) < refusals:
        _discard(connection)
    if connection.connection is None:
        connection.ensure_connection()
        _survived[connection.connection] = refusals


def _discard(connection: BaseDatabaseWrapper) -> None:
    """Close it for good: from Django's pool of connections it would come back."""
    if getattr(connection, "pool", None) and connection.connection is not None:
        connection.connection.close()
    connection.close()


def is_collision(error: Exception) -> bool:
    """Whether the same transaction may well pass when it is tried again."""
    code = error_code(error)
    if code in _COLLISIONS:
        return True
    return isinstance(code, str) and ("database is locked" in code or "database table is locked" in code)


def _remedy(error: Exception) -> str:
    return "; run manage.py migrate" if "no such table: django_faktory" in str(error) else ""  # SQLite's words


def error_code(error: Exception) -> object:
    """SQLSTATE, or the server's own number; where there is neither, what the error says."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or (error.args[0] if error.args else None)


def first_line(error: BaseException) -> str:
    """The error's first line: drivers like to add a paragraph."""
    text = str(error.args[-1] if error.args else error).strip()
    return text.splitlines()[0] if text else type(error).__name__
