"""Who hears of new work, and how often: hints are sent at most once in DEBOUNCE_S for each queue.

Knows no job rows. A burst of pushes costs one hint and a look at a dictionary each; see `base.Listener` for the
receivers' part of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from django.db import connections

from . import postgresql
from .base import DEBOUNCE_S

MAX_REMEMBERED = 4096
"""Queues remembered before all are forgotten: names are anybody's, memory is not."""

RECONNECT_S = 60.0
"""How long a crier keeps a connection: nothing tells it that the server is the primary no more."""

_also: list[Callable[[Collection[str]], None]] = []


def tell_also(ring: Callable[[Collection[str]], None]) -> None:
    """From now on, `ring` hears of each announcement of this process too."""
    _also.append(ring)


_announced_at: dict[tuple[str, str], float] = {}


def announce(alias: str, queues: Collection[str]) -> None:
    """Hint that these queues got work. Call it after the commit; inside a transaction it does nothing.

    Best effort: never raises, and may be left out because the same was said DEBOUNCE_S ago. SQLite's listeners see
    the commit itself; on other databases it reaches this node's own processes, and other nodes poll.
    """
    connection = connections[alias]
    if connection.in_atomic_block:
        return
    for ring in _also:
        ring(queues)
    if connection.vendor != "postgresql":
        return
    news = _news(alias, queues, now=time.monotonic())
    if news:
        postgresql.notify(connection, news)


def _news(alias: str, queues: Collection[str], *, now: float) -> list[str]:
    news = [queue for queue in queues if now - _announced_at.get((alias, queue), -1.0) >= DEBOUNCE_S]
    if len(_announced_at) > MAX_REMEMBERED:
        _announced_at.clear()
    _announced_at.update(((alias, queue), now) for queue in news)
    return news


class Crier:
    """Announces in a thread of its own, all that came in DEBOUNCE_S with one NOTIFY: who pushes does not wait for it.

    For a server: a hint costs as much as a turn. `is_own` tells a listener of the same process what it need not hear.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._pending: set[str] = set()
        self._called = threading.Event()
        self._stopping = threading.Event()
        self._senders: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="faktory-crier", daemon=True)
        self._thread.start()

    def announce(self, alias: str, queues: Collection[str]) -> None:
        """See `announce`; from any thread. The first of a burst goes at once."""
        connection = connections[alias]
        if connection.vendor != "postgresql":
            announce(alias, queues)
        elif not connection.in_atomic_block:
            self._pending.update(queues)
            self._called.set()

    def is_own(self, sender: int) -> bool:
        """Whether this is the PostgreSQL process that announced for us."""
        return sender in self._senders

    def stop(self) -> None:
        """Send what is pending, and end."""
        self._stopping.set()
        self._called.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        connection, since = connections[self._alias], time.monotonic()
        while not self._stopping.is_set() or self._pending:
            self._called.wait()
            self._called.clear()
            news = list(self._pending)
            self._pending.difference_update(news)
            if news:
                if time.monotonic() - since > RECONNECT_S:
                    connection.close()
                    since = time.monotonic()
                postgresql.notify(connection, news, self._senders)
                self._stopping.wait(DEBOUNCE_S)
        connection.close()
