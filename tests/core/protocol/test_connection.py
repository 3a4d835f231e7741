"""Both ends of a connection without a socket: handshake, limits, line ends, and every split of the bytes."""

import json
import re
import sys
import time
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_the_password_is_hashed_as_often_as_asked():
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


def test_a_producer_is_known_after_its_hello():
    connection = server(HELLO)
    assert not connection.is_identified
    assert connection.identity is None
    assert connection.next_command() == Hello()
    assert connection.is_identified
    assert connection.identity == WorkerIdentity()
    assert connection.next_command() is None


def test_a_worker_is_known_by_its_identity():
    connection = server(Hello(identity=WORKER).line())
    assert connection.next_command().identity == WORKER
    assert connection.identity == WORKER


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"PUSH {}",
        b"INFO",
        b"END",
        b'hello {"v":2}',
        b"HELLO",
        b'HELLO{"v":2}',
        b' HELLO {"v":2}',
        b"HELLO nonsense",
        b"HELLO []",
        b'HELLO {"v":1}',
        b'HELLO {"v":3}',
        b'HELLO {"v":2,"wid":7}',
        b'HELLO {"v":2,"wid":"\xff"}',
        b"GET / HTTP/1.1",
        b"\x16\x03\x01\x02",
    ],
)
def test_anything_but_a_good_hello_first_ends_the_connection_with_the_reason(line):
    """W2: the error has a message, and later input is dropped."""
    connection = server(line + b"\r\n" + HELLO + b"INFO\r\n")
    with pytest.raises(ProtocolError) as told:
        connection.next_command()
    assert str(told.value)
    assert not connection.is_identified
    assert connection.next_command() is None
    connection.receive(HELLO)
    assert connection.next_command() is None
    assert connection.buffered_bytes == 0


def test_a_second_hello_is_an_unknown_command_and_changes_nothing():
    connection = identified(Hello(identity=WORKER).line(), b"INFO\r\n")
    assert drain(connection) == [(UnknownCommand, "unknown command HELLO"), Info()]
    assert connection.identity == WorkerIdentity()


def test_the_right_password_is_let_in():
    right = hash_password("pässword", "5a17", 4000)
    connection = server(Hello(pwdhash=right).line(), password="pässword", salt="5a17", iterations=4000)
    assert connection.next_command() == Hello(pwdhash=right)
    assert connection.is_identified


@pytest.mark.parametrize(
    "pwdhash",
    [
        "",
        "pw",
        "é",
        "\ud800",
        hash_password("pw", "5a17", 1),
        hash_password("pw", "5a17", 3999),
        hash_password("PW", "5a17", 4000),
        hash_password("pw", "5a17", 4000).upper(),
        hash_password("pw", "5a17", 4000) + " ",
    ],
)
def test_no_other_hash_is_let_in(pwdhash):
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


def test_a_hash_where_none_is_asked_does_no_harm():
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


def test_commands_come_out_in_order_at_every_split():
    """W6: commands are pipelined, with CRLF or bare LF; a refused line leaves the connection usable."""
    for pieces in every_split(STREAM):
        connection, found = server(), []
        for piece in pieces:
            connection.receive(piece)
            found += drain(connection)
        assert found == MEANT
        assert connection.buffered_bytes == 0


def test_what_was_read_is_let_go_of_by_who_asks_for_no_more_than_came():
    """Such a client calls `next_command` once for each command, and never for the following one."""
    connection = identified()
    for size in (10, 20_000, 10):
        for _ in range(200):
            connection.receive(b"FETCH " + b" " * size + b"q\r\n")
            assert connection.next_command() == Fetch(("q",))
    assert connection.buffered_bytes == 0
    assert sys.getsizeof(connection._buffer) < 100_000


def test_commands_may_be_taken_one_at_a_time_while_more_come():
    connection = identified(b"INFO\r\nFETCH a\r\nEN")
    assert connection.next_command() == Info()
    assert connection.buffered_bytes == len("FETCH a\r\nEN")
    connection.receive(b"D\r\nINFO\r\n")
    assert [connection.next_command() for _ in range(4)] == [Fetch(("a",)), End(), Info(), None]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("is_split", [False, True])
def test_the_limit_is_the_longest_line_without_its_end(end, is_split):
    """W7: 100 bytes pass and 101 do not, however they are split."""

    def commands(length):
        line = b"FETCH " + b"q" * (length - len("FETCH ")) + end
        connection = identified(max_command_bytes=100)
        for piece in [line[at : at + 1] for at in range(len(line))] if is_split else [line]:
            connection.receive(piece)
            yield from drain(connection)

    assert list(commands(100)) == [Fetch(("q" * 94,))]
    assert list(commands(101)) == [(ProtocolError, "command too long: expected at most 100 bytes in a line")]


def test_a_line_that_is_too_long_is_refused_before_it_ends_and_all_that_follows_is_dropped():
    """W7: the memory used stays bounded."""
    connection = identified(b"INFO\r\n", b"PUSH " + b"x" * 2000, max_command_bytes=1000)
    assert connection.next_command() == Info()
    with pytest.raises(ProtocolError, match=r"^command too long"):
        connection.next_command()
    for _ in range(100):
        connection.receive(b"x" * 65536 + b"\r\nINFO\r\n")
        assert connection.next_command() is None
        assert connection.buffered_bytes == 0


def test_before_hello_the_limit_is_4_kib():
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


def test_a_hundred_thousand_commands_in_one_piece_take_time_in_proportion():
    connection = identified(b"INFO\r\n" * 100_000)
    began = time.process_time()
    assert len(drain(connection)) == 100_000
    assert time.process_time() - began < 5


def test_a_large_command_in_small_pieces_takes_time_in_proportion():
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
def test_a_long_line_of_a_verb_that_brings_no_job_is_dropped_as_it_comes(verb, piece):
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


def test_a_long_line_of_an_unknown_verb_is_dropped_and_one_over_the_limit_ends_the_connection():
    """W5, W7: below the connection's limit, such a line is an ordinary error."""
    long = b"x" * 2_000_000
    connection = identified(b"NOPE " + long, b"\r\nINFO\r\n")
    assert drain(connection) == [(UnknownCommand, "unknown command NOPE"), Info()]
    connection = identified(b"INFO " + long, long, max_command_bytes=3_000_000)
    assert drain(connection) == [(ProtocolError, "command too long: expected at most 3000000 bytes in a line")]


@given(st.lists(st.binary(max_size=60)), st.booleans())
def test_no_bytes_break_the_server_side(pieces, is_known):
    connection = identified(max_command_bytes=100) if is_known else server(max_command_bytes=100)
    for piece in pieces:
        connection.receive(piece)
        drain(connection)
        assert connection.buffered_bytes <= 4097


# --- the client's side ---


def client(*sent, password=""):
    connection = ClientConnection(identity=WORKER, password=password)
    for data in sent:
        connection.receive(data)
    return connection


def test_a_client_says_hello_when_the_greeting_has_come_at_every_split():
    stream = b'+HI {"v":2}\r\n+OK\r\n$-1\r\n-ERR no\r\n$2\r\n{}\r\n'
    for pieces in every_split(stream):
        connection, said, replies = client(), None, []
        for piece in pieces:
            connection.receive(piece)
            if said is None:
                said = connection.hello()
            while said is not None and (reply := connection.next_reply()) is not None:
                replies.append(reply)
        assert said == Hello(identity=WORKER).line()
        assert replies == [Simple("OK"), BulkString(None), Error("ERR", "no"), BulkString("{}")]


def test_a_client_proves_its_password():
    said = client(b'+HI {"v":2,"s":"123456789abc","i":1735}\r\n', password="secret").hello()
    assert said == Hello(identity=WORKER, pwdhash=hash_password("secret", "123456789abc", 1735)).line()


def test_a_client_keeps_its_password_to_itself_where_none_is_asked():
    assert client(b'+HI {"v":2}\r\n', password="secret").hello() == Hello(identity=WORKER).line()


def test_a_client_without_the_password_asked_for_says_where_to_put_it():
    with pytest.raises(AuthenticationFailed, match="FAKTORY_URL"):
        client(b'+HI {"v":2,"s":"123456789abc","i":1735}\r\n').hello()


@pytest.mark.parametrize(
    "greeting",
    [
        b"+OK\r\n",
        b"+HI\r\n",
        b"+HI 2\r\n",
        b"+HI {v:2}\r\n",
        b"+HI {}\r\n",
        b'+HI {"v":1}\r\n',
        b'+HI {"v":3}\r\n',
        b'+HI {"v":true}\r\n',
        b'+HI {"v":"2"}\r\n',
        b'+HELLO {"v":2}\r\n',
        b'$11\r\nHI {"v":2} \r\n',
        b"$-1\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b'+HI {"v":2,"s":"ab","i":0}\r\n',
        b'+HI {"v":2,"s":"ab","i":-1}\r\n',
        b'+HI {"v":2,"s":"ab","i":"9"}\r\n',
        b'+HI {"v":2,"s":"ab","i":true}\r\n',
        b'+HI {"v":2,"s":"ab","i":1e3}\r\n',
        b'+HI {"v":2,"s":"ab","i":999999999999}\r\n',
        b'+HI {"v":2,"s":7,"i":5000}\r\n',
    ],
)
def test_another_greeting_is_refused(greeting):
    with pytest.raises(ProtocolError, match="expected"):
        client(greeting, password="secret").hello()


def test_a_server_that_turns_us_away_is_quoted():
    """W8: the client's error repeats the server's message."""
    with pytest.raises(ProtocolError, match="too many connections"):
        client(b"-ERR too many connections\r\n").hello()


@pytest.mark.parametrize("password", ["", "secret"])
def test_both_sides_understand_each_other(password):
    far = server(password=password, salt="0123456789abcdef", iterations=4000 if password else 0)
    near = client(far.greeting(), password=password)
    far.receive(near.hello())
    assert far.next_command().identity == WORKER
    near.receive(resp.OK)
    assert near.next_reply() == Simple("OK")
    assert not re.search(b"secret", far.greeting())
