"""Serve one client's connection: turn bytes into commands, one at a time and in order, and write the replies.

`Connection` is an asyncio protocol; `handlers` implements the verbs. Limits: W3, W6 to W8, W14. It closes when its
client reads no reply for `Tuning.slow_reader_s`, or begins a line and does not end it within COMMAND_TIMEOUT.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Generator
from math import ceil
from typing import cast

from ..core.logs import get_logger
from ..core.payloads import Reservation, WorkerIdentity
from ..core.protocol import resp
from ..core.protocol.commands import Command, Hello, parse_whole
from ..core.protocol.connection import ServerConnection
from ..errors import AuthenticationFailed, FaktoryError, InvalidPayload, ProtocolError, UnknownCommand
from .buffer_limits import SMALL_BYTES
from .context import ServerContext

logger = get_logger(__name__)

TOO_MANY = resp.error("too many connections")

BUFFERED_BYTES = 64 * 1024
"""Bytes buffered behind the current command before reading from the socket pauses."""

MAX_IN_A_ROW = 10
"""Commands answered in a row before the connection rests: mostly rejected lines, as others wait for the database."""

SENT_CHECK_S = 0.05
"""Interval of the check whether a reply with a job has been passed to the operating system."""


class Connection(asyncio.Protocol):
    """One client. Executes one command at a time; `finish`, `deliver` or `reply_and_close` answers it.

    The next command is parsed only after that. Used on the event loop only.
    """

    def __init__(self, server: ServerContext) -> None:
        self.server = server
        self.on_disconnect: Callable[[], None] | None = None
        """Called if the client disconnects during its command; set by handlers that can undo or cancel their work."""
        self.is_ending = False
        """True once the client has closed its sending half."""
        self.identity = WorkerIdentity()
        """The identity given in HELLO; an empty one before."""
        self._protocol = self._new_protocol(server.password, server.max_command_bytes)
        self._transport: asyncio.Transport | None = None
        # The parsing of a long line, until its command is answered.
        self._steps: Generator[None, None, Command] | None = None
        self._is_busy = False  # a command is being parsed or executed
        self._is_resting = False  # pauses between commands, or waits for its password check
        self._is_closed = False  # nothing is written after this
        self._is_paused = False  # the client reads its replies too slowly
        self._is_reading_paused = False
        self._waits_to_read = False  # it sends a long line, of which others have a part, too
        self._unsent_jobs: list[Reservation] = []
        self._is_check_scheduled = False  # a check of the unsent bytes is scheduled
        # The time limit of HELLO, of a client that reads slowly, or of a half-closed connection.
        self._timer: asyncio.TimerHandle | None = None
        self._line_timer: asyncio.TimerHandle | None = None  # the time limit of an incomplete line
        self._unsent_before = 0  # unsent bytes when `_watch_reader` last looked
        self._address = ""

    @staticmethod
    def _new_protocol(password: str, max_command_bytes: int) -> ServerConnection:
        if not password:
            return ServerConnection(max_command_bytes=max_command_bytes)
        # About 3 ms of work for each check or guess; the range is the original server's (W1).
        return ServerConnection(
            password=password,
            salt=secrets.token_hex(8),
            iterations=4000 + secrets.randbelow(4096),
            max_command_bytes=max_command_bytes,
        )

    @property
    def is_disconnected(self) -> bool:
        """Whether replies can no longer be written."""
        return self._is_closed or self._transport is None

    @property
    def description(self) -> str:
        """Name the client for people: host and process if its HELLO gave them, else its address."""
        host, pid = self.identity.hostname, self.identity.pid
        return (f"{host}:{pid}" if pid else host) or self._address

    # --- callbacks of the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting, or reject a client that has completed its TLS handshake and is one too many (W8)."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self.server.tuning.write_buffer_bytes)
        if not self.server.admit(self):
            self._write(TOO_MANY)
            self.close()
            return
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if isinstance(peer, tuple) else ""
        if self._is_throttled():
            self.close()
            return
        self._write(self._protocol.greeting())
        self._start_timer(self.server.hello_timeout_s, self._on_hello_timeout)

    def data_received(self, data: bytes) -> None:
        """Buffer the bytes and execute the next command, unless one is running."""
        if self._is_closed:
            return  # read and discarded: closing with unread bytes sends a reset, which would drop the last reply
        # Most clients send one command and wait for its reply: then the bytes are one line, and are not buffered.
        if self._protocol.is_waiting and not (self._is_busy or self._is_paused or self._is_resting):
            command = parse_whole(data)
            if command is not None:
                self._execute(command)
                return
        self._protocol.receive(data)
        # The password check takes CPU time: wait for a slot, so that established connections are served in between.
        if not (self._protocol.is_identified or self._is_resting) and self.server.password:
            self._is_resting = True
            self.server.password_checks.wait(self._try_password)
        self._continue()

    def eof_received(self) -> bool:
        """Answer the commands received so far and return whether to stay open; a waiting FETCH gets no job (W14)."""
        self.is_ending = True
        if self._transport is None or not self._transport.can_write_eof():
            self._stop_serving()  # asyncio's TLS cannot stay half open, and sends nothing more
        elif self.on_disconnect:
            self._cancel_command()
            self.finish(resp.NULL)
        else:
            self._execute_buffered()
        return not self._is_closed  # stay open for the remaining replies

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the running command if possible and release jobs that were not sent."""
        self._stop_serving()
        if self._timer:
            self._timer.cancel()
        if exc is not None:
            self._release_unsent()
        self.server.forget(self)
        self._transport = None

    def pause_writing(self) -> None:
        """Execute no further command; abort after `slow_reader_s` without progress of the reader."""
        self._is_paused = True
        self._watch_reader()

    def resume_writing(self) -> None:
        """Execute commands again, as the client has read enough of its replies."""
        self._is_paused = False
        if self._is_closed:
            return
        if self._timer:
            self._timer.cancel()
        self._continue()

    # --- called by the server and the verbs ---

    def finish(self, reply: bytes) -> bool:
        """Answer the current command and continue with the next. Return False if nothing could be written."""
        self._mark_answered()
        if not self._write(reply):
            return False
        # Rarely true: most clients send the next command after the reply.
        if self._protocol.buffered_bytes or self.is_ending or self._is_reading_paused:
            self._continue()
        return True

    def deliver(self, reply: bytes, job: Reservation) -> None:
        """Answer with a job; release it if the client disconnects before the reply was sent (W14)."""
        self._unsent_jobs.append(job)
        if not self.finish(reply):
            self._release_unsent()

    def expect_delivery(self, job: Reservation) -> None:
        """Release this job if the next reply is not sent, like `deliver`."""
        self._unsent_jobs.append(job)

    def reply_and_close(self, reply: bytes) -> None:
        """Answer the current command and close; later commands in the buffer are discarded."""
        self._mark_answered()
        self._write(reply)
        self.close()

    def close(self) -> None:
        """Close after all written replies have been sent."""
        if not self._is_closed:
            self._close_gracefully(has_unread_bytes=self._is_reading_paused or self._protocol.buffered_bytes > 0)

    def abort(self) -> None:
        """Close at once, without sending what is still buffered."""
        self._stop_serving()
        if self._transport:
            self._transport.abort()
        self._release_unsent()

    # --- reading ---

    def _continue(self) -> None:
        self._execute_buffered()
        self._update_reading()

    def _execute_buffered(self) -> None:
        answered = 0
        while not (self._is_busy or self._is_paused or self._is_closed or self._is_resting):
            try:
                command = self._protocol.begin_command()
            except (InvalidPayload, UnknownCommand) as error:
                self._write(resp.refusal(error))
            except ProtocolError as error:
                if isinstance(error, AuthenticationFailed):
                    self._count_wrong_password()
                self._write(resp.refusal(error))
                self._close_gracefully(has_unread_bytes=True)
            else:
                if command is None:
                    if self.is_ending:
                        self.close()
                    else:
                        self._await_line()
                    return
                if isinstance(command, Generator):
                    self._is_busy = True
                    self._steps = command
                    self.server.line_buffer_limit.hold(self._reject_long_line, self._protocol.line_bytes)
                    self.server.long_lines.run(command, self._protocol.line_bytes, self._on_parsed)
                else:
                    self._execute(command)
            self._end_line()
            answered += 1
            if answered == MAX_IN_A_ROW:
                self._is_resting = True
                self.server.rest_queue.wait(self._end_rest)

    def _execute(self, command: Command) -> None:
        if type(command) is Hello:
            self.identity = command.identity
            if self._timer:
                self._timer.cancel()
                self._timer = None
        self._is_busy = True
        reply = self.server.execute(self, command)
        if reply is not None:
            self._mark_answered()
            self._write(reply)

    def _on_parsed(self, command: Command | FaktoryError | None) -> None:
        """Execute the command of a long line once it is parsed; None means that parsing was abandoned."""
        if self._is_closed or command is None:
            self._mark_answered()
        elif isinstance(command, FaktoryError):
            self.finish(resp.refusal(command))
        else:
            self._execute(command)
            self._continue()

    def _mark_answered(self) -> None:
        self._is_busy = False
        self.on_disconnect = None
        if self._steps:
            self._steps = None
            self.server.line_buffer_limit.release(self._reject_long_line)
            self.server.long_lines.release(self._protocol.line_bytes)

    def _try_password(self) -> None:
        """Check the password now: in the turn of this connection."""
        if self._is_closed:
            return
        if self._is_throttled():  # other connections of its address may have failed since it connected
            self._close_gracefully(has_unread_bytes=True)
            return
        self._end_rest()

    def _end_rest(self) -> None:
        self._is_resting = False
        self._continue()

    def _update_reading(self) -> None:
        """Pause or resume reading so that bytes that cannot be executed yet stay bounded (W6, W7)."""
        must_wait = self._is_busy or self._is_paused or self._is_resting
        should_pause = self._waits_to_read or (must_wait and self._protocol.buffered_bytes > BUFFERED_BYTES)
        is_settled = should_pause is self._is_reading_paused or self.is_ending or self._is_closed
        if is_settled or self._transport is None or self._transport.is_closing():
            return
        self._is_reading_paused = should_pause
        if should_pause:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _await_line(self) -> None:
        """Start the timeout and memory accounting of an incomplete line; HELLO has its own timeout."""
        if self._protocol.buffered_bytes > SMALL_BYTES:
            self.server.line_buffer_limit.update(self._reject_long_line, self._protocol.buffered_bytes)
        is_long = self._protocol.buffered_bytes > SMALL_BYTES or self._protocol.is_dropping
        if is_long and not self._waits_to_read and not self._is_closed:
            # Read in turn: sixty connections with 256 KiB each would take 20 ms in one iteration of the event loop.
            self._waits_to_read = True
            self.server.long_lines.wait(self._end_wait_to_read)
        if self._line_timer is None and self._protocol.buffered_bytes and self._protocol.is_identified:
            self._line_timer = self.server.loop.call_later(self.server.command_timeout_s, self._on_line_timeout)

    def _end_wait_to_read(self) -> None:
        self._waits_to_read = False
        self._update_reading()

    def _on_line_timeout(self) -> None:
        self._line_timer = None
        # The end of the line may still be in the socket, since reading was paused.
        if self._is_paused or self._is_resting or self._waits_to_read:
            self._await_line()
        elif not self._is_closed:
            self._write(resp.error(f"expected a whole command within {self.server.command_timeout_s:g} seconds"))
            self._close_gracefully(has_unread_bytes=True)

    def _reject_long_line(self) -> None:
        self._write(resp.error("too many long commands are unfinished; send this one again, or smaller ones"))
        self._close_gracefully(has_unread_bytes=True)

    def _end_line(self) -> None:
        self.server.line_buffer_limit.forget(self._reject_long_line)
        if self._line_timer:
            self._line_timer.cancel()
            self._line_timer = None

    def _on_hello_timeout(self) -> None:
        if not self._protocol.is_identified:
            self._write(resp.error(f"expected HELLO within {self.server.hello_timeout_s:g} seconds"))
            self.close()

    def _is_throttled(self) -> bool:
        """Return whether its address sent too many wrong passwords; if so, write the error."""
        wait_s = self.server.login_throttle.wait_s(self._address, now=self.server.loop.time())
        if wait_s:
            self._write(resp.error(f"too many wrong passwords from this address; try again in {ceil(wait_s)} seconds"))
        return wait_s > 0

    def _count_wrong_password(self) -> None:
        """Count and log a wrong password. The `LoginThrottle` bounds the attempts, and so the log lines."""
        logger.warning("wrong password address=%s", self._address)
        self.server.login_throttle.record_failure(self._address, now=self.server.loop.time())

    # --- writing and closing ---

    def _write(self, reply: bytes) -> bool:
        if self._is_closed or self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(reply)
        if self._unsent_jobs and not self._is_check_scheduled:
            self._check_sent()
        return True

    def _check_sent(self) -> None:
        self._is_check_scheduled = False
        if not self._unsent_jobs or self._transport is None or self._transport.is_closing():
            return  # if it is closing, `connection_lost` reports the outcome
        if self._unsent_bytes:
            self._is_check_scheduled = True
            self.server.loop.call_later(SENT_CHECK_S, self._check_sent)
        else:
            self._unsent_jobs.clear()

    @property
    def _unsent_bytes(self) -> int:
        """Bytes of replies that are still buffered in this process."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def _release_unsent(self) -> None:
        unsent, self._unsent_jobs = self._unsent_jobs, []
        if unsent:
            self.server.release(unsent)

    def _stop_serving(self) -> None:
        self._is_closed = True
        line = self._protocol.forget()  # free it now: a half-open connection lives for a while
        # Freeing 16 MiB takes milliseconds: many such connections that close at once would stall the event loop.
        if len(line) > SMALL_BYTES:
            self.server.long_lines.wait(line.clear)
        self._end_line()
        if self._steps:
            self._steps.close()  # no effect if the line is parsed: then its command is executed
        self._cancel_command()

    def _cancel_command(self) -> None:
        if self.on_disconnect:
            on_disconnect, self.on_disconnect = self.on_disconnect, None
            on_disconnect()

    def _close_gracefully(self, *, has_unread_bytes: bool) -> None:
        """Close; if bytes may be unread, first only our half: a reset would discard the last replies."""
        self._stop_serving()
        if self._transport is None or self._transport.is_closing():
            return
        if self.is_ending or not has_unread_bytes:
            self._close_transport()
            return
        if self._transport.can_write_eof():  # not with TLS: there the client has read the reply when it is closed
            self._transport.write_eof()
        if self._is_reading_paused:
            self._transport.resume_reading()
        self._start_timer(self.server.tuning.half_closed_s, self._close_transport)

    def _close_transport(self) -> None:
        if self._transport:
            self._transport.close()
            self._watch_reader()

    def _watch_reader(self) -> None:
        """Abort if the client makes no progress in reading for `slow_reader_s`; otherwise check again."""
        self._unsent_before = self._unsent_bytes
        self._start_timer(self.server.tuning.slow_reader_s, self._check_read)

    def _check_read(self) -> None:
        if self._unsent_bytes < self._unsent_before:
            self._watch_reader()
        else:
            self.abort()

    def _start_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self.server.loop.call_later(seconds, callback)
