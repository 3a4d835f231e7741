"""Enforce a timeout on database calls by shutting down the socket; the driver then reports a lost connection.

Without it a driver waits indefinitely if a network drops packets, a pooler hangs or a server stops responding while the
socket stays open. Only long-running programs (`runfaktory`) enable it; web requests keep the project's own limits.
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

from ..core.logs import get_logger
from ..store import transactions

logger = get_logger(__name__)

CONNECT_TIMEOUT_S = 5
CHECK_EVERY_S = 1.0
"""Seconds between two checks for calls past their limit."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    # The operating system detects an unreachable host within half a minute. A server that has become a standby is
    # rejected: code that only reads would not notice the change (ADR 0017).
    "postgresql": {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "keepalives_idle": 20,
        "tcp_user_timeout": 30_000,
        "target_session_attrs": "read-write",
    },
    "mysql": {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": 60, "write_timeout": 60},
}

_thread_limits = threading.local()


def enforce(alias: str, timeout_s: float, *, check_every_s: float = CHECK_EVERY_S) -> None:
    """Limit each database call of this process to `timeout_s` seconds; call it before any connection is opened.

    Only PostgreSQL drivers allow a waiting thread to be interrupted. MariaDB drivers have read and write timeouts of
    their own, set here unless the project has set them.
    """
    connection = connections[alias]
    options = connection.settings_dict.setdefault("OPTIONS", {})
    for name, value in _DEFAULTS.get(connection.vendor, {}).items():
        options.setdefault(name, value)
    if connection.vendor == "postgresql":
        watchdog = _Watchdog(timeout_s, check_every_s=check_every_s)
        transactions.limit_attempt = watchdog.limit
        watchdog.start()


def disable_pools() -> None:
    """Give each thread of this process its own connection instead of one from Django's pool.

    Threads keep their connection from job to job, so with a pool smaller than the number of threads some would wait
    indefinitely. Call it before any connection is opened.
    """
    for alias in connections:
        connections.settings[alias].get("OPTIONS", {}).pop("pool", None)


def set_thread_limit(seconds: float) -> None:
    """Override the limit for the calling thread: maintenance needs more time than a command."""
    _thread_limits.timeout_s = seconds


class _Watchdog:
    """A thread that cuts a connection after its deadline."""

    def __init__(self, timeout_s: float, *, check_every_s: float = CHECK_EVERY_S) -> None:
        self.timeout_s = timeout_s
        self._check_every_s = check_every_s
        self.running: dict[int, tuple[float, BaseDatabaseWrapper] | None] = {}
        self._suspended_s = 0.0
        """Seconds during which the whole process was suspended (SIGSTOP, a paused machine); no limit includes them."""

    def start(self) -> None:
        """Start the thread; it ends when another watchdog replaces this one."""
        threading.Thread(target=self._run, name="faktory-deadlines", daemon=True).start()

    @contextmanager
    def limit(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        """Cut the connection if the block takes longer than the limit."""
        key = id(connection)  # by connection: the event loop's thread waits on several
        self.running[key] = (self.now() + getattr(_thread_limits, "timeout_s", self.timeout_s), connection)
        try:
            yield
        finally:
            self.running.pop(key, None)

    def now(self) -> float:
        """Return a monotonic time, in seconds, that excludes the time during which the process was suspended."""
        return time.monotonic() - self._suspended_s

    def _run(self) -> None:
        while transactions.limit_attempt == self.limit:
            slept_from = time.monotonic()
            time.sleep(self._check_every_s)
            # Replies may have arrived meanwhile, so the waiting threads keep their remaining time to read them.
            self._suspended_s += max(0.0, time.monotonic() - slept_from - 2 * self._check_every_s)
            now = self.now()
            # A copy: other threads add and remove entries meanwhile.
            for key, entry in list(self.running.items()):
                if entry and now >= entry[0]:
                    self.running[key] = None  # cut only once
                    _cut(entry[1])


def _cut(connection: BaseDatabaseWrapper) -> None:
    """End the connection while another thread waits on it.

    Shuts down a duplicate of its socket, so that the driver's own descriptor stays open for the driver to close.
    """
    if (session := connection.connection) is None:
        return  # still connecting, which connect_timeout limits
    with suppress(Exception):  # any driver error means that the connection has already ended
        with socket.socket(fileno=os.dup(session.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
        logger.warning("the database did not reply in time, closed the connection alias=%s", connection.alias)
