"""Who hears of new work, and how often: hints are sent at most once in DEBOUNCE_S for each queue.

Knows no job rows. A burst of pushes costs one hint and a look at a dictionary each; see `base.Listener` for the
receivers' part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from django.db import connections

from . import postgresql
from .base import DEBOUNCE_S

MAX_REMEMBERED = 4096
"""Queues remembered before all are forgotten: names are anybody's, memory is not."""

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
