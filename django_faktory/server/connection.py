"""One client's connection: bytes to commands, one at a time and in order, replies back. Knows what no verb means.

Limits: W3, W6 to W8, W14; a client that reads nothing of its replies for `SLOW_READER_S` is closed, and so is one that
begins a line and does not end it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Generator
from math import ceil
from typing import TYPE_CHECKING, cast

from ..errors import AuthenticationFailed, FaktoryError, InvalidPayload, ProtocolError, UnknownCommand
from ..logs import get_logger
from ..payloads import WorkerIdentity
from ..protocol import resp
from ..protocol.commands import Command, Hello
from ..protocol.connection import ServerConnection
from .keepalive import keep_alive
from .unfinished import SMALL_BYTES

if TYPE_CHECKING:
    from .desk import Place
    from .listener import Server

logger = get_logger(__name__)

READ_AHEAD_BYTES = 64 * 1024
"""What may wait unread behind the command at hand before reading stops."""

WRITE_BUFFER_BYTES = 4 * 1024 * 1024
SLOW_READER_S = 30.0
TURN = 10
"""Commands answered without a broker before the connection rests: bad lines, mostly."""

REST_S = 0.001
"""How long: without it a flood keeps the event loop busy, and the threads that serve others wait for the GIL."""

LAST_LOOK_S = 1.0
"""How long a connection stays half open for its client to read the last reply."""

SENT_LOOK_S = 0.05
"""Between two looks whether a reply that must not get lost has left."""

NOBODY = WorkerIdentity()


class Connection(asyncio.Protocol):
    """One command at a time is at hand; `finish`, `hand_over` or `dismiss` answers it, and the next is read."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.on_gone: Callable[[], None] | None = None
        """Called where the client goes away while its command is at hand; set by who can take that back."""
        self.is_ending = False
        """Whether the client has said that it sends no more."""
        self._protocol = self._new_protocol(server.password, server.max_command_bytes)
        self._transport: asyncio.Transport | None = None
        self._place: Place | None = None  # of a line that takes long to read
        self._is_busy = False  # a command is at hand
        self._is_resting = False  # others have their turn
        self._is_closed = False  # nothing more is written
        self._is_paused = False  # the client does not read
        self._reads_no_more = False
        self._waits_for_turn = False  # to be read, as it sends a long line
        self._on_unsent: list[Callable[[], None]] = []
        self._will_look = False  # whether it was sent
        self._timer: asyncio.TimerHandle | None = None
        self._line_timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        self._address = ""

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

    @property
    def is_gone(self) -> bool:
        """Whether no reply can be written any more."""
        return self._is_closed or self._transport is None

    # --- what the transport tells ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet, or turn away where all places are taken (W8)."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if raw := transport.get_extra_info("socket"):
            keep_alive(raw)
        if not self.server.admits(self):
            self._write(resp.error("too many connections"))
            self.close()
            return
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if isinstance(peer, tuple) else ""
        if self._is_barred():
            self.close()
            return
        self._write(self._protocol.greeting())
        self._arm(self.server.hello_timeout_s, self._no_hello)

    def data_received(self, data: bytes) -> None:
        """Read on, unless a command is at hand."""
        if self._is_closed:
            return  # read only so that the last reply is not lost to a reset
        self._protocol.receive(data)
        if not (self._protocol.is_identified or self._is_resting) and self.server.password:
            self._is_resting = True
            self.server.doorman.ask(self._try_password)
        self._go_on()

    def eof_received(self) -> bool:
        """The client sends no more. What it sent is answered; a FETCH that waits gets no job (W14)."""
        self.is_ending = True
        if self.on_gone:
            self._abandon()
            self.finish(resp.NULL)
        else:
            self._read_on()
        return not self._is_closed  # keep it open for the answers that are left

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._leave()
        if self._timer:
            self._timer.cancel()
        if exc is not None:
            self._unsent()
        self.server.forgets(self)
        self._transport = None

    def pause_writing(self) -> None:
        """The client does not read: nothing more is done for it, and not for ever."""
        self._is_paused = True
        self._await_reading()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._is_paused = False
        if self._is_closed:
            return
        if self._timer:
            self._timer.cancel()
        self._go_on()

    # --- what the server tells ---

    def finish(self, reply: bytes) -> bool:
        """Answer the command at hand and go on to the next. False where the client is gone: nothing was written."""
        self._is_answered()
        if not self._write(reply):
            return False
        if self._protocol.buffered_bytes or self.is_ending or self._reads_no_more:  # seldom: most wait for replies
            self._go_on()
        return True

    def hand_over(self, reply: bytes, *, on_unsent: Callable[[], None]) -> None:
        """Answer with something of value: `on_unsent` is called where the client was gone before it was sent (W14)."""
        self.expects_to_send(on_unsent)
        if not self.finish(reply):
            self._unsent()

    def expects_to_send(self, on_unsent: Callable[[], None]) -> None:
        """What is answered next is of value, as in `hand_over`."""
        self._on_unsent.append(on_unsent)

    def dismiss(self, reply: bytes) -> None:
        """Answer the command at hand, and close: what came after it is not read."""
        self._is_answered()
        self._write(reply)
        self.close()

    def close(self) -> None:
        """Close when what is written has been sent."""
        if not self._is_closed:
            self._part(more_may_come=self._reads_no_more or self._protocol.buffered_bytes > 0)

    def abort(self) -> None:
        """Close at once."""
        self._leave()
        if self._transport:
            self._transport.abort()
        self._unsent()

    # --- reading ---

    def _go_on(self) -> None:
        self._read_on()
        self._regulate()

    def _read_on(self) -> None:
        answered = 0
        while not (self._is_busy or self._is_paused or self._is_closed or self._is_resting):
            try:
                command = self._protocol.begin_command()
            except (InvalidPayload, UnknownCommand) as error:
                self._write(resp.error(str(error), code=error.code))
            except ProtocolError as error:
                if isinstance(error, AuthenticationFailed):
                    self._has_failed()
                self._write(resp.error(str(error), code=error.code))
                self._part(more_may_come=True)
            else:
                if command is None:
                    if self.is_ending:
                        self.close()
                    else:
                        self._await_line()
                    return
                if isinstance(command, Generator):
                    self._is_busy = True
                    self._place = self.server.desk.take(command, self._protocol.line_bytes, self._was_read)
                else:
                    self._carry_out(command)
            self._line_has_ended()
            answered += 1
            if answered == TURN:
                self._is_resting = True
                self.server.loop.call_later(REST_S, self._rested)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Hello) and self._timer:
            self._timer.cancel()
            self._timer = None
        self._is_busy = True
        reply = self.server.carry_out(self, command)
        if reply is not None:
            self._is_answered()
            self._write(reply)

    def _was_read(self, command: Command | FaktoryError | None) -> None:
        """A line that took long was; None where it was given up."""
        if self._is_closed or command is None:
            self._is_answered()
        elif isinstance(command, FaktoryError):
            self.finish(resp.error(str(command), code=command.code))
        else:
            self._carry_out(command)
            self._go_on()

    def _is_answered(self) -> None:
        self._is_busy = False
        self.on_gone = None
        if self._place:
            place, self._place = self._place, None
            place.leave()

    def _try_password(self) -> None:
        """Its turn at the door."""
        if self._is_closed:
            return
        if self._is_barred():  # by others of its address, since it came
            self._part(more_may_come=True)
            return
        self._rested()

    def _rested(self) -> None:
        self._is_resting = False
        self._go_on()

    def _regulate(self) -> None:
        """Stop reading while enough waits that cannot be carried out now, so that memory stays bounded (W6, W7)."""
        must_wait = self._is_busy or self._is_paused or self._is_resting
        is_enough = self._waits_for_turn or (must_wait and self._protocol.buffered_bytes > READ_AHEAD_BYTES)
        is_settled = is_enough is self._reads_no_more or self.is_ending or self._is_closed
        if is_settled or self._transport is None or self._transport.is_closing():
            return
        self._reads_no_more = is_enough
        if is_enough:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _await_line(self) -> None:
        """Give the rest of a line that has begun its time, and its room; HELLO has its own."""
        if self._protocol.buffered_bytes > SMALL_BYTES:
            self.server.unfinished.holds(self._find_no_room, self._protocol.buffered_bytes)
        if self._protocol.buffered_bytes > SMALL_BYTES or self._protocol.is_dropping:
            self._wait_for_turn()
        if self._line_timer is None and self._protocol.buffered_bytes and self._protocol.is_identified:
            self._line_timer = self.server.loop.call_later(self.server.command_timeout_s, self._line_is_late)

    def _wait_for_turn(self) -> None:
        if not self._waits_for_turn and not self._is_closed:
            self._waits_for_turn = True
            self.server.intake.wait(self._has_turn)

    def _has_turn(self) -> None:
        self._waits_for_turn = False
        self._regulate()

    def _line_is_late(self) -> None:
        self._line_timer = None
        if self._is_paused or self._is_resting or self._waits_for_turn:  # it may have come, and was not read
            self._await_line()
        elif not self._is_closed:
            self._write(resp.error(f"expected a whole command within {self.server.command_timeout_s:g} seconds"))
            self._part(more_may_come=True)

    def _find_no_room(self) -> None:
        self._write(resp.error("too many long commands are unfinished; send this one again, or smaller ones"))
        self._part(more_may_come=True)

    def _line_has_ended(self) -> None:
        self.server.unfinished.forgets(self._find_no_room)
        if self._line_timer:
            self._line_timer.cancel()
            self._line_timer = None

    def _no_hello(self) -> None:
        if not self._protocol.is_identified:
            self._write(resp.error(f"expected HELLO within {self.server.hello_timeout_s:g} seconds"))
            self.close()

    def _is_barred(self) -> bool:
        """Whether too many wrong passwords came from its address; then it is told so."""
        wait_s = self.server.guard.wait_s(self._address, now=self.server.loop.time())
        if wait_s:
            self._write(resp.error(f"too many wrong passwords from this address; try again in {ceil(wait_s)} seconds"))
        return wait_s > 0

    def _has_failed(self) -> None:
        """Its password was wrong. One line for each, and no more lines than the guard lets try."""
        logger.warning("wrong password address=%s", self._address)
        self.server.guard.failed(self._address, now=self.server.loop.time())

    # --- writing and closing ---

    def _write(self, reply: bytes) -> bool:
        if self._is_closed or self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(reply)
        if self._on_unsent and not self._will_look:
            self._look_whether_sent()
        return True

    def _look_whether_sent(self) -> None:
        self._will_look = False
        if not self._on_unsent or self._transport is None or self._transport.is_closing():
            return  # where it is being closed, `connection_lost` tells how that went
        if self._unsent_bytes:
            self._will_look = True
            self.server.loop.call_later(SENT_LOOK_S, self._look_whether_sent)
        else:
            self._on_unsent.clear()

    @property
    def _unsent_bytes(self) -> int:
        """What was written and has not left this process."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def _unsent(self) -> None:
        lost, self._on_unsent = self._on_unsent, []
        for on_unsent in lost:
            on_unsent()

    def _leave(self) -> None:
        self._is_closed = True
        line = self._protocol.forget()  # the client may be left a while to read its last reply
        if len(line) > SMALL_BYTES:
            self.server.intake.free(line.clear)
        self._line_has_ended()
        if self._place:
            self._place.give_up()
        self._abandon()

    def _abandon(self) -> None:
        if self.on_gone:
            on_gone, self.on_gone = self.on_gone, None
            on_gone()

    def _part(self, *, more_may_come: bool) -> None:
        """Close; only our half at first where bytes may be unread: a reset would take the last replies along."""
        self._leave()
        if self._transport is None or self._transport.is_closing():
            return
        if self.is_ending or not more_may_come:
            self._hang_up()
            return
        self._transport.write_eof()
        if self._reads_no_more:
            self._transport.resume_reading()
        self._arm(LAST_LOOK_S, self._hang_up)

    def _hang_up(self) -> None:
        if self._transport:
            self._transport.close()
            self._await_reading()

    def _await_reading(self) -> None:
        """Let the client read what is left as long as it reads at all."""
        self._unread_bytes = self._unsent_bytes
        self._arm(SLOW_READER_S, self._look_whether_read)

    def _look_whether_read(self) -> None:
        if self._unsent_bytes < self._unread_bytes:
            self._await_reading()
        else:
            self.abort()

    def _arm(self, seconds: float, act: Callable[[], None]) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self.server.loop.call_later(seconds, act)
