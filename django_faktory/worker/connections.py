"""What a job may leave behind in its thread's database connections, and how the next one finds them clean.

Asks no database anything: a healthy connection lives on from job to job, whatever CONN_MAX_AGE says, since a
worker has no requests whose end would close it. Knows no job.
"""

from __future__ import annotations

from contextlib import suppress

from django.conf import settings
from django.db import Error, connections, reset_queries
from django.db.backends.base.base import BaseDatabaseWrapper


def in_transaction() -> frozenset[str]:
    """Aliases of this thread's connections that are inside an atomic block."""
    return frozenset(
        connection.alias for connection in connections.all(initialized_only=True) if connection.in_atomic_block
    )


def tidy(held: frozenset[str] = frozenset()) -> list[str]:
    """Leave this thread's connections as a job should find them; returns the aliases of transactions left open.

    Those are rolled back. What the database called broken, or what commits by hand, is closed and opens anew at its
    next use. `held` names those that were in a transaction before the job: they are their owner's business.
    """
    left_open = []
    for connection in connections.all(initialized_only=True):
        if connection.alias in held:
            continue
        if connection.in_atomic_block:
            left_open.append(connection.alias)
            _drop(connection)
        elif _is_spoilt(connection):
            with suppress(Error):  # closing what is broken may fail too: it is gone all the same
                connection.close()
        else:
            # CONN_HEALTH_CHECKS: one look at each job's first query. (The stubs do not know the attribute.)
            connection.health_check_done = False  # type: ignore[attr-defined]
    if settings.DEBUG:
        reset_queries()
    return left_open


def forget(held: frozenset[str]) -> None:
    """Close this thread's connections, but for those `held`: a job was interrupted that may have been using them."""
    for connection in connections.all(initialized_only=True):
        if connection.alias not in held:
            _drop(connection)


def _is_spoilt(connection: BaseDatabaseWrapper) -> bool:
    return connection.connection is not None and (
        connection.errors_occurred or connection.autocommit != connection.settings_dict["AUTOCOMMIT"]
    )


def _drop(connection: BaseDatabaseWrapper) -> None:
    # Closed inside its atomic block, Django's wrapper stays unusable until that block ends, which it never will.
    with suppress(Error):
        connection.close()
    del connections[connection.alias]
