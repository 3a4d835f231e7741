"""Invariants of the server side of a connection for any input bytes. Used by Hypothesis and by the fuzzer."""

import re

from django_faktory.core.payloads import JobPayload
from django_faktory.core.protocol import resp
from django_faktory.core.protocol.commands import Command, Hello, PushBulk
from django_faktory.core.protocol.connection import MAX_HELLO_BYTES, ServerConnection
from django_faktory.core.protocol.resp import Error, ReplyReader
from django_faktory.errors import InvalidPayload, ProtocolError, UnknownCommand

HELLO = b'HELLO {"v":2}\r\n'
REPLY = re.compile("-[A-Z]+ [^\x00-\x1f\x7f-\x9f\u2028\u2029]*\r\n")


def check(pieces, *, limit=16 * 1024 * 1024, password=""):
    """Feed these pieces to a server, check the invariants, and return the outcome of each line."""
    connection = ServerConnection(
        password=password, salt="5a17", iterations=1000 if password else 0, max_command_bytes=limit
    )
    outcomes, stream, is_broken = [], b"", False
    for piece in pieces:
        connection.receive(piece)
        stream += piece
        for outcome in _outcomes(connection):
            outcomes.append(outcome)
            is_broken = is_broken or (isinstance(outcome, tuple) and outcome[0] == "closed")
        most = limit if connection.is_identified else MAX_HELLO_BYTES
        assert connection.buffered_bytes <= (0 if is_broken else most + 1), "more is kept than a line and its CR"
    if not is_broken:
        assert len(outcomes) == stream.count(b"\n"), "one answer to each line, and none to half a line"
    return outcomes


def _outcomes(connection):
    while True:
        try:
            command = connection.next_command()
        except (InvalidPayload, UnknownCommand) as error:
            yield ("refused", _reply(error))
        except ProtocolError as error:
            yield ("closed", _reply(error))
            assert connection.next_command() is None
            return
        else:
            if command is None:
                return
            assert isinstance(command, Command)
            _check_meaning(connection, command)
            yield command


def _reply(error):
    """Return the reply to a refused line: one line of UTF-8, without line breaks or control characters inside."""
    sent = resp.error(str(error), code=error.code)
    assert REPLY.fullmatch(sent.decode()), sent
    assert len(sent.decode()) <= len("-ERR \r\n") + resp.MAX_LINE
    reader = ReplyReader()
    reader.feed(sent)
    assert isinstance(reader.next(), Error)
    assert reader.next() is None
    return sent


def _check_meaning(connection, command):
    """Check that a parsed command, written as a line and parsed again, is equal."""
    if isinstance(command, Hello):
        assert connection.identity == command.identity
        return
    if isinstance(command, PushBulk):
        for job in command.jobs:
            assert isinstance(job, JobPayload) or _reply(job)
        command = PushBulk([job for job in command.jobs if isinstance(job, JobPayload)])
    again = ServerConnection(max_command_bytes=1 << 30)
    again.receive(HELLO + command.line())
    assert isinstance(again.next_command(), Hello)
    reparsed = again.next_command()
    assert reparsed == command, (reparsed, command)
    assert again.buffered_bytes == 0
