"""Bursts of connections, and more of them than the limit of open files: each client is greeted or refused (W8)."""

import json
import select
import socket
import time
from contextlib import closing, contextmanager

import pytest

from tests.server.raw import RawClient, push

pytestmark = [pytest.mark.slow, pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True), pytest.mark.once]

REFUSAL = b"-ERR too many connections\r\n"
SOON_S = 20.0
"""Time for all first lines, on a busy machine. A connection that the system has dropped waits for 45 s and longer."""


@contextmanager
def at_once(address, count):
    """Connect this number of sockets without waiting; yield the first line that each received, in any order."""
    sockets, lines = {}, []
    poll = select.poll()
    try:
        for _ in range(count):
            client = socket.socket()
            sockets[client.fileno()] = client
            client.setblocking(False)
            client.connect_ex(address)
            poll.register(client, select.POLLIN)
        deadline = time.monotonic() + SOON_S
        while len(lines) < count and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(1000 * left_s):
                poll.unregister(descriptor)
                lines.append(received(sockets[descriptor]))
        yield lines
    finally:
        for client in sockets.values():
            client.close()


def received(client):
    try:
        return client.recv(1000)
    except OSError as error:
        return type(error).__name__.encode()


def test_each_of_a_thousand_clients_that_connect_at_once_is_greeted(runfaktory, address):
    with at_once(address(runfaktory("127.0.0.1:0", "--server-only")), 1000) as lines:
        assert [line[:4] for line in lines] == [b"+HI "] * 1000


def test_more_clients_than_open_files_are_refused_and_the_others_are_served(runfaktory, address):
    """Without a reserve the server closed 310 of 1,300 clients without a word, and INFO of the others failed."""
    program = runfaktory("127.0.0.1:0", "--server-only", environment={"FAKTORY_TEST_OPEN_FILES": "128 512"})
    [line] = program.wait_for_log("fewer connections than MAX_CONNECTIONS", "limit=")
    served = int(line.partition("limit=")[2].split()[0])
    assert 128 < served < 512, "the soft limit is raised, and some descriptors are left for the database"
    host_and_port = address(program)
    with closing(RawClient.identified(host_and_port)) as client, at_once(host_and_port, 700) as lines:
        greeted = [line for line in lines if line.startswith(b"+HI ")]
        assert len(greeted) == served - 1
        assert lines.count(REFUSAL) == 700 - len(greeted)
        assert client.ask(push(jid="abcdefgh")) == b"+OK"
        assert json.loads(client.ask("INFO"))["faktory"]["queues"] == {"default": 1}
        assert client.ask("QUEUE LATENCY default").startswith(b'{"default":')
        assert client.ask("FETCH default").startswith(b"{")
    with closing(RawClient.identified(host_and_port)) as late:
        assert late.ask("INFO")
