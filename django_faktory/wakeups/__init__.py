"""Hints that work has come: sent after a commit, heard by who waits. Knows no job rows.

The contract: `announce` may leave a hint out where it said the same 10 ms before, and any hint may get lost. So
receivers look again 12 ms after a hint (`Listener.wait` does that for them) and poll now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from django.db import connections

from . import postgresql
from .announcing import announce
from .base import Listener, PollingListener
from .postgresql import PostgresListener
from .sqlite import SqliteListener

__all__ = ["Listener", "PollingListener", "announce", "listen"]

logger = logging.getLogger(__name__)


def listen(alias: str, queues: Collection[str] | None = None) -> Listener:
    """A listener for the database `alias`; with `queues` it may leave out what only others care for.

    Connects to nothing before its first wait, or in a thread of its own: a database that is away does no harm.
    """
    connection = connections[alias]
    if connection.vendor == "postgresql":
        if postgresql.can_listen():
            return PostgresListener(alias, queues)
        logger.info("hints need psycopg 3: work is found by polling alias=%s", alias)
    if connection.vendor == "sqlite" and not connection.is_in_memory_db():  # type: ignore[attr-defined]  # SQLite's own
        return SqliteListener(alias)
    return PollingListener()
