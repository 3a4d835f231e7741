"""Greeting, HELLO, password, deadlines, connection limit and END, over real sockets. Rules: W1 to W8."""

import json
import re

import pytest
from django.test import override_settings

from django_faktory.core.protocol.connection import hash_password
from django_faktory.models import WorkerProcess
from tests.server.raw import RawClient, over_both, push, worker

pytestmark = pytest.mark.once


@pytest.fixture
def raw(server):
    """Return a function that opens clients without sending HELLO; all are closed at the end of the test."""
    clients = []

    def open_client(address=None):
        clients.append(RawClient(address or server.address))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


def test_the_greeting_has_no_space_in_its_json(raw):
    """W1: the greeting is compact JSON."""
    assert raw().reply() == b'+HI {"v":2}'


def test_the_greeting_contains_salt_and_iterations_if_a_password_is_set(serve, raw):
    """W1: salt and iterations are random for each connection."""
    address = serve(password="secret").address
    asked = [json.loads(raw(address).reply().removeprefix(b"+HI ")) for _ in range(3)]
    assert all(set(one) == {"v", "i", "s"} for one in asked)
    assert all(4000 <= one["i"] <= 8095 and re.fullmatch("[0-9a-f]{16}", one["s"]) for one in asked)
    assert len({one["s"] for one in asked}) == 3


def test_the_correct_password_hash_is_accepted(serve, raw):
    client = raw(serve(password="secret").address)
    asked = json.loads(client.reply().removeprefix(b"+HI "))
    pwdhash = hash_password("secret", asked["s"], asked["i"])
    assert client.ask(f'HELLO {{"v":2,"pwdhash":"{pwdhash}"}}') == b"+OK"


@pytest.mark.parametrize("iterations", [1, None])
def test_a_wrong_or_weaker_hash_is_refused_and_the_connection_closed(serve, raw, iterations):
    """W2: a wrong password closes the connection."""
    client = raw(serve(password="secret").address)
    asked = json.loads(client.reply().removeprefix(b"+HI "))
    pwdhash = hash_password("secret", asked["s"], iterations) if iterations else ""
    assert client.ask(json.dumps({"v": 2, "pwdhash": pwdhash}).join(["HELLO ", ""])) == b"-ERR Invalid password"
    assert client.is_closed()


@over_both
@pytest.mark.parametrize(
    "line",
    [
        b"INFO",
        b"",
        b"HELLO",
        b'hello {"v":2}',
        b"HELLO {",
        b"HELLO []",
        b'HELLO {"v":3}',
        b'HELLO {"v":"2"}',
        b'HELLO {"v":2,"wid":5}',
        b'HELLO {"v":2,"labels":"x"}',
        b"HELLO \xff",
        b"x" * 5000,
    ],
)
def test_an_invalid_first_command_gets_one_error_line_and_closes_the_connection(raw, line):
    """W2, W7: one error line, then the connection is closed."""
    client = raw()
    client.reply()
    client.send(line)
    answer = client.reply()
    assert answer.startswith(b"-ERR ")
    assert b"\n" not in answer
    assert client.is_closed()


@pytest.mark.parametrize("hello", ["HELLO {}", 'HELLO {"v":2}', 'HELLO {"v":2,"unknown":[1]}'])
def test_a_hello_without_a_version_is_accepted_as_version_2(raw, hello):
    """W2: version 2 is the default."""
    client = raw()
    client.reply()
    assert client.ask(hello) == b"+OK"


@over_both
def test_a_client_without_hello_is_closed_after_the_deadline(serve, raw):
    """W3: HELLO_TIMEOUT limits the wait for HELLO."""
    with override_settings(FAKTORY={"HELLO_TIMEOUT": 0.1}):
        client = raw(serve().address)
    client.reply()
    assert client.reply() == b"-ERR expected HELLO within 0.1 seconds"
    assert client.is_closed()


def test_a_client_may_idle_after_a_timely_hello(serve, raw):
    """W3: the deadline ends with HELLO."""
    with override_settings(FAKTORY={"HELLO_TIMEOUT": 0.1}):
        server = serve()
    idle, silent = raw(server.address), raw(server.address)
    idle.reply()
    assert idle.ask("HELLO {}") == b"+OK"
    silent.reply()
    assert silent.reply().startswith(b"-ERR")
    assert idle.ask("INFO")


def test_a_worker_is_registered_once_with_the_details_of_its_first_hello(connect):
    connect(**worker("wid-a", hostname="h", pid=7, labels=["x", "y"]))
    connect(**worker("wid-a", hostname="other"))
    row = WorkerProcess.objects.get()
    assert (row.wid, row.hostname, row.pid, row.labels, row.beat_at) == ("wid-a", "h", 7, ["x", "y"], None)


@over_both
def test_a_connection_over_the_limit_gets_an_error_and_no_greeting(serve, raw):
    """W8: the error line replaces the greeting."""
    with override_settings(FAKTORY={"MAX_CONNECTIONS": 1}):
        server = serve()
    first = raw(server.address)
    first.reply()
    second = raw(server.address)
    assert second.reply() == b"-ERR too many connections"
    assert second.is_closed()
    assert first.ask("HELLO {}") == b"+OK"


@over_both
def test_end_is_answered_and_later_input_is_ignored(connect):
    """W4: END is the last command of a connection."""
    client = connect()
    client.send("END\r\n" + push(jid="after-the-end"))
    assert client.reply() == b"+OK"
    assert client.is_closed()


@over_both
@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (b"NOPE", b"-ERR unknown command NOPE"),
        (b"", b"-ERR unknown command "),
        (b"push {}", b"-ERR unknown command push"),
        (b'HELLO {"v":2}', b"-ERR unknown command HELLO"),
        (b"N\x00\x1bPE", b"-ERR unknown command N\\x00\\x1bPE"),
    ],
)
def test_an_unknown_verb_is_reported_and_the_connection_stays_open(connect, line, answer):
    """W5: an unknown verb does not close the connection."""
    client = connect()
    assert client.ask(line) == answer
    assert client.ask("INFO")


def test_a_bare_line_feed_ends_a_line_and_pipelined_commands_are_answered_in_order(connect):
    """W6: LF and CRLF both end a line."""
    client = connect(**worker())
    client.send(f'{push(jid="pipelined")}\nFETCH default\r\nACK {{"jid":"pipelined"}}\nNOPE', end="\n")
    assert client.reply() == b"+OK"
    assert json.loads(client.reply())["jid"] == "pipelined"
    assert client.reply() == b"+OK"
    assert client.reply() == b"-ERR unknown command NOPE"


def test_many_pipelined_commands_are_all_answered(connect):
    """W6: the client sends far more than the server reads ahead of the current command."""
    client = connect()
    client.send("\r\n".join(push(jid=f"flood-{n:05d}", args=["x" * 200]) for n in range(1000)))
    assert [client.reply() for _ in range(1000)] == [b"+OK"] * 1000


@over_both
def test_a_line_too_long_is_refused_before_it_ends(serve):
    """W7: MAX_COMMAND_BYTES applies to incomplete lines too."""
    with override_settings(FAKTORY={"MAX_COMMAND_BYTES": 10_000}):
        client = RawClient.identified(serve().address)
    client.send("PUSH " + "x" * 20_000, end="")
    assert client.reply().startswith(b"-ERR command too long")
    client.close()


@pytest.mark.parametrize(
    "job",
    [
        b'{"jid":"abcdefgh","jobtype":"t","args":[NaN]}',
        b'{"jid":"abcdefgh","jobtype":"t","args":[],"args":[1]}',
        b'{"jid":"abcdefgh","jobtype":"t","args":["\xff"]}',
        b'{"jid":"abcdefgh","jobtype":"t","args":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"jid":"abcdefgh","jobtype":"t","args":[}',
        b"[]",
        b"",
    ],
)
def test_broken_json_is_refused_and_nothing_is_stored(connect, job):
    """W7: the connection stays open after broken JSON."""
    client = connect()
    assert client.ask(b"PUSH " + job).startswith(b"-ERR invalid JSON: ")
    assert json.loads(client.ask("INFO"))["faktory"]["total_enqueued"] == 0


def hello(client, password):
    asked = json.loads(client.reply()[4:])
    pwdhash = hash_password(password, asked["s"], asked["i"])
    return f'HELLO {{"v":2,"pwdhash":"{pwdhash}"}}\r\nINFO\r\n'


def test_clients_that_log_in_together_are_accepted_with_their_next_commands(serve, settings):
    """The HELLO arrives in two pieces, because each piece may wait in the queue separately."""
    settings.FAKTORY = {"HELLO_TIMEOUT": 60}  # on a busy machine thirty checks take longer than the default of 5 s
    server = serve(password="s3cret")
    clients = [RawClient(server.address) for _ in range(30)]
    lines = [hello(client, "s3cret") for client in clients]
    for client, line in zip(clients, lines, strict=True):
        client.send(line[:25], end="")
    for client, line in zip(clients, lines, strict=True):
        client.send(line[25:], end="")
    for client in clients:
        assert client.reply() == b"+OK"
        assert json.loads(client.reply())["server"]
        client.close()


def test_clients_that_disconnect_in_the_queue_do_not_block_new_ones(serve):
    server = serve(password="s3cret")
    gone = [RawClient(server.address) for _ in range(30)]
    for client in gone:
        client.send(hello(client, "wrong"))
        client.close()
    # Wrong guesses may have blocked this address for a moment; the server then reports an error and does not stay
    # silent.
    client = RawClient(server.address)
    assert client.reply().startswith((b"+HI", b"-ERR too many wrong passwords"))
    client.close()
