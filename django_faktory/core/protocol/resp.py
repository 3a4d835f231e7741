"""Write and read replies: the part of RESP2 that the protocol uses (simple strings, errors, bulk strings).

Control characters are escaped in every one-line reply, so that contents from clients cannot split it in two.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from ...errors import FaktoryError, ProtocolError

OK = b"+OK\r\n"
NULL = b"$-1\r\n"
MAX_LINE = 500
"""Characters of text in a one-line reply, enough for an error message; longer texts are cut."""

MAX_REPLY_BYTES = 512 * 1024 * 1024
MAX_REPLY_LINE_BYTES = 1024 * 1024
# `$` and the digits of MAX_REPLY_BYTES fit well.
_MAX_BULK_HEAD_BYTES = 16
# Control characters (C0, DEL, C1), the line separators of Unicode, and lone surrogates, which UTF-8 cannot encode.
_unsafe = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Simple(msgspec.Struct, frozen=True):
    """Simple string, on the wire `+text`."""

    text: str


class Error(msgspec.Struct, frozen=True):
    """Error reply, on the wire `-CODE message`."""

    code: str
    message: str


class BulkString(msgspec.Struct, frozen=True):
    """Bulk string, on the wire `$length` and the text; None is the null reply."""

    text: str | None


Reply = Simple | Error | BulkString


def simple(text: str) -> bytes:
    """Return `+text` as one line: control characters are escaped, a long text is cut."""
    return b"+%b\r\n" % _one_line(text).encode()


def error(message: str, *, code: str = "ERR") -> bytes:
    """Return `-CODE message` as one line: control characters are escaped, a long message is cut."""
    return b"-%b %b\r\n" % (code.encode(), _one_line(message).encode())


def refusal(reason: FaktoryError) -> bytes:
    """Return an exception as an error reply, with its code."""
    return error(str(reason), code=reason.code)


def outcome(result: object, encode: Callable[[Any], bytes] | None = None) -> bytes:
    """Return the reply to the result of a command, OK by default; if it is an exception, the error reply."""
    if isinstance(result, FaktoryError):
        return refusal(result)
    return encode(result) if encode else OK


def bulk(text: str | None) -> bytes:
    """Return a bulk string with a text of any length and content; None gives the null reply."""
    if text is None:
        return NULL
    # Lone surrogates become `?`: a reply must not fail for the contents of a job.
    raw = text.encode("utf-8", "replace")
    return b"$%d\r\n%b\r\n" % (len(raw), raw)


def _one_line(text: str) -> str:
    escaped = _unsafe.sub(lambda match: ascii(match[0])[1:-1], text[: MAX_LINE + 1])
    return escaped if len(escaped) <= MAX_LINE else f"{escaped[: MAX_LINE - 1]}…"


class ReplyReader:
    """Parse replies from bytes that arrive in any pieces. Raises ProtocolError for invalid bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> None:
        """Buffer received bytes until `next` reads them."""
        self._buffer += data

    def next(self) -> Reply | None:
        """Return the next complete reply; None if more bytes are needed."""
        if self._buffer and self._buffer[0] not in b"+-$":  # reject at once: another protocol may never send a line end
            raise ProtocolError(f"expected a reply that begins with +, - or $, got {bytes(self._buffer[:20])!a}")
        end = self._buffer.find(b"\r\n", self._searched)
        limit = _MAX_BULK_HEAD_BYTES if self._buffer.startswith(b"$") else MAX_REPLY_LINE_BYTES
        if (len(self._buffer) if end < 0 else end) > limit:
            raise ProtocolError(f"expected a line end within {limit} bytes of a reply")
        if end < 0:
            self._searched = max(len(self._buffer) - 1, 0)  # the last byte may be the CR of a CRLF
            return None
        line = bytes(self._buffer[1:end])
        if self._buffer[0] == ord("$"):
            return self._bulk(line, end + 2)
        text = _text(line)
        if self._buffer[0] == ord("+"):
            reply: Reply = Simple(text)
        else:
            code, _, message = text.partition(" ")
            reply = Error(code, message)
        self._drop(end + 2)
        return reply

    def _bulk(self, line: bytes, start: int) -> Reply | None:
        if line == b"-1":
            self._drop(start)
            return BulkString(None)
        if not line.isdigit() or int(line) > MAX_REPLY_BYTES:
            raise ProtocolError(f"expected the length of a bulk reply, got {line[:40]!a}")
        end = start + int(line)
        if len(self._buffer) < end + 2:
            self._searched = 0  # the next call finds the head again quickly; the body is never searched
            return None
        if self._buffer[end : end + 2] != b"\r\n":
            raise ProtocolError("expected CRLF after a bulk reply")
        text = _text(bytes(self._buffer[start:end]))
        self._drop(end + 2)
        return BulkString(text)

    def _drop(self, count: int) -> None:
        del self._buffer[:count]
        self._searched = 0


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"expected a reply in UTF-8: {error}") from error
