"""Both ends of a connection without a socket: handshake, limits, line ends, and every split of the bytes."""

import json
import re
import sys
import time
from hashlib import sha256

import pytest

from django_faktory.core.payloads import WorkerIdentity
from django_faktory.core.protocol import resp
from django_faktory.core.protocol.commands import AckJob, End, Fetch, Hello, Info
from django_faktory.core.protocol.connection import MAX_HELLO_BYTES, ClientConnection, ServerConnection, hash_password
from django_faktory.core.protocol.limits import LIMITS
from django_faktory.core.protocol.resp import BulkString, Error, Simple
from django_faktory.errors import AuthenticationFailed, FaktoryError, InvalidPayload, ProtocolError, UnknownCommand
from tests.core.protocol.splits import every_split

pytestmark = pytest.mark.core

HELLO = b'HELLO {"v":2}\r\n'
WORKER = WorkerIdentity(wid="4qpc2443vpvai", hostname="localhost", pid=2676, labels=("python",))


def server(*sent, **options):
    connection = ServerConnection(**({"max_command_bytes": 16 * 1024 * 1024} | options))
    for data in sent:
        connection.receive(data)
    return connection


def identified(*sent, **options):
    connection = server(HELLO, **options)
    assert connection.next_command() == Hello()
    for data in sent:
        connection.receive(data)
    return connection


def drain(connection):
    """Return the commands; a refused line appears as its error."""
    found = []
    while True:
        try:
            command = connection.next_command()
        except FaktoryError as error:
            found.append((type(error), str(error)))
        else:
            if command is None:
                return found
            found.append(command)


# --- the password's hash ---


def test_the_password_is_hashed_for_the_requested_number_of_rounds():
    """Source: the test vector of the original server's clients."""
    expected = "6d877f8e5544b1f2598768f817413ab8a357afffa924dedae99eb91472d4ec30"
    assert hash_password("foobar", "55104dc76695721d", 1545) == expected


def test_the_first_hash_is_over_password_and_salt():
    assert hash_password("foobar", "55104dc76695721d", 1) == sha256(b"foobar55104dc76695721d").hexdigest()


# --- greeting and HELLO: W1, W2 ---


def test_the_greeting_has_no_space_in_its_json():
    """W1: exact bytes of the greeting, with and without a password."""
    assert server().greeting() == b'+HI {"v":2}\r\n'
    greeting = server(password="pw", salt="123456789abc", iterations=5000).greeting()
    assert greeting == b'+HI {"v":2,"i":5000,"s":"123456789abc"}\r\n'


def test_a_producer_is_identified_after_its_hello():
    connection = server(HELLO)
    assert not connection.is_identified
    assert connection.identity is None
    assert connection.next_command() == Hello()
    assert connection.is_identified
    assert connection.identity == WorkerIdentity()
    assert connection.next_command() is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"END",
        b'hello {"v":2}',
        b"HELLO",
        b' HELLO {"v":2}',
        b"HELLO nonsense",
        b'HELLO {"v":1}',
        b'HELLO {"v":2,"wid":7}',
        b'HELLO {"v":2,"wid":"\xff"}',
        b"GET / HTTP/1.1",
        b"\x16\x03\x01\x02",
    ],
)
def test_a_first_line_other_than_a_valid_hello_closes_the_connection(line):
    """W2: the error has a message, and later input is dropped."""
    connection = server(line + b"\r\n" + HELLO + b"INFO\r\n")
    with pytest.raises(ProtocolError) as caught:
        connection.next_command()
    assert str(caught.value)
    assert not connection.is_identified
    assert connection.next_command() is None
    connection.receive(HELLO)
    assert connection.next_command() is None
    assert connection.buffered_bytes == 0


def test_a_second_hello_is_an_unknown_command_and_changes_nothing():
    connection = identified(Hello(identity=WORKER).line(), b"INFO\r\n")
    assert drain(connection) == [(UnknownCommand, "unknown command HELLO"), Info()]
    assert connection.identity == WorkerIdentity()


def test_the_correct_password_hash_is_accepted():
    right = hash_password("pässword", "5a17", 4000)
    connection = server(Hello(pwdhash=right).line(), password="pässword", salt="5a17", iterations=4000)
    assert connection.next_command() == Hello(pwdhash=right)
    assert connection.is_identified


@pytest.mark.parametrize(
    "pwdhash",
    [
        "",
        "é",
        "\ud800",
        hash_password("pw", "5a17", 1),
        hash_password("pw", "5a17", 3999),
        hash_password("pw", "5a17", 4000).upper(),
        hash_password("pw", "5a17", 4000) + " ",
    ],
)
def test_any_other_password_hash_is_refused(pwdhash):
    """W2: a hash that is correct but of fewer rounds is refused too."""
    sent = f"HELLO {json.dumps({'v': 2, 'pwdhash': pwdhash})}\r\n".encode()
    connection = server(sent, password="pw", salt="5a17", iterations=4000)
    with pytest.raises(AuthenticationFailed, match="Invalid password"):
        connection.next_command()
    assert not connection.is_identified


def test_a_version_1_hello_does_not_lower_the_number_of_rounds():
    """W2: the original server checks a single round for a client without `v`."""
    weak = hash_password("pw", "5a17", 1)
    for sent in (f'HELLO {{"pwdhash":"{weak}"}}\n', f'HELLO {{"v":1,"pwdhash":"{weak}"}}\n'):
        connection = server(sent.encode(), password="pw", salt="5a17", iterations=4000)
        with pytest.raises(ProtocolError):
            connection.next_command()


def test_an_unrequested_password_hash_is_ignored():
    assert server(Hello(pwdhash="1e44").line()).next_command() == Hello(pwdhash="1e44")


# --- lines: W5 to W7 ---

STREAM = (
    b'HELLO {"v":2,"wid":"w1"}\r\nINFO\nFETCH a b\r\n\r\nNO such\r\nACK {"jid":"12345678"}\n'
    b'ACK {"jid":7}\r\nACK \xff\r\nPUSH {"jid":"\xc3\xa9\xc3\xa92345678"}\r\nEND\r\n'
)
NO_JOBTYPE = (
    "jobs must have a jobtype parameter: jobtype: expected a string of 1 to 255 characters without NUL, "
    "got null or nothing"
)
MEANT = [
    Hello(identity=WorkerIdentity(wid="w1")),
    Info(),
    Fetch(("a", "b")),
    (UnknownCommand, "unknown command "),
    (UnknownCommand, "unknown command NO"),
    AckJob("12345678"),
    (InvalidPayload, 'invalid ACK {"jid":7}: jid: expected a string'),
    (InvalidPayload, "invalid JSON: the line is not UTF-8: invalid start byte at byte 4"),
    (InvalidPayload, NO_JOBTYPE),
    End(),
]


def test_pipelined_commands_are_parsed_in_order_at_every_split():
    """W6: commands are pipelined, with CRLF or bare LF; a refused line leaves the connection usable."""
    for pieces in every_split(STREAM):
        connection, found = server(), []
        for piece in pieces:
            connection.receive(piece)
            found += drain(connection)
        assert found == MEANT
        assert connection.buffered_bytes == 0


def test_the_buffer_is_freed_without_an_extra_next_command_call():
    """Such a client calls `next_command` once for each command, and never for the following one."""
    connection = identified()
    for size in (10, 20_000, 10):
        for _ in range(200):
            connection.receive(b"FETCH " + b" " * size + b"q\r\n")
            assert connection.next_command() == Fetch(("q",))
    assert connection.buffered_bytes == 0
    assert sys.getsizeof(connection._buffer) < 100_000


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("is_split", [False, True])
def test_the_line_length_limit_excludes_the_line_end(end, is_split):
    """W7: 100 bytes pass and 101 do not, however they are split."""

    def commands(length):
        line = b"FETCH " + b"q" * (length - len("FETCH ")) + end
        connection = identified(max_command_bytes=100)
        for piece in [line[at : at + 1] for at in range(len(line))] if is_split else [line]:
            connection.receive(piece)
            yield from drain(connection)

    assert list(commands(100)) == [Fetch(("q" * 94,))]
    assert list(commands(101)) == [(ProtocolError, "command too long: expected at most 100 bytes in a line")]


def test_an_overlong_line_is_refused_early_and_all_later_input_is_dropped():
    """W7: the memory used stays bounded."""
    connection = identified(b"INFO\r\n", b"PUSH " + b"x" * 2000, max_command_bytes=1000)
    assert connection.next_command() == Info()
    with pytest.raises(ProtocolError, match=r"^command too long"):
        connection.next_command()
    for _ in range(100):
        connection.receive(b"x" * 65536 + b"\r\nINFO\r\n")
        assert connection.next_command() is None
        assert connection.buffered_bytes == 0


def test_the_line_limit_before_hello_is_4_kib():
    """W7: 4096 bytes pass and one more does not."""
    fits = b'HELLO {"v":2,"x":"' + b"x" * (MAX_HELLO_BYTES - 20) + b'"}'
    assert len(fits) == MAX_HELLO_BYTES == 4096
    assert server(fits + b"\r\n").next_command() == Hello()
    for too_long in (fits + b"x\r\n", fits + b"xx", b"\x16" * 4097):
        with pytest.raises(ProtocolError, match=r"^command too long"):
            server(too_long).next_command()


def test_a_long_command_may_follow_hello_in_the_same_piece():
    connection = server(HELLO + b"FETCH " + b" " * 100_000 + b"q\n")
    assert drain(connection) == [Hello(), Fetch(("q",))]


def test_a_hundred_thousand_pipelined_commands_are_parsed_in_linear_time():
    connection = identified(b"INFO\r\n" * 100_000)
    began = time.process_time()
    assert len(drain(connection)) == 100_000
    assert time.process_time() - began < 5


def test_a_large_command_in_small_pieces_is_parsed_in_linear_time():
    line = b'FAIL {"jid":"12345678","message":"' + b"m" * (16 * 1024 * 1024 - 40) + b'"}\r\n'
    connection, found = identified(), []
    began = time.process_time()
    for at in range(0, len(line), 4096):
        connection.receive(line[at : at + 4096])
        found += drain(connection)
    assert [len(command.message) for command in found] == [16 * 1024 * 1024 - 40]
    assert time.process_time() - began < 5


@pytest.mark.parametrize("verb", ["ACK", "BATCH", "BEAT", "END", "FETCH", "FLUSH", "HELLO", "INFO", "QUEUE", "TRACK"])
@pytest.mark.parametrize("piece", [4096, 10**9])
def test_an_overlong_command_that_carries_no_job_is_dropped_as_it_arrives(verb, piece):
    """W7: the line is refused at its end, with the limit in the error, and the connection stays open."""
    [most] = [limit.maximum for limit in LIMITS if (limit.verb, limit.field) == (verb, "line")]
    line = verb.encode() + b" " + b"x" * (2 * most)
    connection, found = identified(), []
    bytes_sent = line + b"\r\nINFO\r\n"
    for at in range(0, len(bytes_sent), piece):
        connection.receive(bytes_sent[at : at + piece])
        found += drain(connection)
        assert connection.buffered_bytes <= most + 4096
    assert found == [(InvalidPayload, f"{verb}: line: expected at most {most} bytes, got {len(line)}"), Info()]


def test_a_long_unknown_command_is_dropped_and_an_overlong_line_disconnects():
    """W5, W7: below the connection's limit, such a line is an ordinary error."""
    long = b"x" * 2_000_000
    connection = identified(b"NOPE " + long, b"\r\nINFO\r\n")
    assert drain(connection) == [(UnknownCommand, "unknown command NOPE"), Info()]
    connection = identified(b"INFO " + long, long, max_command_bytes=3_000_000)
    assert drain(connection) == [(ProtocolError, "command too long: expected at most 3000000 bytes in a line")]


# --- the client's side ---


def client(*sent, password=""):
    connection = ClientConnection(identity=WORKER, password=password)
    for data in sent:
        connection.receive(data)
    return connection


def test_a_client_sends_hello_after_the_full_greeting_at_every_split():
    stream = b'+HI {"v":2}\r\n+OK\r\n$-1\r\n-ERR no\r\n$2\r\n{}\r\n'
    for pieces in every_split(stream):
        connection, sent, replies = client(), None, []
        for piece in pieces:
            connection.receive(piece)
            if sent is None:
                sent = connection.hello()
            while sent is not None and (reply := connection.next_reply()) is not None:
                replies.append(reply)
        assert sent == Hello(identity=WORKER).line()
        assert replies == [Simple("OK"), BulkString(None), Error("ERR", "no"), BulkString("{}")]


def test_a_client_sends_the_password_hash_if_requested():
    sent = client(b'+HI {"v":2,"s":"123456789abc","i":1735}\r\n', password="secret").hello()
    assert sent == Hello(identity=WORKER, pwdhash=hash_password("secret", "123456789abc", 1735)).line()


def test_a_client_sends_no_password_hash_unless_requested():
    assert client(b'+HI {"v":2}\r\n', password="secret").hello() == Hello(identity=WORKER).line()


def test_a_client_without_a_required_password_refers_to_faktory_url():
    with pytest.raises(AuthenticationFailed, match="FAKTORY_URL"):
        client(b'+HI {"v":2,"s":"123456789abc","i":1735}\r\n').hello()


@pytest.mark.parametrize(
    "greeting",
    [
        b"+OK\r\n",
        b"+HI\r\n",
        b"+HI {v:2}\r\n",
        b'+HI {"v":3}\r\n',
        b'+HI {"v":true}\r\n',
        b'+HI {"v":"2"}\r\n',
        b'+HELLO {"v":2}\r\n',
        b'$11\r\nHI {"v":2} \r\n',
        b"$-1\r\n",
        b'+HI {"v":2,"s":"ab","i":0}\r\n',
        b'+HI {"v":2,"s":"ab","i":"9"}\r\n',
        b'+HI {"v":2,"s":"ab","i":true}\r\n',
        b'+HI {"v":2,"s":"ab","i":999999999999}\r\n',
        b'+HI {"v":2,"s":7,"i":5000}\r\n',
    ],
)
def test_an_invalid_greeting_is_refused(greeting):
    with pytest.raises(ProtocolError, match="expected"):
        client(greeting, password="secret").hello()


def test_the_client_error_quotes_the_error_of_the_server():
    """W8: the client's error repeats the server's message."""
    with pytest.raises(ProtocolError, match="too many connections"):
        client(b"-ERR too many connections\r\n").hello()


@pytest.mark.parametrize("password", ["", "secret"])
def test_client_and_server_complete_the_handshake(password):
    far = server(password=password, salt="0123456789abcdef", iterations=4000 if password else 0)
    near = client(far.greeting(), password=password)
    far.receive(near.hello())
    assert far.next_command().identity == WORKER
    near.receive(resp.OK)
    assert near.next_reply() == Simple("OK")
    assert not re.search(b"secret", far.greeting())
