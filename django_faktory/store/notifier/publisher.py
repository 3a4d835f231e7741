"""Send notifications of new work, at most one per queue within `DEBOUNCE_S`.

Reads no job rows. A burst of pushes costs one notification, and one dictionary lookup per push; `base.Listener`
describes the receiving side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from django.db import connections

from .. import sharing
from . import postgresql
from .base import DEBOUNCE_S

MAX_REMEMBERED = 4096
"""Queues remembered before all are forgotten: clients choose queue names, so the number must be bounded."""

RECONNECT_S = 60.0
"""Seconds a publisher keeps a connection.

Without a reconnect it would not notice that the server stopped being the primary.
"""

_local_receivers: list[Callable[[Collection[str]], None]] = []


def add_local_receiver(wake: Callable[[Collection[str]], None]) -> None:
    """Call `wake` with the queues of each later announcement of this process."""
    _local_receivers.append(wake)


_announced_at: dict[tuple[str, str], float] = {}
"""Time of the latest announcement, by alias and queue."""


def announce(alias: str, queues: Collection[str]) -> None:
    """Notify listeners that these queues got work. Call it after the commit; inside a transaction it does nothing.

    Best effort: never raises, and drops a notification sent within the last `DEBOUNCE_S`. SQLite's listeners see the
    commit itself. On MariaDB only processes of this node are notified; other nodes poll.
    """
    connection = connections[alias]
    # A receiver that looks before the commit finds nothing, and may not look again before its next poll.
    if connection.in_atomic_block:
        return
    for wake in _local_receivers:
        wake(queues)
    if connection.vendor != "postgresql":
        return
    to_announce = _select_to_announce(alias, queues, now=time.monotonic())
    if to_announce:
        postgresql.notify(connection, to_announce)


def _select_to_announce(alias: str, queues: Collection[str], *, now: float) -> list[str]:
    # Forgetting all queues costs at most one more notification for each.
    if len(_announced_at) > MAX_REMEMBERED:
        _announced_at.clear()
    to_announce = []
    for queue in queues:
        if now - _announced_at.get((alias, queue), -1.0) >= DEBOUNCE_S:
            _announced_at[alias, queue] = now
            to_announce.append(queue)
    return to_announce


class Publisher:
    """Publishes notifications from its own thread, one NOTIFY per `DEBOUNCE_S`, so that a push does not wait.

    Used by the server, where a notification would cost as much as a whole exchange. `is_own` lets listeners of the same
    process ignore its notifications.
    """

    def __init__(self, alias: str, *, reconnect_every_s: float = RECONNECT_S) -> None:
        self._alias = alias
        self._reconnect_every_s = reconnect_every_s
        self._pending: set[str] = set()
        self._called = threading.Event()
        self._stopping = threading.Event()
        self._senders: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="faktory-publisher", daemon=True)
        self._thread.start()

    def announce(self, alias: str, queues: Collection[str]) -> None:
        """Queue a notification, from any thread. The first one of a burst is sent at once. See `announce`."""
        connection = connections[alias]
        if connection.vendor != "postgresql":
            announce(alias, queues)
        elif not connection.in_atomic_block:
            # No lock: set operations are atomic under the GIL, and `_run` removes only queues it has copied.
            self._pending.update(queues)
            self._called.set()

    def is_own(self, sender: int) -> bool:
        """Return whether `sender` is the PostgreSQL backend of this publisher's connection."""
        return sender in self._senders

    def stop(self) -> None:
        """Send pending notifications and stop the thread; waits at most 2 s."""
        self._stopping.set()
        self._called.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        connection, connected_at = connections[self._alias], time.monotonic()
        while not self._stopping.is_set() or self._pending:
            self._called.wait()
            self._called.clear()
            queues = list(self._pending)
            self._pending.difference_update(queues)
            if queues:
                if time.monotonic() - connected_at > self._reconnect_every_s:
                    connection.close()
                    connected_at = time.monotonic()
                postgresql.notify(connection, queues, self._senders)
                sharing.give_back()
                # Announcements that arrive meanwhile are sent with the next NOTIFY; `stop` ends the wait.
                self._stopping.wait(DEBOUNCE_S)
        connection.close()
