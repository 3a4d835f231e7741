"""Protocol state of a connection: bytes in, commands or replies out, and the order of greeting, HELLO and commands.

`ServerConnection` and `ClientConnection` are the two sides. The caller owns the socket, the clock and the randomness.
Rules: W1 to W7.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Generator
from hashlib import sha256

from ...errors import AuthenticationFailed, InvalidPayload, ProtocolError
from ..json import jsontext
from ..payloads import WorkerIdentity
from .commands import VERSION, Command, Hello, decode_line, parse_checked, parse_hello, parse_long
from .limits import ANY_LINE_BYTES, MAX_HELLO_BYTES, check_line, is_too_long
from .resp import Error, Reply, ReplyReader, Simple

LONG_LINE_BYTES = 64 * 1024
"""A longer line is parsed in its turn, and is not copied out of the buffer."""

VERB_BYTES = 100
"""Bytes of a line that are searched for its verb, which determines the maximum length."""

MIN_ITERATIONS = 1000
"""Lower than any current server requires. A smaller number may come from an attacker that wants a weak hash."""

MAX_ITERATIONS = 1_000_000
"""Bounds the CPU time that a server can make a client spend."""


def hash_password(password: str, salt: str, iterations: int) -> str:
    """Return SHA-256 of password + salt, hashed `iterations` times, in hex (specification, "Required Fields")."""
    digest = (password + salt).encode()
    for _ in range(iterations):
        digest = sha256(digest).digest()
    return digest.hex()


class ServerConnection:
    """Server side. Pass bytes to `receive`, then call `next_command` until it returns None."""

    def __init__(self, *, password: str = "", salt: str = "", iterations: int = 0, max_command_bytes: int) -> None:
        if password and (iterations < MIN_ITERATIONS or not salt):
            raise ValueError(f"a password needs a salt and {MIN_ITERATIONS} iterations or more, got {iterations}")
        self.identity: WorkerIdentity | None = None
        self._password, self._salt, self._iterations = password, salt, iterations
        self._max_command_bytes = max_command_bytes
        self._buffer = bytearray()
        self._start = 0
        self._searched = 0
        self._is_broken = False
        self._refused_start = b""  # the start of a line that is too long; its bytes are dropped up to its end
        self._dropped_bytes = 0
        self.line_bytes = 0
        """Length of the last long line."""

    @property
    def is_identified(self) -> bool:
        """Whether a HELLO has been accepted."""
        return self.identity is not None

    @property
    def buffered_bytes(self) -> int:
        """Received bytes that no command has consumed yet."""
        return len(self._buffer) - self._start

    @property
    def is_waiting(self) -> bool:
        """Whether a HELLO has been accepted and no received byte waits, so that the next bytes begin a line."""
        return self.identity is not None and not (self._buffer or self._refused_start or self._is_broken)

    @property
    def is_dropping(self) -> bool:
        """Whether the bytes of a line that is too long for its verb are being dropped."""
        return bool(self._refused_start)

    def greeting(self) -> bytes:
        """Return the server's first line. Its JSON has no space, because a known client splits the line there (W1)."""
        members: dict[str, object] = {"v": VERSION}
        if self._password:
            members |= {"i": self._iterations, "s": self._salt}
        return f"+HI {jsontext.encode(members)}\r\n".encode()

    def receive(self, data: bytes) -> None:
        """Buffer received bytes; after a ProtocolError they are discarded."""
        if not self._is_broken:
            self._buffer += data

    def next_command(self) -> Command | None:
        """Return the next complete command; None if more bytes are needed.

        Raises InvalidPayload or UnknownCommand for a refused line, after which the connection continues, and
        ProtocolError (such as AuthenticationFailed) if it must be closed after the reply.
        """
        command = self.begin_command()
        while isinstance(command, Generator):
            try:
                next(command)
            except StopIteration as end:
                command = end.value
        return command

    def begin_command(self) -> Command | Generator[None, None, Command] | None:
        """Like `next_command`, but return steps for a long line; the steps raise InvalidPayload only."""
        line = self._next_line()
        if line is None:
            return None
        if self.is_identified:
            # A long line is not decoded here, so that only its bytes are kept while it waits for its turn.
            return parse_long(line) if isinstance(line, bytearray) else parse_checked(decode_line(line))
        try:
            return self._accept_hello(decode_line(line))
        except InvalidPayload as error:
            raise self._give_up(ProtocolError(str(error))) from error

    def _next_line(self) -> bytes | bytearray | None:
        """Return the next whole line without its end, a long one as a bytearray; None if more bytes are needed."""
        if self._is_broken:
            return None
        if self._refused_start:
            self._drop()
            return None
        limit = self._max_command_bytes if self.is_identified else MAX_HELLO_BYTES
        # LF alone ends a line too, as in the original server (W6).
        newline = self._buffer.find(b"\n", max(self._start, self._searched))
        end = len(self._buffer) if newline < 0 else newline
        if end > self._start and self._buffer[end - 1] == ord("\r"):
            end -= 1
        # Checked before the line ends, so that an endless line cannot fill the memory.
        if end - self._start > limit:
            raise self._too_long_error(limit)
        if self.is_identified and end - self._start > ANY_LINE_BYTES:
            start = bytes(self._buffer[self._start : self._start + VERB_BYTES])
            # Too long for its verb: drop its bytes as they arrive. The line is refused at its end, and the connection
            # stays usable.
            if is_too_long(start, end - self._start):
                self._refused_start = start
                self._drop()
                return None
        if newline < 0:
            self._compact()
            self._searched = len(self._buffer)  # search each byte once, also if a line comes in many pieces
            return None
        if end - self._start > LONG_LINE_BYTES:
            return self._hand_over(end, newline)
        with memoryview(self._buffer) as view:  # a slice of the bytearray would be one more copy
            line = bytes(view[self._start : end])
        self._start = self._searched = newline + 1
        if self._start == len(self._buffer):
            self._buffer.clear()
            self._start = self._searched = 0
        return line

    def _hand_over(self, end: int, newline: int) -> bytearray:
        """Return the buffer as the line that it contains: a copy of 16 MiB takes 4 ms."""
        line, self._buffer = self._buffer, self._buffer[newline + 1 :]
        del line[end:]
        del line[: self._start]
        self.line_bytes = len(line)
        self._start = self._searched = 0
        return line

    def _drop(self) -> None:
        """Discard bytes of a refused line. Raises InvalidPayload or UnknownCommand once it has ended."""
        newline = self._buffer.find(b"\n", self._start)
        end = len(self._buffer) if newline < 0 else newline
        if self._buffer[self._start : end].endswith(b"\r"):
            end -= 1  # part of CRLF, or else kept and counted with the next bytes
        self._dropped_bytes += end - self._start
        if self._dropped_bytes > self._max_command_bytes:
            raise self._too_long_error(self._max_command_bytes)
        if newline < 0:
            del self._buffer[:end]
            self._start = self._searched = 0
            return
        start, length = self._refused_start, self._dropped_bytes
        self._start = newline + 1
        self._compact()
        self._refused_start, self._searched, self._dropped_bytes = b"", 0, 0
        check_line(start, length)

    def _too_long_error(self, limit: int) -> ProtocolError:
        return self._give_up(ProtocolError(f"command too long: expected at most {limit} bytes in a line"))

    def _compact(self) -> None:
        """Remove consumed bytes. Done rarely, as each removal moves the rest of the buffer."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0

    def _accept_hello(self, text: str) -> Hello:
        if not text.startswith("HELLO "):
            raise self._give_up(ProtocolError(f"expected HELLO {{…}} as the first command, got {text[:40]}"))
        try:
            hello = parse_hello(text[len("HELLO ") :])
        except InvalidPayload as error:
            raise self._give_up(ProtocolError(str(error))) from error
        if self._password:
            expected = hash_password(self._password, self._salt, self._iterations)
            # A comparison in constant time reveals nothing about the hash.
            if not hmac.compare_digest(expected.encode(), hello.pwdhash.encode("utf-8", "replace")):
                raise self._give_up(AuthenticationFailed("Invalid password"))
        self.identity = hello.identity
        return hello

    def forget(self) -> bytearray:
        """Parse no further command; return the buffered bytes, so that the caller chooses when to free them."""
        self._is_broken = True
        unparsed, self._buffer = self._buffer, bytearray()
        self._start = self._searched = 0
        return unparsed

    def _give_up(self, error: ProtocolError) -> ProtocolError:
        # The following bytes cannot be parsed any more, or come from a client without the right password.
        self.forget()
        return error


class ClientConnection:
    """Client side: waits for HI, sends HELLO, then reads replies."""

    def __init__(self, *, identity: WorkerIdentity, password: str = "") -> None:
        self._identity, self._password = identity, password
        self._replies = ReplyReader()

    def receive(self, data: bytes) -> None:
        """Buffer received bytes until `hello` or `next_reply` reads them."""
        self._replies.feed(data)

    def next_reply(self) -> Reply | None:
        """Return the next complete reply; None if more bytes are needed. Raises ProtocolError for invalid bytes."""
        return self._replies.next()

    def hello(self) -> bytes | None:
        """Return the HELLO line once the server's HI has arrived; None before.

        Raises ProtocolError for a greeting of another protocol or version, or if the server has too many connections,
        and AuthenticationFailed if the server asks for a password and none was given.
        """
        greeting = self._replies.next()
        if greeting is None:
            return None
        if isinstance(greeting, Error):
            raise ProtocolError(f"the server refused the connection: {greeting.message}")
        challenge = _parse_greeting(greeting)
        pwdhash = ""
        if "s" in challenge:
            if not self._password:
                raise AuthenticationFailed(
                    "the server asks for a password; give it in FAKTORY_URL: tcp://:PASSWORD@HOST"
                )
            pwdhash = hash_password(self._password, _salt_of(challenge), _iterations_of(challenge))
        return Hello(identity=self._identity, pwdhash=pwdhash).line()


def _parse_greeting(reply: Reply) -> dict[str, object]:
    if isinstance(reply, Simple) and (match := re.fullmatch(r"HI (\{.*\})", reply.text)):
        try:
            members = jsontext.decode(match[1])
        except InvalidPayload:
            members = {}
        if members.get("v") == VERSION:
            return dict(members)
    raise ProtocolError(f'expected a Faktory server that sends +HI {{"v":{VERSION}}}, got {str(reply)[:80]}')


def _salt_of(challenge: dict[str, object]) -> str:
    salt = challenge["s"]
    if isinstance(salt, str):
        return salt
    raise ProtocolError(f"expected a salt in the greeting, got {ascii(salt)[:40]}")


def _iterations_of(challenge: dict[str, object]) -> int:
    rounds = challenge.get("i", 1)
    # JSON true decodes to a bool, which is an int in Python.
    if isinstance(rounds, int) and not isinstance(rounds, bool) and MIN_ITERATIONS <= rounds <= MAX_ITERATIONS:
        return rounds
    raise ProtocolError(
        f"expected {MIN_ITERATIONS} to {MAX_ITERATIONS} password iterations in the greeting, got {ascii(rounds)[:40]}"
    )
