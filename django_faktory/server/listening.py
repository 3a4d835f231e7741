"""Listen on the server's port, and accept its connections or refuse them (W8).

The servers of asyncio accept all waiting connections before they call a protocol. A burst above MAX_CONNECTIONS would
use up the descriptors, and uvloop closes connections without a word then.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from ..core.logs import get_logger
from ..core.protocol import resp

logger = get_logger(__name__)

BACKLOG = 65_535
"""Connections that may wait to be accepted, up to the maximum of the system. A connection that the system drops instead
is not noticed by its client, which then waits for the greeting for a minute."""

ACCEPTED_AT_ONCE = 100
"""Connections accepted in a row, before the event loop serves others."""

RESERVED = 256
"""Descriptors for everything but clients: databases, log files, probes. On SQLite a connection takes three."""

RETRY_S = 0.5
"""Time until the next attempt after an error of `accept`."""

LOG_EVERY_S = 5.0
"""Seconds of refused connections that one log line counts."""

TOO_MANY = resp.error("too many connections")


class Admission(Protocol):
    """Decides which accepted sockets are served; see `tls_transport.ConnectionFactory`."""

    refusal: bytes
    """Sent to the clients of the other sockets."""

    def accept(self) -> asyncio.BaseProtocol | None:
        """Return the protocol of one more socket; None if there are too many."""

    def forget(self, protocol: asyncio.BaseProtocol) -> None:
        """Forget a protocol whose socket failed before `connection_made`."""


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
    """Accepts the connections of listening sockets until `close`. Used on the event loop only."""

    def __init__(self, sockets: list[socket.socket], admission: Admission, loop: asyncio.AbstractEventLoop) -> None:
        self._sockets, self._admission, self._loop = sockets, admission, loop
        self._connecting: set[asyncio.Task[object]] = set()
        self._refused = 0  # since the last log line
        for listening in sockets:
            listening.setblocking(False)
            self._resume(listening)

    def close(self) -> None:
        """Close the listening sockets; connections that are accepted already remain."""
        for listening in self._sockets:
            self._loop.remove_reader(listening)
        close(self._sockets)
        self._sockets = []

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
            if protocol := self._admission.accept():
                self._connect(accepted, protocol)
            else:
                self._refuse(accepted)

    def _connect(self, accepted: socket.socket, protocol: asyncio.BaseProtocol) -> None:
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: protocol, accepted))
        self._connecting.add(task)
        task.add_done_callback(partial(self._on_connected, accepted, protocol))

    def _on_connected(
        self, accepted: socket.socket, protocol: asyncio.BaseProtocol, task: asyncio.Task[object]
    ) -> None:
        self._connecting.discard(task)
        if task.cancelled() or task.exception():  # the client has gone already
            self._admission.forget(protocol)
            accepted.close()

    def _refuse(self, accepted: socket.socket) -> None:
        with suppress(OSError):
            accepted.send(self._admission.refusal)
        accepted.close()
        self._refused += 1
        if self._refused == 1:
            self._loop.call_later(LOG_EVERY_S, self._log_refused)

    def _log_refused(self) -> None:
        logger.warning("too many connections, refused some refused=%d", self._refused)
        self._refused = 0
