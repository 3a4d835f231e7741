"""Long lines are parsed in turn, and the memory for long lines is capped. Rules: W6, W7, W12."""

import json
import socket
import struct
from contextlib import suppress

import pytest
from django.test import override_settings

from django_faktory.models import Job
from tests.server.raw import RawClient, push
from tests.server.test_limits import Gated
from tests.waiting import wait_until

pytestmark = pytest.mark.once


def pushb(count, name="many", **fields):
    jobs = ({"jid": f"{name}-{number:06d}", "jobtype": "noop", "args": []} | fields for number in range(count))
    return f"PUSHB [{','.join(map(json.dumps, jobs))}]"


def has_answer(client):
    """Return True if a reply, or the beginning of one, has arrived."""
    client.socket.setblocking(False)
    try:
        return bool(client.stream.peek(1))
    finally:
        client.socket.settimeout(60)


SLOW = pushb(1500, custom={"unique_for": 60}, args=[{"a": 1}] * 1000)
"""A line whose parsing takes a second or more, as each job's arguments are compared."""


@pytest.mark.slow
def test_other_clients_are_answered_while_a_long_line_is_parsed(connect):
    big, good = connect(), connect()
    big.send(SLOW)
    answered = 0
    while not has_answer(big):
        assert good.ask("NOPE") == b"-ERR unknown command NOPE"
        answered += 1
    assert answered > 10
    assert big.reply() is not None


def test_commands_after_a_large_pushb_wait_until_it_is_stored(connect):
    client = connect()
    client.send(pushb(5000))
    client.send("NOPE")
    client.send(push(jid="after-it"))
    assert [client.reply() for _ in range(3)] == [b"{}", b"-ERR unknown command NOPE", b"+OK"]
    assert Job.objects.count() == 5001


def test_a_large_pushb_reports_refused_jobs_and_stores_the_others(connect):
    client = connect()
    line = pushb(3000)[:-1] + ',{"jid":"badbadba"},7,{"jid":"badbadba","jobtype":"t","args":{}}]'
    refused = json.loads(client.ask(line))
    assert set(refused) == {"badbadba", ""}
    assert "args" in refused["badbadba"]
    assert Job.objects.count() == 3000


def test_a_long_invalid_line_stores_nothing_and_keeps_the_connection_open(connect):
    client = connect()
    assert client.ask(pushb(3000)[:-1] + ",{]").startswith(b"-ERR invalid JSON")
    assert client.ask(pushb(3000).encode()[:-1] + b',"\xff"]').startswith(b"-ERR invalid JSON: the line is not UTF-8")
    assert Job.objects.count() == 0
    assert client.ask(push(jid="after-it")) == b"+OK"


def test_parsing_stops_when_the_client_of_a_long_line_disconnects(connect, server):
    client, other = connect(), connect()
    client.send(SLOW)
    wait_until(lambda: server.line_buffer_limit._complete, what="the whole line is read")
    commands = server.command_count
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()  # with a reset: after an end of file the client may still wait for the reply
    wait_until(lambda: server.line_buffer_limit._sum == 0)
    assert other.ask("NOPE") == b"-ERR unknown command NOPE"
    assert server.command_count == commands


def test_a_stopping_server_answers_a_large_pushb_that_it_is_storing(serve):
    """W28: the reply reports the jobs as stored."""
    broker = Gated()
    server = serve(broker)
    client = RawClient.identified(server.address)
    client.send(pushb(5000))
    wait_until(
        lambda: len(server.exchanges._free) + len(server.commit_queues["bulk"]._free) < 3, what="it is being stored"
    )
    server.stop()
    broker.may_push.set()
    assert client.reply() == b"{}"
    assert Job.objects.count() == 5000
    client.close()


def test_a_stopping_server_does_not_wait_for_a_line_being_parsed(serve):
    """W28: parsing is abandoned at the stop."""
    server = serve()
    client = RawClient.identified(server.address)
    client.send(SLOW)
    wait_until(lambda: server.line_buffer_limit._complete, what="the whole line is read")
    server.stop()
    wait_until(server.loop.is_closed)
    assert Job.objects.count() == 0
    client.close()


@pytest.fixture
def narrow():
    """Reduce the cap on incomplete lines to sixteen lines of 100,000 bytes."""
    with override_settings(FAKTORY={"MAX_COMMAND_BYTES": 100_000}):
        yield


def test_the_oldest_incomplete_lines_are_refused_when_the_memory_cap_is_exceeded(narrow, connect, server):
    holders = [connect() for _ in range(30)]
    for held, client in enumerate(holders):
        client.send(b"PUSH " + b"x" * 89_995, end="")
        wait_until(lambda held=held: len(server.line_buffer_limit._held) == min(held + 1, 17))
    assert server.line_buffer_limit._sum <= 1_600_000
    for client in holders[:13]:
        assert client.reply().startswith(b"-ERR too many long commands are unfinished")
        assert client.is_closed()
    good = connect()
    assert good.ask(push(jid="abcdefgh", args=["x" * 90_000])) == b"+OK"
    assert good.ask(push(jid="abcdefgi")) == b"+OK"
    holders[-1].send(b"")
    assert holders[-1].reply().startswith(b"-ERR")  # its line is complete, and invalid
    wait_until(lambda: len(server.line_buffer_limit._held) < 17)


def test_long_lines_count_towards_the_memory_cap_until_they_are_answered(narrow, serve):
    broker = Gated()
    server = serve(broker)
    clients = [RawClient.identified(server.address) for _ in range(17)]
    for number, client in enumerate(clients):
        client.send(push(jid=f"long-{number:04}", args=["x" * 94_000]))
        wait_until(lambda number=number: server.command_count == 17 + number + 1)
    late = RawClient.identified(server.address)
    late.send(b"PUSH " + b"x" * 89_995, end="")
    assert late.reply().startswith(b"-ERR too many long commands are unfinished")
    broker.may_push.set()
    assert [client.reply() for client in clients] == [b"+OK"] * 17
    assert server.line_buffer_limit._sum == 0
    for client in [*clients, late]:
        client.close()


@pytest.mark.tuning(half_closed_s=60)
def test_memory_of_a_refused_line_is_freed_before_its_client_disconnects(narrow, connect, server):
    holders = [connect() for _ in range(30)]
    for client in holders:
        client.send(b"PUSH " + b"x" * 89_995, end="")
    wait_until(lambda: sum(one._is_closed for one in server._connections) == 13)
    assert sum(one._protocol.buffered_bytes for one in server._connections) <= 1_600_000


def test_small_incomplete_lines_do_not_count_towards_the_memory_cap(narrow, connect, server):
    holders = [connect() for _ in range(40)]
    for client in holders:
        client.send(b"PUSH " + b"x" * 60_000, end="")
    for client in holders:
        client.send(b"")
        assert client.reply().startswith(b"-ERR invalid JSON")
    assert not server.line_buffer_limit._held


def test_a_complete_refused_or_abandoned_line_frees_its_memory(narrow, connect, server):
    clients = [connect() for _ in range(3)]
    for client in clients:
        client.send(b"PUSH " + b"x" * 89_995, end="")
    wait_until(lambda: len(server.line_buffer_limit._held) == 3)
    clients[0].close()
    with suppress(OSError):
        clients[1].send(b"x" * 50_000)
    clients[2].send(b"")
    wait_until(lambda: not server.line_buffer_limit._held)
    assert server.line_buffer_limit._sum == 0
