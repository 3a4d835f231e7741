"""What stands between a socket and its Connection: nothing, or TLS.

asyncio's own TLS counts nobody before the handshake, hides what waits below it unsent (W14), and cannot end one
direction alone. So the records are made here, by OpenSSL in memory, and the socket's transport carries them.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from ..logs import get_logger
from .connection import Connection

if TYPE_CHECKING:
    from .listener import Server

logger = get_logger(__name__)

SPARE_PLACES = 100
"""For those that are one too many: they are told so (W8), which over TLS takes a handshake."""

_RECORD_BYTES = 64 * 1024
_MORE_IS_NEEDED = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Door:
    """The protocol factory of the server's port."""

    def __init__(self, server: Server, tls: ssl.SSLContext | None, *, most: int) -> None:
        self.server = server
        self._tls = tls
        self._most = most + SPARE_PLACES
        self._shaking_hands: set[TlsTransport] = set()

    def __call__(self) -> asyncio.BaseProtocol:
        """Somebody connects."""
        return Connection(self.server) if self._tls is None else TlsTransport(self, self._tls)

    def admits(self, transport: TlsTransport) -> bool:
        """Whether one more may begin a handshake; if so it is counted."""
        if self.server.connection_count + len(self._shaking_hands) >= self._most:
            return False
        self._shaking_hands.add(transport)
        return True

    def forgets(self, transport: TlsTransport) -> None:
        """A handshake is over."""
        self._shaking_hands.discard(transport)

    def close(self) -> None:
        """Send away who has not ended the handshake."""
        for transport in list(self._shaking_hands):
            transport.abort()


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """The socket's protocol, and the transport of the Connection that is made when the handshake is done."""

    def __init__(self, door: Door, context: ssl.SSLContext) -> None:
        super().__init__()
        self._door = door
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._connection: Connection | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self._hears_no_more = False  # the client has said that it sends no more
        self._has_said_goodbye = False
        self._is_closing = False

    # --- the socket's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the handshake, as long as for HELLO (W3)."""
        self._socket = cast(asyncio.Transport, transport)
        if not self._door.admits(self):
            self.abort()
            return
        server = self._door.server
        self._deadline = server.loop.call_later(server.hello_timeout_s, self._fail, TimeoutError("not in time"))

    def data_received(self, data: bytes) -> None:
        """Records, whole or not."""
        if self._has_said_goodbye or self._is_closing:
            return  # read only so that the last reply is not lost to a reset
        self._incoming.write(data)
        try:
            if self._connection is None and not self._shake_hands():
                return
            self._read()
        except ssl.SSLError as error:
            self._fail(error)
        finally:
            self._flush()

    def eof_received(self) -> bool:
        """The client closed its half, with or without a goodbye."""
        self._client_ends()
        return not self._is_closing and self._connection is not None

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._is_closing = True
        self._forget_handshake()
        if self._connection:
            self._connection.connection_lost(exc or self._error)

    def pause_writing(self) -> None:
        """The client does not read."""
        if self._connection:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._connection:
            self._connection.resume_writing()

    # --- the connection's side ---

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send."""
        if self._is_closing or self._has_said_goodbye:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[self._tls.write(view) :]
        except ssl.SSLError as error:
            self._fail(error)
        self._flush()

    def write_eof(self) -> None:
        """Say that no more is sent, and read on. Sent by TLS itself: a client must not take it for a cut connection."""
        if self._has_said_goodbye or self._is_closing or self._connection is None:
            return
        self._has_said_goodbye = True
        with suppress(ssl.SSLError):  # as a rule: the other side has not said so yet
            self._tls.unwrap()
        self._flush()

    def can_write_eof(self) -> bool:
        """Unlike asyncio's."""
        return True

    def close(self) -> None:
        """Close when what is written has been sent."""
        self.write_eof()
        self._is_closing = True
        self._socket.close()

    def abort(self) -> None:
        """Close at once."""
        self._is_closing = True
        self._forget_handshake()
        self._socket.abort()

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self._is_closing or self._socket.is_closing()

    def pause_reading(self) -> None:
        """Let the client wait."""
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        self._socket.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Of the socket: nothing waits here."""
        self._socket.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        """What has not left this process."""
        return self._socket.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the socket knows."""
        return self._tls if name == "ssl_object" else self._socket.get_extra_info(name, default)

    # --- between the two ---

    def _shake_hands(self) -> bool:
        """Go on with the handshake; whether it is done."""
        try:
            self._tls.do_handshake()
        except _MORE_IS_NEEDED:
            return False
        self._flush()
        self._forget_handshake()
        self._connection = Connection(self._door.server)
        self._connection.connection_made(self)
        return True

    def _read(self) -> None:
        """Hand on all there is; where reading is paused the socket is, so nothing piles up here."""
        found = bytearray()
        ends = False
        try:
            while not ends:
                data = self._tls.read(_RECORD_BYTES)
                found += data
                ends = not data
        except ssl.SSLZeroReturnError:
            ends = True
        except _MORE_IS_NEEDED:
            pass
        if found and self._connection:
            self._connection.data_received(bytes(found))
        if ends:
            self._client_ends()

    def _client_ends(self) -> None:
        if self._hears_no_more or self._connection is None:
            return
        self._hears_no_more = True
        if not self._connection.eof_received():
            self.close()

    def _flush(self) -> None:
        if self._outgoing.pending and not self._socket.is_closing():
            self._socket.write(self._outgoing.read())

    def _fail(self, error: Exception) -> None:
        """No TLS, none we accept, too late, or spoilt: the client is told by an alert, where there is one."""
        logger.info("TLS failed error=%s", error)
        self._error = error
        self._forget_handshake()
        self._is_closing = True
        self._flush()
        if self._connection is None:
            self._socket.close()
        else:
            self._connection.abort()

    def _forget_handshake(self) -> None:
        self._door.forgets(self)
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None
