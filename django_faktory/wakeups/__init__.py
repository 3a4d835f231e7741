"""Hints that work has come: sent after a commit, heard by who waits. Knows no job rows.

The contract: `announce` may leave a hint out where it said the same 10 ms before, and any hint may get lost. So
receivers look again 12 ms after a hint (`Listener.wait` does that for them) and poll now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from django.db import connections

from ..logs import get_logger
from . import postgresql
from .announcing import Crier, announce, tell_also
from .base import Listener, PollingListener
from .neighbours import Neighbours
from .postgresql import PostgresListener
from .sqlite import SqliteListener

__all__ = ["Crier", "Listener", "Neighbours", "PollingListener", "announce", "has_hints", "listen", "tell_also"]

logger = get_logger(__name__)


def has_hints(alias: str) -> bool:
    """Whether this database tells of commits of other processes."""
    connection = connections[alias]
    if connection.vendor == "postgresql":
        return postgresql.can_listen()
    return connection.vendor == "sqlite" and not connection.is_in_memory_db()  # type: ignore[attr-defined]  # SQLite's own


def listen(
    alias: str,
    queues: Collection[str] | None = None,
    *,
    otherwise: Callable[[], Listener] = PollingListener,
    is_own: Callable[[int], bool] = lambda _: False,
    tells: bool = True,
) -> Listener:
    """A listener for the database `alias`; with `queues` it may leave out what only others care for, and with `is_own`
    (a `Crier`'s) what this process announced. Of the listeners of a node one `tells` of what all of them find.

    `otherwise` makes it where the database has no hints. Connects to nothing before its first wait, or in a thread of
    its own: a database that is away does no harm.
    """
    if not has_hints(alias):
        logger.info("this database sends no hints: other nodes' work is found by polling alias=%s", alias)
        return otherwise()
    if connections[alias].vendor == "postgresql":
        return PostgresListener(alias, queues, is_own, tells=tells)
    return SqliteListener(alias)
