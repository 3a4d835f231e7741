"""Clean up the database connections of a thread between two jobs.

`reset_connections` is the main function. It sends no query, and keeps healthy connections open from job to job.
CONN_MAX_AGE has no effect here: Django applies it at the end of a request, and a worker has no requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import Error, connections, reset_queries
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from ..store import sharing
from ..store.dialects.postgresql.pooler import is_pooled

_async_connections: WeakKeyDictionary[asyncio.AbstractEventLoop, Sequence[BaseDatabaseWrapper]] = WeakKeyDictionary()
"""The connections that async tasks of each loop use."""

_IDLE = 0
"""libpq's PQTRANS_IDLE: no transaction is open."""


NO_ALIASES: frozenset[str] = frozenset()
"""Empty set of aliases: no connection is in a transaction, as after `reset_connections`."""


OWN_THREADS = "faktory-"
"""Prefix of the names of all threads that this package starts for servers and workers."""

JOB_THREAD = "faktory-job"
"""Prefix of the names of threads that run jobs."""

ASYNC_THREAD = "faktory-async"
"""Name of the thread that runs async tasks."""


class _Thread(threading.local):
    """A thread's connections of all aliases, opened or not."""

    connections: Sequence[BaseDatabaseWrapper] | None = None


_thread = _Thread()


def set_up_own_connections() -> None:
    """Set up the database connections of this process' own threads; call it before any connection is opened.

    Disables Django's query log (DEBUG): it keeps up to 9,000 statements with the arguments of jobs, and these threads
    live as long as the process. Job threads keep their log, which `reset_connections` clears after each job.

    On PostgreSQL it also disables sequential scans. The table of jobs shrinks to a few pages whenever its queues are
    empty. A plan made at that moment reads the whole table for each job until it is replaced (ADR 0043).
    """
    connection_created.connect(_set_up, dispatch_uid=f"{__name__}.set_up_own_connections")


def _set_up(connection: BaseDatabaseWrapper, **_: object) -> None:
    name = threading.current_thread().name
    # A job's own log stays, for tasks that read it while DEBUG is on.
    if not name.startswith(JOB_THREAD):
        connection.queries_log = deque(maxlen=0)
    # Other threads run code of the project, for which the planner has to choose freely. A pooler would pass the
    # setting on to other clients.
    is_own = name.startswith(OWN_THREADS) and not name.startswith((JOB_THREAD, ASYNC_THREAD))
    if is_own and connection.vendor == "postgresql" and not is_pooled(connection.connection):
        with connection.cursor() as cursor:
            # If a disabled scan is the only possible plan, its cost is so high that PostgreSQL would compile the plan.
            cursor.execute("SET enable_seqscan = off; SET jit = off")


def in_transaction() -> frozenset[str]:
    """Return the aliases of this thread's connections that are inside an atomic block."""
    return frozenset(connection.alias for connection in _find_connections() if connection.in_atomic_block)


def reset_connections(outer_aliases: frozenset[str] = NO_ALIASES) -> list[str]:
    """Reset this thread's connections for the next job; return the aliases of transactions left open.

    Rolls open transactions back, also if `set_autocommit(False)` began them. Closes a connection that had an error or
    that has autocommit turned off; Django reopens it at its next use. `outer_aliases` names connections that
    were in a transaction before the job: these belong to the caller and stay untouched.
    """
    left_open = []
    for connection in _thread.connections or _find_connections():  # `or` saves each job a call
        is_unused = connection.connection is None and not connection.in_atomic_block
        if is_unused or connection.alias in outer_aliases:
            continue
        if connection.in_atomic_block:
            left_open.append(connection.alias)
            _drop(connection)
        # Django checks `errors_occurred` at the end of a request, which a worker does not have. Closed, not dropped as
        # above: outside an atomic block the same wrapper reconnects at its next use.
        elif connection.errors_occurred or _has_changed_autocommit(connection):
            if _has_uncommitted(connection):
                left_open.append(connection.alias)
            with suppress(Error):  # closing a broken connection may fail too; Django drops it anyway
                connection.close()
        else:
            # With CONN_HEALTH_CHECKS Django then checks the connection at the next job's first query. The stubs lack
            # the attribute.
            connection.health_check_done = False  # type: ignore[attr-defined]
    if sharing.until[0]:
        sharing.give_back()
    if settings.DEBUG:
        reset_queries()
    return left_open


async def reset_connections_async() -> list[str]:
    """Run `reset_connections` in the thread of this loop's ORM calls if a task there turned autocommit off.

    Returns the aliases left open. All async tasks share that thread of asgiref's, so each later task would write in the
    open transaction and lose its rows when it is rolled back. The thread is entered only if necessary, because that
    costs more than a short task takes.
    """
    loop = asyncio.get_running_loop()
    if loop not in _async_connections:
        # The wrappers exist for all aliases from now on and stay the same, so the thread need not be entered again to
        # check them.
        _async_connections[loop] = await sync_to_async(connections.all)()
    if not any(
        # Inside an atomic block Django itself has turned autocommit off.
        not connection.in_atomic_block and connection.connection is not None and _has_changed_autocommit(connection)
        for connection in _async_connections[loop]
    ):
        return []
    return await sync_to_async(lambda: reset_connections(in_transaction()))()


def drop_connections(outer_aliases: frozenset[str]) -> None:
    """Close and drop this thread's connections except those in `outer_aliases`.

    Called after a job was interrupted: the interruption may have left any of its connections in the middle of a query.
    """
    for connection in _find_connections():
        if connection.alias not in outer_aliases:
            _drop(connection)


def _find_connections() -> Sequence[BaseDatabaseWrapper]:
    # Kept for each thread: Django's lookup takes 4 µs, and a job needs the connections two to six times.
    if _thread.connections is None:
        _thread.connections = connections.all()
    return _thread.connections


def _forget_replaced(connection: BaseDatabaseWrapper, **_: object) -> None:
    # A task may remove a connection from `django.db.connections`: the next use of its alias opens another one.
    if _thread.connections and connection not in _thread.connections:
        _thread.connections = None


connection_created.connect(_forget_replaced, dispatch_uid=f"{__name__}._forget_replaced")


def _has_changed_autocommit(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the task has changed `autocommit` and not changed it back."""
    return bool(connection.autocommit != connection.settings_dict["AUTOCOMMIT"])


def _has_uncommitted(connection: BaseDatabaseWrapper) -> bool:
    """Return whether autocommit is off and a transaction is open; closing the connection rolls it back."""
    if not _has_changed_autocommit(connection):
        return False
    with suppress(Exception):  # each driver raises its own error if the connection is closed
        return _is_transaction_open(connection)
    return True


def _is_transaction_open(connection: BaseDatabaseWrapper) -> bool:
    session: Any = connection.connection
    if connection.vendor == "postgresql":
        return bool(session.info.transaction_status != _IDLE)
    if connection.vendor == "sqlite":
        return bool(session.in_transaction)
    with connection.cursor() as cursor:  # MariaDB's driver does not expose the transaction state
        cursor.execute("SELECT @@in_transaction")
        return bool(cursor.fetchone()[0])


def _drop(connection: BaseDatabaseWrapper) -> None:
    # If Django's wrapper is closed inside an atomic block, it stays unusable until the block ends. This block never
    # ends, so the wrapper is dropped and the next use of the alias creates a new one.
    with suppress(Error):
        connection.close()
    del connections[connection.alias]
    _thread.connections = None
