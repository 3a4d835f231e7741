"""Listen on the server's port, and accept its connections or refuse them (W8).

The servers of asyncio accept all waiting connections before they call a protocol. A burst above MAX_CONNECTIONS would
use up the descriptors, and uvloop closes connections without a word then. Nor do they limit TLS handshakes.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..core.logs import get_logger
from .connection import TOO_MANY, Connection
from .context import ServerContext

logger = get_logger(__name__)

BACKLOG = 65_535
"""Connections that may wait to be accepted, up to the maximum of the system. A connection that the system drops instead
is not noticed by its client, which then waits for the greeting for a minute."""

ACCEPTED_AT_ONCE = 100
"""Connections accepted in a row, before the event loop serves others."""

RESERVED = 256
"""Descriptors for everything but clients: databases, log files, probes. On SQLite a connection takes three."""

KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Socket options: a peer that vanished without closing is noticed within 90 s instead of the default two hours."""

RETRY_S = 0.5
"""Time until the next attempt after an error of `accept`."""

LOG_EVERY_S = 5.0
"""Seconds of refused connections that one log line counts."""


def open_sockets(host: str, port: int, *, shares_port: bool) -> list[socket.socket]:
    """Listen on each address of the host. Raises OSError."""
    sockets: list[socket.socket] = []
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            sockets.append(socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=shares_port))
    except OSError:
        close(sockets)
        raise
    return sockets


def close(sockets: Iterable[socket.socket]) -> None:
    """Stop listening on all of these sockets."""
    for one in sockets:
        one.close()


def find_max_backlog() -> int | None:
    """Return the system's maximum of waiting connections; None if it is not known."""
    try:
        return int(Path("/proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):  # no Linux
        return None


def limit_connections(wanted: int) -> int:
    """Raise the soft limit of open files as far as `wanted` connections need it; return how many fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    with suppress(OSError, ValueError):
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(wanted, soft - min(RESERVED, soft // 2))


class Acceptor:
    """Accepts the connections of listening sockets until `close`. Used on the event loop only.

    With `tls`, at most `limit` connections and `spare_handshakes` more are open: one above `limit` is refused with an
    error (W8) after its handshake.
    """

    def __init__(
        self, sockets: list[socket.socket], server: ServerContext, tls: ssl.SSLContext | None, *, limit: int
    ) -> None:
        self._sockets, self._server, self._loop = sockets, server, server.loop
        self._limit = limit + server.tuning.spare_handshakes
        self._options: dict[str, Any] = {}
        if tls is not None:
            self._options = {
                "ssl": tls,
                "ssl_handshake_timeout": server.hello_timeout_s,
                "ssl_shutdown_timeout": server.tuning.slow_reader_s,
            }
        self._connecting: set[asyncio.Task[object]] = set()
        self._refused = 0  # since the last log line
        for listening in sockets:
            listening.setblocking(False)
            self._resume(listening)

    @property
    def handshakes(self) -> int:
        """Number of connections that have not completed the TLS handshake."""
        return len(self._connecting)

    def close(self) -> None:
        """Close the listening sockets and end TLS handshakes; connections that are accepted already remain."""
        for listening in self._sockets:
            self._loop.remove_reader(listening)
        close(self._sockets)
        self._sockets = []
        if self._options:
            for task in self._connecting:
                task.cancel()

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or memory is free: the connections wait in the backlog
                logger.warning("could not accept a connection, it waits retry_s=%g error=%s", RETRY_S, error)
                self._loop.remove_reader(listening)
                self._loop.call_later(RETRY_S, self._resume, listening)
                return
            accepted.setblocking(False)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEP_ALIVE.items():
                if hasattr(socket, name):  # not every system has all of them
                    accepted.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            connection = Connection(self._server)
            if self._is_admitted(connection):
                self._connect(accepted, connection)
            else:
                self._refuse(accepted)

    def _is_admitted(self, connection: Connection) -> bool:
        if not self._options:
            return self._server.admit(connection)
        # A handshake is no connection of the server yet, but costs memory and CPU time: it counts too.
        return self._server.connection_count + self.handshakes < self._limit

    def _connect(self, accepted: socket.socket, connection: Connection) -> None:
        connecting = self._loop.connect_accepted_socket(lambda: connection, accepted, **self._options)
        task = self._loop.create_task(connecting)
        self._connecting.add(task)
        task.add_done_callback(partial(self._on_connected, accepted, connection))

    def _on_connected(self, accepted: socket.socket, connection: Connection, task: asyncio.Task[object]) -> None:
        self._connecting.discard(task)
        if task.cancelled() or task.exception():  # the client has gone already, or its handshake failed
            if self._options and not task.cancelled():
                logger.info("TLS failed error=%s", task.exception())
            self._server.forget(connection)
            accepted.close()

    def _refuse(self, accepted: socket.socket) -> None:
        if not self._options:  # before a TLS handshake there can be no error
            with suppress(OSError):
                accepted.send(TOO_MANY)
        accepted.close()
        self._refused += 1
        if self._refused == 1:
            self._loop.call_later(LOG_EVERY_S, self._log_refused)

    def _log_refused(self) -> None:
        logger.warning("too many connections, refused some refused=%d", self._refused)
        self._refused = 0
