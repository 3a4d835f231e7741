"""Long lines are parsed in steps, and the memory for incomplete lines is capped. Rules: W6, W7, W12."""

import json
import socket
import struct
import time
from contextlib import suppress

import pytest
from django.test import override_settings

from django_faktory.models import Job
from django_faktory.server import long_commands
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        f'PUSHB [{{"jid":"abcdefgh","jobtype":"","args":[{"[]," * 1_000_000}[]]}}]',
        f'PUSH {{"jid":"abcdefgh","jobtype":"","args":[{"[]," * 1_000_000}[]]}}',
        f'PUSH {{"jid":"abcdefgh","jobtype":"t","args":[{"[]," * 100_000}[]],"custom":{{"unique_for":1,"lock":true}}}}',
        f'FAIL {{"jid":"","backtrace":[{"[]," * 1_000_000}[]]}}',
    ],
    ids=["PUSHB", "PUSH", "unique PUSH", "FAIL"],
)
def test_other_clients_are_answered_while_a_long_line_is_parsed(connect, line):
    """Each of these lines once blocked the event loop, and with it all other clients, for seconds."""
    big, good = connect(), connect()
    big.send(line)
    answered = 0
    while not has_answer(big):
        assert good.ask("NOPE") == b"-ERR unknown command NOPE"
        answered += 1
    assert answered > 10
    assert big.reply() is not None


@pytest.mark.parametrize(("others", "rests"), [(0, False), (1, True)])
def test_parsing_a_long_line_pauses_only_if_other_commands_arrive(others, rests):
    class Loop:
        now, calls = 0.0, ()

        def time(self):
            return self.now

        def call_soon(self, call):
            self.calls = (0.0, call)

        call_later = lambda self, delay, call: setattr(self, "calls", (delay, call))  # noqa: E731

    def steps():
        while True:
            loop.now += 0.001
            yield

    loop, commands, delays = Loop(), 0, []
    one = long_commands.CommandScheduler(loop, commands=lambda: commands, later=lambda call: call())
    one.take(steps(), 5000, lambda _: None)
    for _ in range(100):
        delay, call = loop.calls
        loop.now += delay
        delays.append(delay)
        call()
        commands += others
    assert any(delays[50:]) is rests
    assert sum(delays) < loop.now / 2 + 0.01


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
    client.send(f"PUSHB [{'0,' * 8_000_000}0]")  # half a minute of parsing
    wait_until(lambda: server.command_scheduler._huge._inside)
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()  # with a reset: after an end of file the client may still wait for the reply
    wait_until(lambda: not server.command_scheduler._huge._inside, 15)
    wait_until(lambda: not server.command_scheduler._reading, 15)
    assert other.ask("NOPE") == b"-ERR unknown command NOPE"


@pytest.mark.tuning(long_lines_bytes=2_000_000)
def test_huge_lines_run_one_at_a_time_without_blocking_small_ones(serve):
    """The parsed jobs take ten times the memory of their line."""
    broker = Gated()
    server = serve(broker)
    clients = [RawClient.identified(server.address) for _ in range(3)]
    for number, client in enumerate(clients):
        client.send(pushb(2, f"huge-{number}", args=["x" * 600_000]))
    wait_until(lambda: len(server.command_scheduler._huge._waiting) == 2, what="two wait")
    small = RawClient.identified(server.address)
    small.send(pushb(200, "small"))
    wait_until(lambda: server.command_count == 6, what="four HELLOs, one huge line and the small one")
    assert len(server.command_scheduler._huge._waiting) == 2
    broker.may_push.set()
    assert [client.reply() for client in [*clients, small]] == [b"{}"] * 4
    assert Job.objects.count() == 206
    wait_until(lambda: not server.command_scheduler._huge._inside)
    for client in [*clients, small]:
        client.close()


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
    client.send(f"PUSHB [{'0,' * 3_000_000}0]")
    wait_until(lambda: server.command_scheduler._reading)
    begun = time.monotonic()
    server.stop()
    wait_until(server.loop.is_closed)
    assert time.monotonic() - begun < 8
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
