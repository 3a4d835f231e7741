"""Create the asyncio protocol of each accepted socket: a plain Connection, or one behind TLS.

`TlsTransport` replaces asyncio's own TLS, which cannot limit connections before the handshake, hides unsent bytes
below it (W14), and cannot close one direction alone. It runs OpenSSL in memory; the socket's transport carries the
records.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Any, cast

from ..core.logs import get_logger
from .connection import Connection
from .context import ServerContext
from .listening import TOO_MANY

logger = get_logger(__name__)

_RECORD_BYTES = 64 * 1024
_MORE_IS_NEEDED = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ConnectionFactory:
    """Create the protocols of the server's port. Counts TLS handshakes; `limit` is that of connections."""

    def __init__(self, server: ServerContext, tls: ssl.SSLContext | None, *, limit: int) -> None:
        self.server = server
        self._tls = tls
        self._limit = limit + server.tuning.spare_handshakes
        self._handshakes: set[TlsTransport] = set()
        self.refusal = TOO_MANY if tls is None else b""
        """Sent to a client that is closed immediately. Before a handshake there can be none."""

    def accept(self) -> Connection | TlsTransport | None:
        """Return the protocol for an accepted socket; None if there are too many connections."""
        if self._tls is None:
            connection = Connection(self.server)
            return connection if self.server.admit(connection) else None
        # A handshake has no Connection yet, but costs memory and CPU time: it counts too.
        if self.server.connection_count + len(self._handshakes) >= self._limit:
            return None
        handshake = TlsTransport(self, self._tls)
        self._handshakes.add(handshake)
        return handshake

    def forget(self, protocol: asyncio.BaseProtocol) -> None:
        """Remove a handshake that ended or failed, or a connection that never began; idempotent."""
        if isinstance(protocol, TlsTransport):
            self._handshakes.discard(protocol)
        elif isinstance(protocol, Connection):
            self.server.forget(protocol)

    def close(self) -> None:
        """Abort all connections that have not completed the handshake."""
        for transport in list(self._handshakes):
            transport.abort()


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """Protocol of the socket, and transport of the Connection that is created after the handshake."""

    def __init__(self, factory: ConnectionFactory, context: ssl.SSLContext) -> None:
        super().__init__()
        self._connection_factory = factory
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._connection: Connection | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self._has_client_ended = False  # the client has closed its sending half
        self._is_write_closed = False
        self._is_closing = False

    # --- the socket's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeout of the handshake: HELLO_TIMEOUT, as for HELLO (W3)."""
        self._socket = cast(asyncio.Transport, transport)
        server = self._connection_factory.server
        self._deadline = server.loop.call_later(server.hello_timeout_s, self._fail, TimeoutError("not in time"))

    def data_received(self, data: bytes) -> None:
        """Decrypt records, which may be incomplete, and pass their contents to the Connection."""
        if self._is_write_closed or self._is_closing:
            return  # read and discarded: closing with unread bytes sends a reset, which would drop the last reply
        self._incoming.write(data)
        try:
            if self._connection is None and not self._continue_handshake():
                return
            self._read()
        except ssl.SSLError as error:
            self._fail(error)
        finally:  # the handshake's replies and alerts, also after an error
            self._flush()

    def eof_received(self) -> bool:
        """Treat a closed socket like a close_notify alert, which some clients do not send."""
        self._on_client_end()
        return not self._is_closing and self._connection is not None

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass the loss to the Connection, with the TLS error if there was one."""
        self._is_closing = True
        self._forget_handshake()
        if self._connection:
            self._connection.connection_lost(exc or self._error)

    def pause_writing(self) -> None:
        """Forward to the Connection that the client reads its replies too slowly."""
        if self._connection:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Forward to the Connection that the client has read enough of its replies."""
        if self._connection:
            self._connection.resume_writing()

    # --- the connection's side ---

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Encrypt and send; does nothing after `write_eof`, `close` or `abort`."""
        if self._is_closing or self._is_write_closed:
            return
        view = memoryview(data)
        try:
            while view:  # OpenSSL may take only a part
                view = view[self._tls.write(view) :]
        except ssl.SSLError as error:
            self._fail(error)
        self._flush()

    def write_eof(self) -> None:
        """Send TLS's close_notify and keep reading.

        A bare end of the socket's stream would look like a truncated connection to the client.
        """
        if self._is_write_closed or self._is_closing or self._connection is None:
            return
        self._is_write_closed = True
        with suppress(ssl.SSLError):  # usual: the client has not sent its close_notify yet
            self._tls.unwrap()
        self._flush()

    def can_write_eof(self) -> bool:
        """Return True: unlike asyncio's TLS, this one can close its sending half."""
        return True

    def close(self) -> None:
        """Close after all written bytes have been sent."""
        self.write_eof()
        self._is_closing = True
        self._socket.close()

    def abort(self) -> None:
        """Close at once, without sending buffered bytes."""
        self._is_closing = True
        self._forget_handshake()
        self._socket.abort()

    def is_closing(self) -> bool:
        """Return whether the transport is closing, so that nothing more is sent."""
        return self._is_closing or self._socket.is_closing()

    def pause_reading(self) -> None:
        """Pause reading from the socket."""
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading from the socket."""
        self._socket.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits of the socket's transport; this one has no buffer of its own."""
        self._socket.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        """Return the bytes that are still buffered in this process."""
        return self._socket.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information from the socket's transport, or the TLS object for `ssl_object`."""
        return self._tls if name == "ssl_object" else self._socket.get_extra_info(name, default)

    # --- TLS ---

    def _continue_handshake(self) -> bool:
        """Continue the handshake; return whether it is complete."""
        try:
            self._tls.do_handshake()
        except _MORE_IS_NEEDED:
            return False
        self._flush()
        self._forget_handshake()
        self._connection = Connection(self._connection_factory.server)
        self._connection.connection_made(self)
        return True

    def _read(self) -> None:
        """Pass on all decrypted bytes. `pause_reading` pauses the socket, so none accumulate here."""
        decrypted = bytearray()
        ends = False
        try:
            while not ends:
                data = self._tls.read(_RECORD_BYTES)
                decrypted += data
                ends = not data
        except ssl.SSLZeroReturnError:
            ends = True
        except _MORE_IS_NEEDED:
            pass
        if decrypted and self._connection:
            self._connection.data_received(bytes(decrypted))
        if ends:
            self._on_client_end()

    def _on_client_end(self) -> None:
        if self._has_client_ended or self._connection is None:
            return
        self._has_client_ended = True
        if not self._connection.eof_received():
            self.close()

    def _flush(self) -> None:
        if self._outgoing.pending and not self._socket.is_closing():
            self._socket.write(self._outgoing.read())

    def _fail(self, error: Exception) -> None:
        """Close after missing, unacceptable, late or corrupt TLS; send the alert if OpenSSL has produced one."""
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
        self._connection_factory.forget(self)
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None
