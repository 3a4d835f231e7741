"""One blocking connection to a Faktory server: its URL, the socket, TLS, the handshake, questions and replies.

Knows no verb's meaning and no Broker. Every trouble of the network is an OSError, every trouble of the protocol a
ProtocolError. Source: specification, "Client Lifecycle"; W1, W2, W4.
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

from .. import tls
from ..errors import AuthenticationFailed, InvalidPayload, ProtocolError
from ..payloads import WorkerIdentity
from ..protocol.commands import End
from ..protocol.connection import ClientConnection
from ..protocol.resp import Error, Reply

DEFAULT_PORT = 7419
CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 15.0
"""A server answers within 5 s, a FETCH after 2 s: longer means that nobody is there any more."""

GOODBYE_TIMEOUT_S = 1.0
"""How long END waits for its reply, and for a thread that is still asking: an original server sends none."""

PIPELINE = 200
"""Commands sent in one go: their replies fit into the socket's buffer, so that neither side waits for the other."""

_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the server is, and what it wants to know."""

    host: str
    port: int = DEFAULT_PORT
    password: str = field(default="", repr=False)
    is_tls: bool = False
    ca: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@sensitive_variables()
def parse_url(url: str) -> Address:
    """Read `tcp://:PASSWORD@HOST:PORT` or `tcp+tls://…[?ca=FILE]`; the user's name and other parts are not looked at.

    Raises InvalidPayload naming the part that is wrong; it never shows the password.
    """
    parts = _parts(url)
    if parts.scheme not in ("tcp", "tcp+tls"):
        raise InvalidPayload(
            f"Faktory URL: expected tcp://HOST:PORT or tcp+tls://HOST:PORT, got the scheme {parts.scheme or 'none'!a}"
        )
    if not parts.hostname:
        raise InvalidPayload("Faktory URL: expected a host name, as in tcp://HOST:PORT, got none")
    ca = dict(parse_qsl(parts.query)).get("ca", "")
    if ca and parts.scheme == "tcp":
        raise InvalidPayload("Faktory URL: expected tcp+tls:// with ca=FILE, got tcp://: there is nothing to check")
    return Address(
        host=parts.hostname,
        port=_port(parts),
        password=unquote(parts.password or ""),
        is_tls=parts.scheme == "tcp+tls",
        ca=ca,
    )


def _parts(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        raise InvalidPayload("Faktory URL: expected a host name or [IPv6 address], as in tcp://HOST:PORT") from None


def _port(parts: SplitResult) -> int:
    with suppress(ValueError):
        port = DEFAULT_PORT if parts.port is None else parts.port
        if port > 0:
            return port
    raise InvalidPayload("Faktory URL: expected a port from 1 to 65535, as in tcp://HOST:7419")


class Connection:
    """A socket that has said HELLO; one thread asks at a time."""

    def __init__(
        self,
        address: Address,
        identity: WorkerIdentity,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        self.identity = identity
        self.is_open = True
        self._pid = os.getpid()
        self._asking = threading.Lock()
        self._reply_timeout_s = reply_timeout_s
        self._protocol = ClientConnection(identity=identity, password=address.password)
        self._socket = _dial(address, connect_timeout_s)
        try:
            self._socket.settimeout(reply_timeout_s)
            self._say_hello()
        except BaseException:
            self.close()
            raise

    def ask(self, lines: Sequence[bytes], *, reply_timeout_s: float | None = None) -> list[Reply]:
        """Send these commands, in goes of PIPELINE, and read a reply to each. Raises OSError or ProtocolError.

        `reply_timeout_s` is for these only, where they may take longer than others.
        """
        with self._asking:
            self._socket.settimeout(reply_timeout_s or self._reply_timeout_s)
            return [
                reply
                for start in range(0, len(lines), PIPELINE)
                for reply in self._ask(lines[start : start + PIPELINE])
            ]

    @property
    def is_usable(self) -> bool:
        """Whether it is worth asking: open, of this process, and not closed by the server while it was idle."""
        return self.is_open and self.is_ours and not self._has_news()

    @property
    def is_ours(self) -> bool:
        """Whether this process opened it: after a fork the parent still speaks over the same socket."""
        return self._pid == os.getpid()

    def end(self) -> None:
        """Say END, as the specification asks, and close; the reply is read where there is one."""
        if not self._asking.acquire(timeout=GOODBYE_TIMEOUT_S):
            with suppress(OSError):  # another thread waits for a reply: it is woken, and closes
                self._socket.shutdown(socket.SHUT_RDWR)
            return
        try:
            if self.is_open:
                self._socket.settimeout(GOODBYE_TIMEOUT_S)
                self._ask([End().line()])
        except (OSError, ProtocolError):
            pass  # gone already
        finally:
            self._asking.release()
            self.close()

    def close(self) -> None:
        """Close the socket."""
        self.is_open = False
        self._socket.close()

    def __del__(self) -> None:
        # A thread that ends lets go of its connection; nobody else is there to close it.
        if hasattr(self, "_socket"):
            self._socket.close()

    def _say_hello(self) -> None:
        while (line := self._protocol.hello()) is None:
            self._read()
        [reply] = self._ask([line])
        if isinstance(reply, Error):
            told = reply.message.lower()
            # One that turns an address away for a while says nothing about our password.
            is_wrong = "password" in told and "too many" not in told
            refused = AuthenticationFailed if is_wrong else ProtocolError
            raise refused(f"the server refused HELLO: {reply.message}")

    def _ask(self, lines: Sequence[bytes]) -> list[Reply]:
        try:
            self._socket.sendall(b"".join(lines))
        except ConnectionError:
            if len(lines) > 1:
                raise
            # Closed while we wrote: a server that refuses a command as too long has said so before (W7).
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

    def _has_news(self) -> bool:
        """Whether bytes or an end of file wait where nothing was asked: a server never speaks first."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:  # closed a moment ago, by `end` from another thread
            return True
        return bool(poll.poll(0))


def _dial(address: Address, timeout_s: float) -> socket.socket:
    plain = socket.create_connection((address.host, address.port), timeout_s)
    try:
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
    except tls.UnusableFile as error:  # it may be put there anew at this moment
        raise OSError(str(error)) from error
