"""Blocking client connection to a Faktory server: URL, socket, TLS, handshake, commands and replies.

`SocketConnection` does not interpret the verbs. Network errors are raised as OSError, protocol errors as ProtocolError.
Source: specification, "Client Lifecycle"; W1, W2, W4.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from django.views.decorators.debug import sensitive_variables

from ..core.payloads import WorkerIdentity
from ..core.protocol.commands import End
from ..core.protocol.connection import ClientConnection
from ..core.protocol.replies import check_ok
from ..core.protocol.resp import Error, Reply
from ..errors import AuthenticationFailed, InvalidPayload, ProtocolError
from . import tls

DEFAULT_PORT = 7419
CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 15.0
"""Read timeout in seconds.

A server answers within 5 s, and a FETCH after 2 s; beyond this timeout the connection counts as lost.
"""

GOODBYE_TIMEOUT_S = 1.0
"""How long, in seconds, END waits for its reply, and for a thread that is still in `request`.

An original server sends no reply to END.
"""

PIPELINE = 200
"""Commands sent at once: their replies fit into the socket's buffer, so that client and server cannot block each other.
"""

_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Host, port, password and TLS settings from a server URL."""

    host: str
    port: int = DEFAULT_PORT
    password: str = field(default="", repr=False)
    is_tls: bool = False
    ca: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


# Django's reports of errors must not show the URL, which contains the password.
@sensitive_variables()
def parse_url(url: str) -> Address:
    """Parse `tcp://:PASSWORD@HOST:PORT` or `tcp+tls://…[?ca=FILE]`; user name, path and other parameters are ignored.

    Raises InvalidPayload that names the wrong part, and never contains the password.
    """
    parsed = _split_url(url)
    if parsed.scheme not in ("tcp", "tcp+tls"):
        raise InvalidPayload(
            f"Faktory URL: expected tcp://HOST:PORT or tcp+tls://HOST:PORT, got the scheme {parsed.scheme or 'none'!a}"
        )
    if not parsed.hostname:
        raise InvalidPayload("Faktory URL: expected a host name, as in tcp://HOST:PORT, got none")
    ca = dict(parse_qsl(parsed.query)).get("ca", "")
    if ca and parsed.scheme == "tcp":
        raise InvalidPayload("Faktory URL: expected tcp+tls:// with ca=FILE, got tcp://: there is nothing to check")
    return Address(
        host=parsed.hostname,
        port=_port(parsed),
        password=unquote(parsed.password or ""),
        is_tls=parsed.scheme == "tcp+tls",
        ca=ca,
    )


def _split_url(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        raise InvalidPayload("Faktory URL: expected a host name or [IPv6 address], as in tcp://HOST:PORT") from None


def _port(parsed: SplitResult) -> int:
    with suppress(ValueError):
        port = DEFAULT_PORT if parsed.port is None else parsed.port
        if port > 0:
            return port
    raise InvalidPayload("Faktory URL: expected a port from 1 to 65535, as in tcp://HOST:7419")


class SocketConnection:
    """A socket that has completed the HELLO handshake; a mutex serializes the threads that call `request`."""

    def __init__(
        self,
        address: Address,
        identity: WorkerIdentity,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
        goodbye_timeout_s: float = GOODBYE_TIMEOUT_S,
    ) -> None:
        self.identity = identity
        self.is_open = True
        self._pid = os.getpid()
        self._request_lock = threading.Lock()
        self._reply_timeout_s = reply_timeout_s
        self._goodbye_timeout_s = goodbye_timeout_s
        self._protocol = ClientConnection(identity=identity, password=address.password)
        self._socket = _connect(address, connect_timeout_s)
        try:
            # The handshake reads with the reply timeout: the connect timeout covers only TCP and TLS.
            self._socket.settimeout(reply_timeout_s)
            self._send_hello()
        except BaseException:  # no caller has this object yet, so no other code can close it
            self.close()
            raise

    def request(self, lines: Sequence[bytes], *, reply_timeout_s: float | None = None) -> list[Reply]:
        """Send commands in chunks of PIPELINE, and read one reply for each. Raises OSError or ProtocolError.

        `reply_timeout_s` replaces the usual timeout for these commands.
        """
        with self._request_lock:
            self._socket.settimeout(reply_timeout_s or self._reply_timeout_s)
            return [
                reply
                for start in range(0, len(lines), PIPELINE)
                for reply in self._exchange(lines[start : start + PIPELINE])
            ]

    @property
    def is_usable(self) -> bool:
        """Return whether it is open, was opened by this process, and was not closed by the server while idle."""
        return self.is_open and self.is_of_this_process and not self._has_unread_input()

    @property
    def is_of_this_process(self) -> bool:
        """Return whether this process opened the connection: after a fork the parent still uses the same socket."""
        return self._pid == os.getpid()

    def end(self) -> None:
        """Send END, as the specification requires, wait for the reply if there is one, and close."""
        if not self._request_lock.acquire(timeout=self._goodbye_timeout_s):
            with suppress(OSError):  # wakes the thread that waits for a reply, which then closes
                self._socket.shutdown(socket.SHUT_RDWR)
            return
        try:
            if self.is_open:
                self._socket.settimeout(self._goodbye_timeout_s)
                self._exchange([End().line()])
        except (OSError, ProtocolError):
            pass  # the server has closed the connection already
        finally:
            self._request_lock.release()
            self.close()

    def close(self) -> None:
        """Close the socket; idempotent."""
        self.is_open = False
        self._socket.close()

    def __del__(self) -> None:
        # When a thread ends, its thread-local connection loses its last reference; no other code closes the socket.
        if hasattr(self, "_socket"):
            self._socket.close()

    def _send_hello(self) -> None:
        while (line := self._protocol.hello()) is None:
            self._read()
        [reply] = self._exchange([line])
        if isinstance(reply, Error):
            lowered = reply.message.lower()
            # "too many …" is a temporary block of our address, and says nothing about our password.
            is_wrong = "password" in lowered and "too many" not in lowered
            refused = AuthenticationFailed if is_wrong else ProtocolError
            raise refused(f"the server refused HELLO: {reply.message}")
        check_ok(reply)

    def _exchange(self, lines: Sequence[bytes]) -> list[Reply]:
        try:
            self._socket.sendall(b"".join(lines))
        except ConnectionError:
            if len(lines) > 1:
                raise
            # The server closed the connection while we wrote. If it refused the command as too long, the refusal has
            # already been sent and can still be read (W7).
        return [self._reply() for _ in lines]

    def _reply(self) -> Reply:
        while (reply := self._protocol.next_reply()) is None:
            self._read()
        return reply

    def _read(self) -> None:
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._protocol.receive(data)

    def _has_unread_input(self) -> bool:
        """Return whether input or an end of file is waiting between commands: a server sends only replies."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:  # closed by `end` in another thread meanwhile
            return True
        return bool(poll.poll(0))


def _connect(address: Address, timeout_s: float) -> socket.socket:
    plain = socket.create_connection((address.host, address.port), timeout_s)
    try:
        # Commands are small and each waits for its reply: with Nagle's algorithm they would wait for delayed ACKs too.
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not address.is_tls:
            return plain
        return _tls_context(address).wrap_socket(plain, server_hostname=address.host)
    except BaseException:
        plain.close()
        raise


def _tls_context(address: Address) -> ssl.SSLContext:
    try:
        return tls.client_context(address.ca)
    except tls.UnusableFile as error:  # a rotation may be replacing the file: retryable like a network error
        raise OSError(str(error)) from error
