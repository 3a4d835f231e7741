"""Notifications that queues got work, sent after a commit and received by waiting processes. Reads no job rows.

Contract: `announce` may drop a notification that repeats one of the last 10 ms, and any notification may be lost. So
receivers look a second time 12 ms after one (`Listener.wait` does that) and poll at intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from django.db import connections

from ...core.logs import get_logger
from ..dialects.postgresql.pipeline import has_psycopg3
from .base import Listener, PollingListener
from .pipes import LocalPipes
from .postgresql import PostgresListener
from .publisher import Publisher, add_local_receiver, announce
from .sqlite import SqliteListener

__all__ = [
    "Listener",
    "LocalPipes",
    "PollingListener",
    "Publisher",
    "add_local_receiver",
    "announce",
    "has_notifications",
    "listen",
]

logger = get_logger(__name__)


def has_notifications(alias: str) -> bool:
    """Return whether this process can be notified of commits of other processes on this database."""
    connection = connections[alias]
    if connection.vendor == "postgresql":
        return has_psycopg3()
    # MariaDB sends none: `pipes` covers the processes of one node, polling covers other nodes.
    # No other process can open an in-memory database.
    return connection.vendor == "sqlite" and not connection.is_in_memory_db()  # type: ignore[attr-defined]  # SQLite's own


def listen(
    alias: str,
    queues: Collection[str] | None = None,
    *,
    otherwise: Callable[[], Listener] = PollingListener,
    is_own: Callable[[int], bool] = lambda _: False,
    logs_problems: bool = True,
) -> Listener:
    """Return a listener for the database `alias`, or `otherwise()` if this process can receive no notifications.

    With `queues` the listener may drop notifications for other queues, with `is_own` (of a `Publisher`) notifications
    from this process. One listener of a node has `logs_problems`: it logs problems that all of them have. The listener
    connects at its first wait or in its own thread, so an unreachable database raises no error here.
    """
    if not has_notifications(alias):
        logger.info("no notifications are received: work of other nodes is found by polling alias=%s", alias)
        return otherwise()
    if connections[alias].vendor == "postgresql":
        return PostgresListener(alias, queues, is_own, logs_problems=logs_problems)
    return SqliteListener(alias)
