"""The server as a process: several nodes, an unavailable database, stopping. Rules: W13, W20, W28 to W30."""

import json
import socket
import threading
from contextlib import suppress

import pytest

from django_faktory.brokers.base import Broker
from django_faktory.brokers.orm import OrmBroker
from django_faktory.errors import BrokerUnavailable, FaktoryError
from django_faktory.models import Job
from django_faktory.server.server import Server
from tests.factories import payload
from tests.server.raw import RawClient, over_both, push, worker
from tests.waiting import wait_until

pytestmark = pytest.mark.once_if_quick


class Moody(OrmBroker):
    """OrmBroker with a database that the test can make unavailable or slow, or make fail on one jid."""

    def __init__(self):
        super().__init__("default")
        self.is_away = False
        self.may_push = threading.Event()
        self.may_push.set()
        self.looks = 0

    def _check(self):
        if self.is_away:
            raise BrokerUnavailable("database unavailable: gone fishing")

    exchange = Broker.exchange  # the base class calls each verb separately

    def push(self, jobs):
        assert self.may_push.wait(60)
        self._check()
        if any(job.jid == "poisoned" for job in jobs):
            raise RuntimeError("this job chokes the broker")
        return super().push(jobs)

    def fetch(self, requests):
        self._check()
        found = super().fetch(requests)
        self.looks += 1
        return found

    def ack(self, acks):
        self._check()
        return super().ack(acks)

    def fail(self, failures):
        self._check()
        return super().fail(failures)

    def info(self):
        self._check()
        return super().info()


@pytest.fixture
def broker():
    return Moody()


@pytest.fixture
def moody(serve, broker):
    return serve(broker)


@pytest.fixture
def client(moody):
    client = RawClient.identified(moody.address, **worker())
    yield client
    client.close()


@over_both
def test_a_job_is_pushed_fetched_and_acknowledged_on_different_nodes(serve):
    nodes = [RawClient.identified(serve().address, **worker()) for _ in range(3)]
    assert nodes[0].ask(push(jid="abcdefgh")) == b"+OK"
    assert json.loads(nodes[1].ask("FETCH default"))["jid"] == "abcdefgh"
    assert nodes[2].ask('ACK {"jid":"abcdefgh"}') == b"+OK"
    infos = [json.loads(node.ask("INFO"))["faktory"] for node in nodes]
    assert [one["total_processed"] for one in infos] == [1, 1, 1]
    for node in nodes:
        node.close()


def test_on_scheduled_receives_the_earliest_time_of_each_push(serve):
    """W13: otherwise a job due within a second would be late by up to a second."""
    server, times = serve(), []
    server.on_scheduled = times.append
    client = RawClient.identified(server.address)
    client.ask(push(jid="no-later"))
    client.ask(push(jid="at-eight", at="2126-01-01T08:00:00Z"))
    bulk = [push(jid=f"at-hour{hour}", at=f"2126-01-01T0{hour}:00:00Z").removeprefix("PUSH ") for hour in (9, 7)]
    client.ask(f"PUSHB [{','.join(bulk)}]")
    assert [(at.hour, at.year) for at in times] == [(8, 2126), (7, 2126)]
    client.close()


@pytest.mark.parametrize(
    "line",
    [
        push(jid="abcdefgh"),
        "FETCH default",
        "INFO",
        f"PUSHB [{push(jid='abcdefgh')[5:]}]",
        'ACK {"jid":"abcdefgh"}',
        'FAIL {"jid":"abcdefgh"}',
    ],
)
def test_commands_fail_while_the_database_is_unavailable_and_work_afterwards(client, broker, line):
    """W30: each command gets the error, and the next one is served."""
    broker.is_away = True
    assert client.ask(line) == b"-ERR database unavailable"
    broker.is_away = False
    assert client.ask(push(jid="afterwards")) == b"+OK"
    assert json.loads(client.ask("FETCH default"))["jid"] == "afterwards"


def test_a_command_that_raises_in_the_broker_fails_alone(moody, broker):
    broker.may_push.clear()
    clients = [RawClient.identified(moody.address) for _ in range(3)]
    for number, jid in enumerate(("first-good", "poisoned", "second-good")):
        clients[number].send(push(jid=jid))
    wait_until(lambda: moody.command_count == 6)  # three HELLOs and three PUSHes
    broker.may_push.set()
    assert [one.reply() for one in clients] == [b"+OK", b"-ERR internal error", b"+OK"]
    assert Job.objects.count() == 2
    for one in clients:
        one.close()


def test_commands_received_during_a_transaction_share_the_next_one(moody, broker, monkeypatch):
    """W29: each command is answered after that transaction."""
    sizes = []
    monkeypatch.setattr(broker, "push", lambda jobs: (sizes.append(len(jobs)), Moody.push(broker, jobs))[1])
    broker.may_push.clear()
    clients = [RawClient.identified(moody.address) for _ in range(9)]
    for number, one in enumerate(clients):
        one.send(push(jid=f"together-{number}"))
    wait_until(lambda: moody.command_count == 18)  # nine HELLOs and nine PUSHes
    assert not Job.objects.exists()
    broker.may_push.set()
    assert [one.reply() for one in clients] == [b"+OK"] * 9
    assert Job.objects.count() == 9
    assert len(sizes) <= 3, "one transaction for each commit thread, and one for the remaining jobs"
    for one in clients:
        one.close()


@over_both
def test_a_stopping_server_answers_accepted_commands_and_refuses_later_ones(moody, broker):
    """W28: accepted commands and waiting FETCHes are answered; later commands are refused."""
    waits, pushes, late = (RawClient.identified(moody.address) for _ in range(3))
    waits.send("FETCH default")
    wait_until(lambda: broker.looks)
    broker.may_push.clear()
    pushes.send(push(jid="accepted"))
    wait_until(lambda: moody.command_count == 5)  # three HELLOs, a FETCH and a PUSH
    moody.stop()
    assert waits.reply() is None
    assert late.ask("INFO") == b"-ERR shutdown in progress"
    assert late.is_closed()
    broker.may_push.set()
    assert pushes.reply() == b"+OK"
    assert pushes.is_closed()
    assert Job.objects.get().jid == "accepted"
    for one in (waits, pushes, late):
        one.close()


def test_a_server_stopped_before_it_runs_ends_at_once(transactional_db):
    server = Server(OrmBroker("default"), port=0)
    server.stop()
    thread = threading.Thread(target=server.run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_an_address_in_use_raises_a_clear_error(transactional_db):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = Server(OrmBroker("default"), port=taken.getsockname()[1])
        error = r"^cannot listen on 127\.0\.0\.1:\d+: address already in use; end what uses it, or choose another port$"
        with pytest.raises(FaktoryError, match=error):
            server.run()


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("192.0.2.1", "cannot assign requested address; choose an address that this machine has"),
        ("no-such-host.invalid", "choose another address"),
    ],
)
def test_an_unusable_listen_address_raises_a_clear_error(transactional_db, host, reason):
    server = Server(OrmBroker("default"), host=host, port=0)
    with pytest.raises(FaktoryError, match=f"^cannot listen on {host}:0: .*{reason}"):
        server.run()


@over_both
def test_drop_closes_only_the_connections_of_the_given_wids(serve):
    """W20: the server closes the connections of the given wids."""
    server = serve()
    lost, stays = (RawClient.identified(server.address, **worker(wid)) for wid in ("lost", "stays"))
    server.drop(["lost", "unknown"])
    assert lost.is_closed()
    assert stays.ask("INFO")
    lost.close()
    stays.close()


def test_a_hint_wakes_a_waiting_fetch(serve):
    """W13: a hint ends the wait of a FETCH."""
    hints = threading.Semaphore(0)

    class Hints:
        def wait(self, timeout_s):
            return hints.acquire(timeout=timeout_s)

        def close(self):
            hints.release()

    server = serve(listen=Hints)
    client = RawClient.identified(server.address, **worker())
    client.send("FETCH default")
    wait_until(lambda: len(server.fetch_queue._waiting) == 1)
    OrmBroker("default", announce=lambda *_: None).push([payload("hinted")])
    hints.release()
    assert json.loads(client.reply())["jid"] == "job-hinted"
    client.close()


@pytest.fixture
def unread():
    """Return a PUSHB line with a long reply: a few unread ones fill a small write buffer."""
    refused = [{"jid": f"{number:0250d}", "jobtype": "", "args": []} for number in range(4_000)]
    return f"PUSHB {json.dumps(refused)}"


def flood(client, line, times):
    """Send the line `times` times in a thread; the thread ends when the connection is closed."""

    def send():
        with suppress(OSError):
            for _ in range(times):
                client.send(line)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.tuning(write_buffer_bytes=10_000, slow_reader_s=0.5)
def test_a_client_that_never_reads_is_closed_without_affecting_others(serve, unread):
    server = serve()
    deaf, other = (RawClient.identified(server.address) for _ in range(2))
    thread = flood(deaf, unread, 12)
    wait_until(lambda: server.connection_count == 1, 60)
    thread.join(60)
    assert other.ask(push(jid="abcdefgh")) == b"+OK"
    for one in (deaf, other):
        one.close()


@pytest.mark.tuning(write_buffer_bytes=10_000)
def test_a_client_that_reads_late_receives_all_replies(serve, unread):
    client = RawClient.identified(serve().address, timeout_s=60)
    thread = flood(client, unread, 6)
    assert [len(json.loads(client.reply())) for _ in range(6)] == [4_000] * 6
    thread.join(60)
    assert client.ask(push(jid="abcdefgh")) == b"+OK"
    client.close()
