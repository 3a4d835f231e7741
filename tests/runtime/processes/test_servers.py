"""Several server processes of one runfaktory share a port."""

import json
import socket
from contextlib import suppress

import pytest

from tests.server.raw import RawClient, push, worker
from tests.settings import KIND
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.once_if_quick,
    pytest.mark.skipif(KIND == "sqlite", reason="SQLite allows one writer at a time"),
    pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="processes cannot share a port here"),
]


@pytest.fixture
def shared_address():
    """Return an address whose port no other program takes until the test ends."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()


@pytest.fixture
def servers(runfaktory, shared_address):
    """Start two servers at the shared address; return their program."""
    host, port = shared_address
    # Without polls, so that only notifications between the servers end the wait of a FETCH.
    program = runfaktory(f"{host}:{port}", "--server-only", "--no-reload", "--servers", "2", POLL_INTERVAL=600)
    program.wait_for_log("server listens", f"address={host}:{port}", times=2)
    return program


def connections_of(process, port):
    """Return the number of clients that are connected to this process."""
    return sum(one.laddr.port == port and one.status == "ESTABLISHED" for one in process.net_connections())


def test_clients_of_all_servers_share_the_queues(servers, shared_address):
    clients = [RawClient.identified(shared_address, **worker(f"wid-{number}")) for number in range(24)]
    shares = [connections_of(process, shared_address[1]) for process in servers.children()]
    assert sum(shares) == len(clients)
    assert min(shares) > 0, "each server gets some of the connections"
    for number, client in enumerate(clients):
        assert client.ask(push(jid=f"job-{number:04}", queue="shared")) == b"+OK"
    fetched = {json.loads(client.ask("FETCH shared"))["jid"] for client in reversed(clients)}
    assert fetched == {f"job-{number:04}" for number in range(24)}
    for client in clients:
        client.close()


def test_the_other_servers_continue_while_a_killed_one_is_replaced(servers, shared_address):
    killed, other = servers.children()
    clients = [RawClient.identified(shared_address) for _ in range(24)]
    kept = connections_of(other, shared_address[1])
    killed.suspend()  # its clients get no reply, and no replacement exists yet
    answers = []
    for number, client in enumerate(clients):
        client.send(push(jid=f"job-{number:04}", queue="shared"))
    killed.kill()
    for client in clients:
        with suppress(ConnectionError):
            answers.append(client.reply())
    assert answers.count(b"+OK") == kept > 0
    servers.wait_for_log("server listens", times=3)
    wait_until(lambda: len(servers.children()) == 2, what="the killed server was replaced")
    clients.append(RawClient.identified(shared_address))
    assert clients[-1].ask(push(jid="job-last", queue="shared")) == b"+OK"
    for client in clients:
        client.close()
