"""What a job may leave behind in its thread's database connections, and how the next one finds them clean.

Asks no database anything: a healthy connection lives on from job to job, whatever CONN_MAX_AGE says, since a
worker has no requests whose end would close it. Knows no job.
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

_of_async_tasks: WeakKeyDictionary[asyncio.AbstractEventLoop, Sequence[BaseDatabaseWrapper]] = WeakKeyDictionary()
"""The connections that async tasks of each loop use."""

_IDLE = 0
"""libpq's PQTRANS_IDLE: no transaction is open."""


NONE: frozenset[str] = frozenset()
"""No connection is in a transaction: so `tidy` leaves the thread of a worker."""


JOB_THREAD = "faktory-job"
"""How the names of threads begin that run jobs."""


def keep_no_queries() -> None:
    """Let no connection of this process log its SQL, as Django does with DEBUG, but for those of jobs: see `tidy`.

    Threads that live as long as the process would keep 9,000 statements each, with the arguments of the jobs.
    """
    connection_created.connect(_drop_log, dispatch_uid=f"{__name__}.keep_no_queries")


def _drop_log(connection: BaseDatabaseWrapper, **_: object) -> None:
    if not threading.current_thread().name.startswith(JOB_THREAD):
        connection.queries_log = deque(maxlen=0)


def in_transaction() -> frozenset[str]:
    """Aliases of this thread's connections that are inside an atomic block."""
    return frozenset(
        connection.alias for connection in connections.all(initialized_only=True) if connection.in_atomic_block
    )


def tidy(held: frozenset[str] = NONE) -> list[str]:
    """Leave this thread's connections as a job should find them; returns the aliases of transactions left open.

    Those are rolled back, also those that `set_autocommit(False)` began. A connection that the database called broken,
    or that commits by hand, is closed and opens anew at its next use. `held` names those that were in a transaction
    before the job: they are their owner's business.
    """
    left_open = []
    for connection in connections.all(initialized_only=True):
        if connection.alias in held:
            continue
        if connection.in_atomic_block:
            left_open.append(connection.alias)
            _drop(connection)
        elif _is_spoilt(connection):
            if _has_uncommitted(connection):
                left_open.append(connection.alias)
            with suppress(Error):  # closing what is broken may fail too: it is gone all the same
                connection.close()
        else:
            # CONN_HEALTH_CHECKS: one look at each job's first query. (The stubs do not know the attribute.)
            connection.health_check_done = False  # type: ignore[attr-defined]
    if settings.DEBUG:
        reset_queries()
    return left_open


async def tidy_async() -> list[str]:
    """`tidy` where async tasks of this loop use the ORM, if one of them turned autocommit off; the aliases left open.

    That is a thread of asgiref's, which all of them share: they would go on in the transaction, and lose their rows
    with it. It is entered only if there is something to do: that costs more than a short task does.
    """
    loop = asyncio.get_running_loop()
    if loop not in _of_async_tasks:
        _of_async_tasks[loop] = await sync_to_async(connections.all)()
    known = _of_async_tasks[loop]
    if not any(not one.in_atomic_block and one.connection is not None and _commits_by_hand(one) for one in known):
        return []
    return await sync_to_async(lambda: tidy(in_transaction()))()


def forget(held: frozenset[str]) -> None:
    """Close this thread's connections, but for those `held`: a job was interrupted that may have been using them."""
    for connection in connections.all(initialized_only=True):
        if connection.alias not in held:
            _drop(connection)


def _is_spoilt(connection: BaseDatabaseWrapper) -> bool:
    return connection.connection is not None and (connection.errors_occurred or _commits_by_hand(connection))


def _commits_by_hand(connection: BaseDatabaseWrapper) -> bool:
    """Whether the task has changed `autocommit`, and not changed it back."""
    return bool(connection.autocommit != connection.settings_dict["AUTOCOMMIT"])


def _has_uncommitted(connection: BaseDatabaseWrapper) -> bool:
    """Whether the task turned autocommit off and left a transaction open: closing the connection rolls it back."""
    if not _commits_by_hand(connection):
        return False
    with suppress(Exception):  # drivers answer a question about a closed connection in ways of their own
        return _is_begun(connection)
    return True


def _is_begun(connection: BaseDatabaseWrapper) -> bool:
    raw: Any = connection.connection
    if connection.vendor == "postgresql":
        return bool(raw.info.transaction_status != _IDLE)
    if connection.vendor == "sqlite":
        return bool(raw.in_transaction)
    with connection.cursor() as cursor:  # MariaDB's driver does not know
        cursor.execute("SELECT @@in_transaction")
        return bool(cursor.fetchone()[0])


def _drop(connection: BaseDatabaseWrapper) -> None:
    # Closed inside its atomic block, Django's wrapper stays unusable until that block ends, which it never will.
    with suppress(Error):
        connection.close()
    del connections[connection.alias]
