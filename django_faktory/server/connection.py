"""One client's connection: bytes to commands, one at a time and in order, replies back. Knows what no verb means.

Limits: W3, W6 to W8, W14; a client that does not read its replies is closed after `SLOW_READER_S`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from ..errors import InvalidPayload, ProtocolError, UnknownCommand
from ..payloads import WorkerIdentity
from ..protocol import resp
from ..protocol.commands import Command, Hello
from ..protocol.connection import ServerConnection

if TYPE_CHECKING:
    from .listener import Server

logger = logging.getLogger(__name__)

READ_AHEAD_BYTES = 64 * 1024
"""What may wait unread behind the command at hand before reading stops."""

WRITE_BUFFER_BYTES = 4 * 1024 * 1024
SLOW_READER_S = 30.0
NOBODY = WorkerIdentity()


class Connection(asyncio.Protocol):
    """See the module. `busy` is set while a command is being carried out; `finish` answers it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.on_gone: Callable[[], None] | None = None
        self._protocol = self._new_protocol(server.password, server.max_command_bytes)
        self._transport: asyncio.Transport | None = None
        self._is_busy = False
        self._is_ending = False  # the client sends no more
        self._is_closed = False  # nothing more is written
        self._is_paused = False
        self._reads_no_more = False
        self._timer: asyncio.TimerHandle | None = None

    @staticmethod
    def _new_protocol(password: str, max_command_bytes: int) -> ServerConnection:
        if not password:
            return ServerConnection(max_command_bytes=max_command_bytes)
        # About 3 ms of work to check, and more to guess: the original server's range (W1).
        return ServerConnection(
            password=password,
            salt=secrets.token_hex(8),
            iterations=4000 + secrets.randbelow(4096),
            max_command_bytes=max_command_bytes,
        )

    @property
    def identity(self) -> WorkerIdentity:
        """Who said HELLO; nobody before."""
        return self._protocol.identity or NOBODY

    # --- what the transport tells ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet, or turn away where all places are taken (W8)."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if raw := transport.get_extra_info("socket"):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not self.server.admits(self):
            self._write(resp.error("too many connections"))
            self.close()
            return
        self._write(self._protocol.greeting())
        self._timer = self.server.loop.call_later(self.server.hello_timeout_s, self._no_hello)

    def data_received(self, data: bytes) -> None:
        """Read on, unless a command is at hand and enough waits behind it."""
        self._protocol.receive(data)
        self._read_on()
        if self._transport and self._is_busy and self._protocol.buffered_bytes > READ_AHEAD_BYTES:
            self._reads_no_more = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The client sends no more: a FETCH that waits gets no job (W14), other commands are answered first."""
        self._is_ending = True
        if self.on_gone or not self._is_busy:
            self.close()
        return True  # keep it open for the answer to the command at hand

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The client is gone."""
        self._leave()
        if self._timer:
            self._timer.cancel()
        self.server.forgets(self)
        self._transport = None

    def pause_writing(self) -> None:
        """The client does not read: nothing more is done for it, and not for ever."""
        self._is_paused = True
        self._timer = self.server.loop.call_later(SLOW_READER_S, self.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        self._is_paused = False
        if self._timer:
            self._timer.cancel()
        self._read_on()

    # --- what the server tells ---

    def finish(self, reply: bytes) -> bool:
        """Answer the command at hand and go on to the next. False where the client is gone: nothing was written."""
        self._is_busy = False
        self.on_gone = None
        if not self._write(reply):
            return False
        self._read_on()
        if self._reads_no_more and not self._is_busy and self._transport:
            self._reads_no_more = False
            self._transport.resume_reading()
        return True

    def dismiss(self, reply: bytes) -> None:
        """Answer the command at hand, and close: what came after it is not read."""
        self._is_busy = False
        self._write(reply)
        self.close()

    def close(self) -> None:
        """Close when what is written has been sent."""
        self._leave()
        if self._transport:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._leave()
        if self._transport:
            self._transport.abort()

    def _read_on(self) -> None:
        while not (self._is_busy or self._is_paused or self._is_closed):
            try:
                command = self._protocol.next_command()
            except (InvalidPayload, UnknownCommand) as error:
                self._write(resp.error(str(error), code=error.code))
                continue
            except ProtocolError as error:
                self._write(resp.error(str(error), code=error.code))
                self.close()
                return
            if command is None:
                break
            self._carry_out(command)
        if self._is_ending and not self._is_busy:
            self.close()

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Hello) and self._timer:
            self._timer.cancel()
            self._timer = None
        self._is_busy = True
        reply = self.server.carry_out(self, command)
        if reply is not None:
            self._is_busy = False
            self._write(reply)

    def _write(self, reply: bytes) -> bool:
        if self._is_closed or self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(reply)
        return True

    def _leave(self) -> None:
        self._is_closed = True
        if self.on_gone:
            self.on_gone()
            self.on_gone = None

    def _no_hello(self) -> None:
        if not self._protocol.is_identified:
            self._write(resp.error(f"expected HELLO within {self.server.hello_timeout_s:g} seconds"))
            self.close()
