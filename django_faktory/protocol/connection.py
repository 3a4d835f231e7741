"""A connection's state on either side: bytes in, commands or replies out, and who may say what when.

The caller owns the socket, the clock and the randomness. Rules: W1 to W7.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Generator
from hashlib import sha256

from .. import jsonsteps, jsontext
from ..errors import AuthenticationFailed, InvalidPayload, ProtocolError
from ..jsonsteps import Steps
from ..payloads import WorkerIdentity
from .commands import VERSION, Command, Hello, begin, decoded_line, parse_hello, parse_long
from .limits import ANY_LINE_BYTES, MAX_HELLO_BYTES, check_line, is_too_long
from .resp import Error, Reply, ReplyReader, Simple

LONG_LINE_BYTES = 64 * 1024
"""A line that is not kept twice while it is carried out."""

VERB_BYTES = 100
"""Bytes of a line that are read to find its verb, which limits its length."""

MIN_ITERATIONS = 1000
"""Fewer than any server of today asks for: who asks for them may want a hash that is guessed quickly."""

MAX_ITERATIONS = 1_000_000


def hash_password(password: str, salt: str, iterations: int) -> str:
    """SHA-256 as many times as asked, first over password + salt; in hex. Source: specification, "Required Fields"."""
    digest = (password + salt).encode()
    for _ in range(iterations):
        digest = sha256(digest).digest()
    return digest.hex()


class ServerConnection:
    """The server's side. Feed it with `receive`, then ask `next_command` until it has none."""

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
        self._refused = b""  # the beginning of a line that is too long, whose bytes are dropped until it ends
        self._dropped_bytes = 0
        self.line_bytes = 0
        """How long the last whole line was."""

    @property
    def is_identified(self) -> bool:
        """Whether a HELLO was accepted."""
        return self.identity is not None

    @property
    def buffered_bytes(self) -> int:
        """How much came that no command has used up yet."""
        return len(self._buffer) - self._start

    @property
    def is_dropping(self) -> bool:
        """Whether a line that is too long for its verb has not ended yet."""
        return bool(self._refused)

    def greeting(self) -> bytes:
        """The server's first line; its JSON has no space, since a client in use splits there (W1)."""
        told: dict[str, object] = {"v": VERSION}
        if self._password:
            told |= {"i": self._iterations, "s": self._salt}
        return f"+HI {jsontext.encode(told)}\r\n".encode()

    def receive(self, data: bytes) -> None:
        """Take what came. After a ProtocolError nothing is kept any more."""
        if not self._is_broken:
            self._buffer += data

    def next_command(self) -> Command | None:
        """The next whole command; None where more bytes are needed.

        Raises InvalidPayload or UnknownCommand for a line that is refused while the connection goes on, and
        ProtocolError (AuthenticationFailed among them) where it must be closed after the answer.
        """
        found = self.begin_command()
        return jsonsteps.run(found) if isinstance(found, Generator) else found

    def begin_command(self) -> Command | Steps[Command] | None:
        """The same, but a line that takes long to read comes as steps, which raise InvalidPayload only."""
        line = self._next_line()
        if line is None:
            return None
        if self.is_identified:
            return parse_long(line) or begin(decoded_line(line))
        try:
            return self._hello(decoded_line(line))
        except InvalidPayload as error:
            raise self._broken(ProtocolError(str(error))) from error

    def _next_line(self) -> bytes | None:
        if self._is_broken:
            return None
        if self._refused:
            self._drop()
            return None
        limit = self._max_command_bytes if self.is_identified else MAX_HELLO_BYTES
        newline = self._buffer.find(b"\n", max(self._start, self._searched))
        end = len(self._buffer) if newline < 0 else newline
        if end > self._start and self._buffer[end - 1] == ord("\r"):
            end -= 1
        if end - self._start > limit:
            raise self._too_long(limit)
        if self.is_identified and end - self._start > ANY_LINE_BYTES:
            start = bytes(self._buffer[self._start : self._start + VERB_BYTES])
            if is_too_long(start, end - self._start):
                self._refused = start
                self._drop()
                return None
        if newline < 0:
            self._compact()
            self._searched = len(self._buffer)
            return None
        with memoryview(self._buffer) as view:  # a slice of the buffer would be one more copy
            line = bytes(view[self._start : end])
        self._start = self._searched = newline + 1
        self.line_bytes = len(line)
        if self._start == len(self._buffer):
            self._buffer.clear()
            self._start = self._searched = 0
        elif len(line) > LONG_LINE_BYTES:
            self._compact()
            self._searched = 0
        return line

    def _drop(self) -> None:
        """Keep no bytes of a refused line. Raises InvalidPayload or UnknownCommand when its end has come."""
        newline = self._buffer.find(b"\n", self._start)
        end = len(self._buffer) if newline < 0 else newline
        if self._buffer[self._start : end].endswith(b"\r"):
            end -= 1  # part of the line's end, or counted with the next bytes
        self._dropped_bytes += end - self._start
        if self._dropped_bytes > self._max_command_bytes:
            raise self._too_long(self._max_command_bytes)
        if newline < 0:
            del self._buffer[:end]
            self._start = self._searched = 0
            return
        refused, length = self._refused, self._dropped_bytes
        self._start = newline + 1
        self._compact()
        self._refused, self._searched, self._dropped_bytes = b"", 0, 0
        check_line(refused, length)

    def _too_long(self, limit: int) -> ProtocolError:
        return self._broken(ProtocolError(f"command too long: expected at most {limit} bytes in a line"))

    def _compact(self) -> None:
        """Let go of what was used up: once a buffer of many commands has been read to its end, or after a long one."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0

    def _hello(self, text: str) -> Hello:
        if not text.startswith("HELLO "):
            raise self._broken(ProtocolError(f"expected HELLO {{…}} as the first command, got {text[:40]}"))
        try:
            hello = parse_hello(text[len("HELLO ") :])
        except InvalidPayload as error:
            raise self._broken(ProtocolError(str(error))) from error
        if self._password:
            expected = hash_password(self._password, self._salt, self._iterations)
            if not hmac.compare_digest(expected.encode(), hello.pwdhash.encode("utf-8", "replace")):
                raise self._broken(AuthenticationFailed("Invalid password"))
        self.identity = hello.identity
        return hello

    def forget(self) -> bytearray:
        """Read no command any more and keep no bytes. Returns those that were kept: to free them takes a while."""
        self._is_broken = True
        kept, self._buffer = self._buffer, bytearray()
        self._start = self._searched = 0
        return kept

    def _broken(self, error: ProtocolError) -> ProtocolError:
        self.forget()
        return error


class ClientConnection:
    """The client's side: waits for HI, says HELLO, then reads replies."""

    def __init__(self, *, identity: WorkerIdentity, password: str = "") -> None:
        self._identity, self._password = identity, password
        self._replies = ReplyReader()

    def receive(self, data: bytes) -> None:
        """Take what came."""
        self._replies.feed(data)

    def next_reply(self) -> Reply | None:
        """The next whole reply; None where more bytes are needed. Raises ProtocolError for what is none."""
        return self._replies.next()

    def hello(self) -> bytes | None:
        """The HELLO line, once the server's HI has come; None before.

        Raises ProtocolError for a greeting of another protocol or version, or with no place left for us.
        """
        greeting = self._replies.next()
        if greeting is None:
            return None
        if isinstance(greeting, Error):
            raise ProtocolError(f"the server refused the connection: {greeting.message}")
        asked = _greeting(greeting)
        pwdhash = ""
        if "s" in asked:
            if not self._password:
                raise AuthenticationFailed(
                    "the server asks for a password; give it in FAKTORY_URL: tcp://:PASSWORD@HOST"
                )
            pwdhash = hash_password(self._password, _salt(asked), _iterations(asked))
        return Hello(identity=self._identity, pwdhash=pwdhash).line()


def _greeting(reply: Reply) -> dict[str, object]:
    if isinstance(reply, Simple) and (match := re.fullmatch(r"HI (\{.*\})", reply.text)):
        try:
            told = jsontext.decode(match[1])
        except InvalidPayload:
            told = {}
        if told.get("v") == VERSION:
            return dict(told)
    raise ProtocolError(f'expected a Faktory server that says +HI {{"v":{VERSION}}}, got {str(reply)[:80]}')


def _salt(asked: dict[str, object]) -> str:
    found = asked["s"]
    if isinstance(found, str):
        return found
    raise ProtocolError(f"expected a salt in the greeting, got {ascii(found)[:40]}")


def _iterations(asked: dict[str, object]) -> int:
    found = asked.get("i", 1)
    if isinstance(found, int) and not isinstance(found, bool) and MIN_ITERATIONS <= found <= MAX_ITERATIONS:
        return found
    raise ProtocolError(
        f"expected {MIN_ITERATIONS} to {MAX_ITERATIONS} password iterations in the greeting, got {ascii(found)[:40]}"
    )
