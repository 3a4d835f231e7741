"""Limits on the cost of one client: memory, scheduling, the last reply. Rules: W2, W6 to W8, W28."""

import json
import socket
import threading
import time
from contextlib import suppress

import pytest
from django.test import override_settings

from django_faktory.brokers.orm import OrmBroker
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job
from tests.server.raw import RawClient, over_both, push, worker
from tests.waiting import wait_until

pytestmark = pytest.mark.once


def only_connection(server):
    return next(iter(server._connections))


def send_until_refused(client, data, most_bytes):
    """Send until the server stops reading; return the number of bytes it accepted."""
    client.socket.settimeout(1)
    sent = 0
    with suppress(OSError):
        while sent < most_bytes:
            sent += client.socket.send(data)
    return sent


@over_both
@pytest.mark.tuning(write_buffer_bytes=50_000)
def test_the_server_stops_reading_from_a_client_that_does_not_read_replies(connect, server):
    """W6, W7: error replies need no database, so only the full write buffer can stop the reading."""
    deaf = connect()
    sent = send_until_refused(deaf, b"NOPE\r\n" * 10_000, 100_000_000)
    assert sent < 50_000_000
    assert only_connection(server)._protocol.buffered_bytes < 1_000_000


@over_both
def test_the_server_stops_reading_while_a_fetch_waits(connect, server):
    """W6: the server does not read on while a FETCH waits."""
    client = connect(**worker())
    client.send("FETCH default")
    wait_until(lambda: len(server.fetch_queue._waiting) == 1)
    assert send_until_refused(client, b"x" * 100_000, 100_000_000) < 50_000_000
    assert only_connection(server)._protocol.buffered_bytes < 1_000_000


def test_each_invalid_line_gets_its_own_reply(connect):
    """W6: each bad line gets its own reply."""
    client = connect()
    client.send("\n" * 10_000, end="")
    assert {client.reply() for _ in range(10_000)} == {b"-ERR unknown command "}
    assert client.ask("NOPE") == b"-ERR unknown command NOPE"


def test_an_endless_flood_does_not_starve_other_clients(connect):
    """W6: the server alternates between connections."""
    flooder, good = connect(), connect()

    def flood():
        with suppress(OSError):
            while True:
                flooder.send("\n" * 5_000, end="")

    def read():
        with suppress(OSError):
            while flooder.stream.read(5_000):
                pass

    threads = [threading.Thread(target=work) for work in (flood, read)]
    for thread in threads:
        thread.start()
    assert [good.ask(push(jid=f"good-{number:04d}")) for number in range(10)] == [b"+OK"] * 10
    assert threads[0].is_alive()
    flooder.socket.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(60)


@over_both
@pytest.mark.parametrize("ending", ["NOPE\r\nEND", "x" * 20_000])
def test_the_last_replies_arrive_despite_unread_input(serve, ending):
    """W4, W7: bytes that the server did not read must not reset the connection before the client
    has read its replies.
    """
    with override_settings(FAKTORY={"MAX_COMMAND_BYTES": 10_000}):
        client = RawClient.identified(serve().address)
    lines = [push(jid=f"ahead-{number:05d}", args=["x" * 200]) for number in range(1000)]
    with suppress(OSError):  # the server need not read what comes after the end
        client.send("\r\n".join([*lines, ending, "junk" * 100_000]))
    assert [client.reply() for _ in range(1000)] == [b"+OK"] * 1000
    last = client.reply()
    if ending.startswith("NOPE"):
        assert (last, client.reply()) == (b"-ERR unknown command NOPE", b"+OK")
    else:
        assert last.startswith(b"-ERR command too long")
    assert client.is_closed()
    client.close()


def trickle(client, server, data):
    """Send one byte at a time until the server closes; return the number of bytes sent."""
    pace = threading.Event()
    for number, byte in enumerate(data):
        client.socket.sendall(bytes([byte]))
        pace.wait(0.01)
        if only_is_closed(server):
            return number
    return len(data)


def only_is_closed(server):
    return not server._connections or only_connection(server)._is_closed


@pytest.mark.parametrize("greets", [True, False])
def test_a_line_sent_byte_by_byte_has_a_deadline(serve, greets):
    """W3 and COMMAND_TIMEOUT: further bytes do not extend the deadline."""
    with override_settings(FAKTORY={"HELLO_TIMEOUT": 0.3 if not greets else 5, "COMMAND_TIMEOUT": 0.3}):
        server = serve()
    client = RawClient.identified(server.address) if greets else RawClient(server.address)
    if not greets:
        client.reply()
    line = push(jid="abcdefgh") if greets else 'HELLO {"v":2,"hostname":"' + "x" * 1000
    assert trickle(client, server, (line + "x" * 1000).encode()) < 200
    what = "a whole command" if greets else "HELLO"
    assert client.reply() == f"-ERR expected {what} within 0.3 seconds".encode()
    assert client.is_closed()
    assert not Job.objects.exists()
    client.close()


def test_a_complete_command_restarts_the_command_timeout(serve):
    with override_settings(FAKTORY={"COMMAND_TIMEOUT": 0.5}):
        server = serve()
    client = RawClient.identified(server.address)
    client.send("NO", end="")
    place = only_connection(server)
    timers = []
    for _ in range(3):
        timers.append(wait_until(lambda: place._line_timer not in timers and place._line_timer))
        client.send("PE\r\nNO", end="")
        assert client.reply() == b"-ERR unknown command NOPE"
    assert all(timer.cancelled() for timer in timers)
    client.send("")
    assert client.reply() == b"-ERR unknown command NO"
    wait_until(lambda: place._line_timer is None)
    assert client.ask("INFO")
    client.close()


def test_an_idle_client_between_commands_has_no_deadline(serve):
    with override_settings(FAKTORY={"COMMAND_TIMEOUT": 0.1, "HELLO_TIMEOUT": 0.1}):
        server = serve()
    idle, late = RawClient.identified(server.address), RawClient.identified(server.address)
    late.send("NO", end="")
    assert late.reply() == b"-ERR expected a whole command within 0.1 seconds"
    assert idle.ask("NOPE") == b"-ERR unknown command NOPE"
    for one in (idle, late):
        one.close()


def test_the_command_timeout_does_not_run_while_a_fetch_waits(serve):
    """The deadline does not run while the server itself does not read."""
    with override_settings(FAKTORY={"COMMAND_TIMEOUT": 0.2}):
        server = serve()
    client, other = RawClient.identified(server.address, **worker()), RawClient.identified(server.address)
    client.send("FETCH default\r\nNO", end="")
    wait_until(lambda: len(server.fetch_queue._waiting) == 1)
    other.send("LA", end="")
    assert b"within 0.2 seconds" in other.reply(), "it waits as long as the first would have waited"
    late = RawClient.identified(server.address)
    late.ask(push(jid="abcdefgh"))
    assert json.loads(client.reply())["jid"] == "abcdefgh"
    client.send("PE")
    assert client.reply() == b"-ERR unknown command NOPE"
    for one in (client, other, late):
        one.close()


@pytest.mark.slow
@over_both
@pytest.mark.tuning(slow_reader_s=0.5)
def test_a_slow_reader_receives_a_large_job_completely(serve):
    """A job of several megabytes on a slow line takes longer than `slow_reader_s`, and must still arrive."""
    server = serve()
    slow = RawClient.identified(server.address, **worker())
    assert slow.ask(push(jid="abcdefgh", args=["x" * 14_000_000])) == b"+OK"
    slow.send("FETCH default")
    size, pace = int(slow.stream.readline()[1:]), threading.Event()
    began = time.monotonic()
    for _ in range(size // 500_000):
        assert len(slow.stream.read(500_000)) == 500_000
        pace.wait(0.05)
    assert slow.stream.read(size % 500_000 + 2).endswith(b"}\r\n")
    assert time.monotonic() - began > 2 * server.tuning.slow_reader_s
    assert slow.ask("NOPE").endswith(b"NOPE")
    slow.close()


@over_both
@pytest.mark.tuning(half_closed_s=0.05)
def test_a_half_closed_connection_is_closed_even_if_its_client_stays(serve):
    server = serve()
    client = RawClient(server.address)
    client.reply()
    assert client.ask("INFO").startswith(b"-ERR expected HELLO")
    assert client.is_closed()
    wait_until(lambda: server.connection_count == 0)
    client.close()


@over_both
@pytest.mark.tuning(slow_reader_s=0.1, write_buffer_bytes=10**9)
def test_a_client_that_does_not_read_the_last_reply_is_closed(serve):
    server = serve()
    client = RawClient.identified(server.address, **worker())
    assert client.ask(push(jid="abcdefgh", args=["x" * 12_000_000])) == b"+OK"
    other = RawClient.identified(server.address, **worker("other"))
    other.send("FETCH default\r\nEND")
    wait_until(lambda: "other" not in server._by_wid)
    for one in (client, other):
        one.close()


class NoPlaceForWorkers(OrmBroker):
    """OrmBroker that loses its database when a worker sends HELLO."""

    def register(self, identities):
        raise BrokerUnavailable("no route to host")


def test_hello_fails_if_the_worker_cannot_be_registered(serve):
    """W2, W30: HELLO fails if the worker cannot be stored."""
    client = RawClient(serve(NoPlaceForWorkers("default")).address)
    client.reply()
    assert client.ask(f"HELLO {json.dumps({'v': 2} | worker())}") == b"-ERR database unavailable"
    assert client.is_closed()
    client.close()


@over_both
def test_connections_use_tcp_keepalive_and_nodelay(connect, server):
    connect()
    raw = only_connection(server)._transport.get_extra_info("socket")
    assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


class Gated(OrmBroker):
    """OrmBroker that makes pushes wait until `may_push` is set; records how many jobs each push has."""

    def __init__(self):
        super().__init__("default")
        self.may_push = threading.Event()
        self.sizes = []

    def push(self, jobs):
        assert self.may_push.wait(60)
        self.sizes.append(len(jobs))
        return super().push(jobs)


def test_a_transaction_is_limited_in_jobs_and_bytes(serve):
    broker = Gated()
    server = serve(broker)
    bulk = [{"jobtype": "noop", "args": []}] * 300
    large = [{"jobtype": "noop", "args": ["x" * 600_000]}]  # six of them are parsed at a time
    clients = [RawClient.identified(server.address) for _ in range(12)]
    for number, client in enumerate(clients):
        jobs = bulk if number % 2 else large
        client.send(f"PUSHB {json.dumps([job | {'jid': f'job-{number}-{n}..'} for n, job in enumerate(jobs)])}")
    wait_until(lambda: server.command_count == 24)  # twelve HELLOs and twelve PUSHBs
    broker.may_push.set()
    assert [client.reply() for client in clients] == [b"{}"] * 12
    assert Job.objects.count() == sum(broker.sizes) == 6 * 301
    assert max(broker.sizes) <= 302  # a bulk of 300 and up to two large jobs
    for client in clients:
        client.close()


@pytest.mark.slow
@over_both
def test_a_stopping_server_waits_until_a_slow_client_has_read_its_reply(serve):
    """W28: the stop waits until the client has read its replies."""
    server = serve()
    client = RawClient.identified(server.address, **worker())
    job = push(jid="abcdefgh", args=["x" * 12_000_000])
    assert client.ask(job) == b"+OK"
    client.send("FETCH default")
    wait_until(lambda: Job.objects.get().state == "working")
    server.stop()
    # The loop must keep running until the client has read the job.
    with pytest.raises(AssertionError, match="not true within"):
        wait_until(server.loop.is_closed, 0.7)
    assert json.loads(client.reply())["jid"] == "abcdefgh"
    assert client.is_closed()
    client.close()


def test_calls_after_the_server_stopped_are_ignored(serve):
    """W20: maintenance may run slightly longer than the server."""
    server = serve()
    server.stop()
    wait_until(server.loop.is_closed)
    server.drop(["wid-1"])
    server.wake()
    server.stop()
