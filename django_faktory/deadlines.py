"""No verb waits for ever: a connection on which the database says nothing is cut, which its driver tells as a lost one.

A network that swallows packets, a pooler that hangs, a server that stands still: the socket stays open, nothing comes,
and drivers wait. Long-running programs of ours (`runfaktory`) ask for limits; web requests have those of their project.
Source: reliability class D2.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .logs import get_logger
from .store import transactions

logger = get_logger(__name__)

CONNECT_WITHIN_S = 5
LOOK_EVERY_S = 1.0

_DEFAULTS: dict[str, dict[str, Any]] = {
    # A host that is gone is noticed by the system within half a minute; one that has become a standby is not connected
    # to, where those who only read would not notice (ADR 0017).
    "postgresql": {
        "connect_timeout": CONNECT_WITHIN_S,
        "keepalives_idle": 20,
        "tcp_user_timeout": 30_000,
        "target_session_attrs": "read-write",
    },
    "mysql": {"connect_timeout": CONNECT_WITHIN_S, "read_timeout": 60, "write_timeout": 60},
}

_of_thread = threading.local()


def enforce(alias: str, within_s: float) -> None:
    """From now on a verb of this process may wait so long for its database; call it before there are connections.

    Only PostgreSQL's drivers let a thread that waits be woken; MariaDB's have limits of their own for each answer,
    which are set here where the project has not.
    """
    connection = connections[alias]
    options = connection.settings_dict.setdefault("OPTIONS", {})
    for name, value in _DEFAULTS.get(connection.vendor, {}).items():
        options.setdefault(name, value)
    if connection.vendor == "postgresql":
        watch = _Watch(within_s)
        transactions.around = watch.limited
        watch.start()


def leave_pools() -> None:
    """From now on each thread of this process has connections of its own, where the project's come from Django's pool.

    Our threads keep theirs from job to job: in a pool with fewer than there are threads, some would wait in vain. Call
    it before there are connections.
    """
    for alias in connections:
        connections.settings[alias].get("OPTIONS", {}).pop("pool", None)


def allow_this_thread(seconds: float) -> None:
    """Upkeep reads more than a verb does."""
    _of_thread.within_s = seconds


class _Watch:
    """A thread that looks whose time is over."""

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self.running: dict[int, tuple[float, BaseDatabaseWrapper] | None] = {}

    def start(self) -> None:
        """Look from now on, as long as it is the one that is asked."""
        threading.Thread(target=self._run, name="faktory-deadlines", daemon=True).start()

    @contextmanager
    def limited(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        """While this lasts, the connection is cut when the time is over."""
        me = id(connection)  # and not the thread: the event loop waits on several
        self.running[me] = (time.monotonic() + getattr(_of_thread, "within_s", self.within_s), connection)
        try:
            yield
        finally:
            self.running.pop(me, None)

    def _run(self) -> None:
        while transactions.around == self.limited:
            time.sleep(LOOK_EVERY_S)
            now = time.monotonic()
            for number, entry in list(self.running.items()):
                if entry and now >= entry[0]:
                    self.running[number] = None  # once
                    _cut(entry[1])


def _cut(connection: BaseDatabaseWrapper) -> None:
    """End the connection under the thread that waits on it: a copy of its socket is shut down."""
    if (session := connection.connection) is None:
        return  # it is being made, for which there is a time of its own
    with suppress(Exception):  # a driver's own errors: it has ended meanwhile
        with socket.socket(fileno=os.dup(session.fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)
        logger.warning("the database says nothing, the connection is cut alias=%s", connection.alias)
