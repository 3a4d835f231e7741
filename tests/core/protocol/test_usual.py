"""Tests of the parser of usual lines: it agrees with the general parser about every line that it accepts."""

import random

import pytest

from django_faktory.core.protocol.commands import AckJob, Fetch, Push
from django_faktory.core.protocol.connection import ServerConnection
from django_faktory.core.protocol.usual import USUAL_BYTES, parse_usual
from django_faktory.errors import FaktoryError
from tests.core.protocol import lines
from tests.examples import examples

pytestmark = pytest.mark.core


def general(line):
    """Return the command that the general parser returns for a line with its end, or its error."""
    connection = ServerConnection(max_command_bytes=1024 * 1024)
    connection.receive(b'HELLO {"v":2}\r\n')
    connection.next_command()
    connection.receive(line)
    try:
        return connection.next_command()
    except FaktoryError as error:
        return error


def test_each_accepted_line_is_the_command_of_the_general_parser():
    source, accepted = random.Random(7), 0
    for number in range(examples(50_000)):
        jid = f"jid-{number:08}"
        line = source.choice([lines.push(source, jid), lines.ack(source, jid), lines.fetch(source)]).encode()
        if source.random() < 0.2:
            line = lines.mutated(source, line)
        line += source.choice([b"\r\n", b"\r\n", b"\n", b"\r\r\n"])
        command = parse_usual(line)
        if command is not None:
            accepted += 1
            assert command == general(line), line
    assert accepted > examples(50_000) / 5, "most random lines would be far from the usual shape"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'PUSH {"jid":"12345678","jobtype":"t","args":[1],"queue":"q","retry":1}\r\n', Push),
        (b'PUSH {"jid": "12345678", "jobtype": "t", "args": [], "queue": "q", "retry": 1}\n', Push),
        (
            b'PUSH {"jid":"12345678","jobtype":"t","args":[],"queue":"q","retry":1,"priority":9,"custom":{}}\n',
            Push,
        ),
        (b"FETCH a b c\r\n", Fetch),
        (b'ACK {"jid":"12345678"}\r\n', AckJob),
    ],
)
def test_the_usual_lines_of_clients_are_accepted(line, kind):
    assert isinstance(parse_usual(line), kind)


@pytest.mark.parametrize(
    "line",
    [
        b"FETCH a\r\nFETCH b\r\n",
        b"FETCH a",
        b"",
        b"END\r\n",
        b'PUSH {"jid":"12345678","jobtype":"t","args":[1],"queue":"q","retry":1,"custom":{"track":1}}\r\n',
        b'PUSH {"jid":"12345678","jid":"12345678","jobtype":"t","args":[1],"queue":"q","retry":1}\r\n',
        rb'PUSH {"jid":"12345678","\u006aid":"12345678","jobtype":"t","args":[1],"queue":"q","retry":1}' + b"\r\n",
        b'PUSH {"jid":"12345678","jobtype":"t","args":["%s"],"queue":"q","retry":1}\r\n' % (b"a" * USUAL_BYTES),
    ],
)
def test_any_other_line_is_left_to_the_general_parser(line):
    assert parse_usual(line) is None
