"""Which commands may delay which others; no command delays HELLO and BEAT. Rules: W2, W20, W21."""

import json
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import Beat, WorkerIdentity
from django_faktory.models import Batch, Job, JobLock, Queue, WorkerProcess
from django_faktory.server.connection import MAX_IN_A_ROW
from django_faktory.server.server import UNPAUSED_BULK
from django_faktory.store import queues, workers
from django_faktory.store.store import Store
from tests.server.raw import RawClient, push, worker
from tests.waiting import wait_until

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]
with_locks = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")

VERBS_WITH_DATABASE = (
    "push", "fetch", "exchange", "ack", "fail", "release", "confirm", "mutate", "pause", "resume", "remove", "latency",
    "flush", "track_set", "track_get", "new_batch", "open_batch", "commit_batch", "batch_status", "info",
)  # fmt: skip
LONG_AGO = timedelta(hours=1)


class HeldBroker(OrmBroker):
    """OrmBroker that makes all verbs except HELLO and BEAT wait inside `held`, as for a lock or a slow statement."""

    def __init__(self):
        super().__init__("default")
        self.released = threading.Event()
        self.released.set()
        self.waiting, self.calls = [], []

    def wait(self, verb):
        self.calls.append(verb)
        if not self.released.is_set():
            self.waiting.append(verb)
            self.released.wait(60)


def _held(verb):
    def call(self, *args, **options):
        self.wait(verb)
        return getattr(super(HeldBroker, self), verb)(*args, **options)

    return call


for _verb in VERBS_WITH_DATABASE:
    setattr(HeldBroker, _verb, _held(_verb))


class SetsBroker(OrmBroker):
    """OrmBroker that records how many BEATs and HELLOs come in one call; the first BEAT call waits."""

    def __init__(self):
        super().__init__("default")
        self.beats, self.hellos = [], []
        self.began, self.released = threading.Event(), threading.Event()

    def beat(self, beats):
        self.beats.append(len(beats))
        if len(self.beats) == 1:
            self.began.set()
            self.released.wait(60)
        return super().beat(beats)

    def register(self, identities):
        self.hellos.append(len(identities))
        return super().register(identities)


@contextmanager
def held(broker):
    broker.released.clear()
    try:
        yield
    finally:
        broker.released.set()


def about(verb, **fields):
    return f"{verb} {json.dumps(fields)}"


def bulk(name, count):
    jobs = [{"jid": f"{name}-{n:04d}", "jobtype": "noop", "args": []} for n in range(count)]
    return "PUSHB " + json.dumps(jobs)


LINES = [
    push(jid="plain-0001"), push(jid="plain-0002"), push(jid="plain-0003"),
    push(jid="unique-0001", custom={"unique_for": 60}),
    bulk("bulk", 100),
    about("FAIL", jid="unknown-0001"),
    "QUEUE PAUSE some",
    "QUEUE RESUME some",
    "INFO",
    "QUEUE LATENCY some",
    "TRACK GET unknown-0001",
    "BATCH STATUS b-unknown",
    about("TRACK SET", jid="unknown-0001", percent=1),
    "BATCH COMMIT b-unknown",
    "BATCH NEW " + json.dumps({"success": {"jobtype": "Success", "args": []}}),
    *[about("MUTATE", cmd="kill", target="retries", filter={"jobtype": name}) for name in "abc"],
    "QUEUE REMOVE some",
]  # fmt: skip
"""Commands of each kind, enough to occupy all threads of each commit queue."""


@pytest.fixture
def clients():
    """Connections that are closed at the end of the test, in any state."""
    opened = []
    yield opened
    for client in opened:
        with suppress(OSError):
            client.close()


def send_all(server, lines, clients):
    for line in lines:
        clients.append(RawClient.identified(server.address))
        clients[-1].send(line)


def make_silent(wid):
    WorkerProcess.objects.filter(wid=wid).update(beat_at=timezone.now() - LONG_AGO)
    assert workers.find_stale_wids(60, using="default") == [wid]


class OneWriterBroker(HeldBroker):
    """HeldBroker of a database with one writer at a time, in which each verb can be held alone."""

    has_single_writer = True

    def __init__(self):
        super().__init__()
        self.may_run = {verb: threading.Event() for verb in ("push", "pause")}
        self.called_at = []

    def wait(self, verb):
        self.called_at.append(time.monotonic())
        super().wait(verb)
        if verb in self.may_run:
            self.may_run[verb].wait(60)


@pytest.mark.tuning(bulk_pause=1e9, max_bulk_pause_s=300.0)  # longer than a client of this test waits for its reply
class TestLargePushesOnADatabaseWithOneWriter:
    """The bulk queue pauses after a large set, so that the writes of other clients come between two of them."""

    LARGE = UNPAUSED_BULK + 1

    @pytest.fixture
    def broker(self):
        return OneWriterBroker()

    @pytest.fixture
    def server(self, serve, broker):
        return serve(broker)

    @pytest.fixture
    def two_pushes(self, server, broker, clients):
        """Two clients with a PUSHB each; the first is in the broker, the second behind it."""

        def begin(count):
            for number in range(2):
                clients.append(RawClient.identified(server.address))
                clients[-1].send(bulk(f"bulk{number}", count))
                wait_until(lambda number=number: server.command_count >= 2 * (number + 1))
            wait_until(lambda: broker.calls == ["push"])
            return clients[-2:]

        yield begin
        for event in broker.may_run.values():
            event.set()

    def end_first(self, server, broker, clients, first, *, with_pause):
        if with_pause:
            clients.append(RawClient.identified(server.address))
            clients[-1].send("QUEUE PAUSE some")
            wait_until(lambda: "pause" in broker.calls)
        broker.may_run["push"].set()
        assert first.reply() == b"{}"
        broker.may_run["pause"].set()
        if with_pause:
            assert clients[-1].reply() == b"+OK"

    @pytest.mark.tuning(max_bulk_pause_s=0.5)
    def test_the_next_large_push_waits_while_other_commands_are_in_progress(self, server, broker, clients, two_pushes):
        first, second = two_pushes(self.LARGE)
        released_at = time.monotonic()
        self.end_first(server, broker, clients, first, with_pause=True)
        assert second.reply() == b"{}"
        assert broker.calls == ["push", "pause", "push"]
        assert broker.called_at[-1] - released_at >= 0.5

    def test_nothing_pauses_without_other_commands(self, server, broker, clients, two_pushes):
        first, second = two_pushes(self.LARGE)
        self.end_first(server, broker, clients, first, with_pause=False)
        assert second.reply() == b"{}"

    def test_nothing_pauses_after_a_set_of_usual_size(self, server, broker, clients, two_pushes):
        first, second = two_pushes(UNPAUSED_BULK)
        self.end_first(server, broker, clients, first, with_pause=True)
        assert second.reply() == b"{}"

    def test_nothing_pauses_on_a_database_with_many_writers(self, server, broker, clients, two_pushes):
        broker.has_single_writer = False
        first, second = two_pushes(self.LARGE)
        self.end_first(server, broker, clients, first, with_pause=True)
        assert second.reply() == b"{}"


def test_sqlite_alone_has_a_single_writer():
    assert OrmBroker("default").has_single_writer is (connection.vendor == "sqlite")


class TestNoCommandDelaysABeat:
    def test_beat_hello_and_end_are_answered_while_every_other_queue_is_blocked(self, serve, clients):
        broker = HeldBroker()
        server = serve(broker)
        living = RawClient.identified(server.address, **worker("living"))
        clients.append(living)
        assert living.ask(about("BEAT", wid="living")) == b"+OK"
        assert living.ask(push(jid="held-0001")) == b"+OK"
        assert json.loads(living.ask("FETCH default"))["jid"] == "held-0001"
        make_silent("living")
        threads = 8  # by queue: exchanges 2, bulk, may block, fail, read, long 2
        with held(broker):
            send_all(server, LINES, clients)
            wait_until(lambda: len(broker.waiting) >= threads, what="all threads are occupied")
            assert living.ask(about("BEAT", wid="living")) == b"+OK"
            assert workers.find_stale_wids(60, using="default") == []
            newcomer = RawClient.identified(server.address, **worker("newcomer"))
            clients.append(newcomer)
            assert newcomer.ask("END") == b"+OK"
            assert WorkerProcess.objects.filter(wid="newcomer").exists()
        assert living.ask(about("ACK", jid="held-0001")) == b"+OK"

    def test_slow_reads_and_slow_changes_do_not_block_each_other(self, serve, clients):
        broker = HeldBroker()
        server = serve(broker)
        good = RawClient.identified(server.address)
        clients.append(good)
        with held(broker):
            send_all(server, ["QUEUE LATENCY some"], clients)
            wait_until(lambda: broker.waiting == ["latency"])
            broker.wait = lambda _: None  # the other commands of this test run at once
            assert good.ask("QUEUE PAUSE other") == b"+OK"
            assert good.ask("QUEUE RESUME other") == b"+OK"
            assert good.ask(push(jid="plain-0001")) == b"+OK"
        with held(broker):
            del broker.wait
            send_all(server, ["QUEUE PAUSE some"], clients)
            wait_until(lambda: broker.waiting == ["latency", "pause"])
            broker.wait = lambda _: None
            assert json.loads(good.ask("INFO"))["faktory"]["total_queues"] >= 1
            assert good.ask("QUEUE LATENCY other") == b'{"other":0}'

    def test_queued_reads_of_disconnected_clients_are_skipped(self, serve, clients):
        broker = HeldBroker()
        server = serve(broker)
        with held(broker):
            send_all(server, ["INFO"], clients)
            wait_until(lambda: broker.waiting == ["info"])
            send_all(server, [f"QUEUE LATENCY q{number}" for number in range(5)], clients)
            wait_until(lambda: server.command_count == 12)  # six HELLOs and six commands
            for client in clients[1:5]:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()  # with a reset: after an end of file a client may still read
            wait_until(lambda: server.connection_count == 2)
        assert clients[5].reply() == b'{"q4":0}'
        assert broker.calls.count("latency") == 1

    def test_waiting_beats_and_hellos_are_each_run_as_one_set(self, serve, clients):
        """Sixty clients that repeat BEAT cost one statement of each kind, and not sixty."""
        broker = SetsBroker()
        server = serve(broker)
        for number in range(12):
            clients.append(RawClient.identified(server.address, **worker(f"wid-{number:02d}")))
        clients[0].send(about("BEAT", wid="wid-00"))
        assert broker.began.wait(60)
        broker.hellos.clear()
        for number, client in enumerate(clients[1:], 1):
            client.send(about("BEAT", wid=f"wid-{number:02d}"))
        newcomers = [RawClient(server.address) for _ in range(5)]
        clients += newcomers
        for number, client in enumerate(newcomers):
            assert client.reply().startswith(b"+HI")
            client.send(about("HELLO", v=2, **worker(f"new-{number}")))
        wait_until(lambda: server.command_count == 12 + 12 + 5)  # HELLOs, BEATs, new HELLOs
        broker.released.set()
        assert {client.reply() for client in clients} == {b"+OK"}
        assert (broker.beats, broker.hellos) == ([1, 11], [5])


@with_locks
class TestRowsThatAreLocked:
    """A transaction of the project locks rows and stays open."""

    def test_a_beat_is_answered_while_all_rows_of_its_job_are_locked(self, server, connect):
        living, others = connect(**worker("living")), [connect() for _ in range(4)]
        bid = others[0].ask("BATCH NEW " + json.dumps({"success": {"jobtype": "S", "args": []}})).decode()
        assert others[0].ask(push(jid="locked-0001", custom={"lock": "a"})) == b"+OK"
        assert json.loads(living.ask("FETCH default"))["jid"] == "locked-0001"
        assert living.ask(about("BEAT", wid="living")) == b"+OK"
        assert others[0].ask("QUEUE PAUSE default") == b"+OK"
        make_silent("living")
        with transaction.atomic():
            for rows in (Job, JobLock, Queue, Batch):
                assert list(rows.objects.select_for_update())
            others[0].send("QUEUE RESUME default")
            others[1].send(f"BATCH COMMIT {bid}")
            others[2].send(about("TRACK SET", jid="locked-0001", percent=1))
            others[3].send(about("FAIL", jid="locked-0001"))
            wait_until(lambda: len(server.lock_waits) >= 3)
            assert living.ask(about("BEAT", wid="living")) == b"+OK"
        for client in others:
            assert client.reply() == b"+OK"
        assert workers.find_stale_wids(60, using="default") == []

    def test_a_locked_worker_row_does_not_block_beats_of_other_workers(self, server, connect):
        locked, free = connect(**worker("locked")), connect(**worker("free"))
        with transaction.atomic():
            assert WorkerProcess.objects.select_for_update().get(wid="locked")
            locked.send(about("BEAT", wid="locked"))
            wait_until(lambda: len(server.lock_waits) == 1)
            for _ in range(3):
                assert free.ask(about("BEAT", wid="free")) == b"+OK"
            connect(**worker("newcomer"))
        assert locked.reply() == b"+OK"


class TestASetOfBeats:
    def test_the_most_advanced_state_of_a_worker_is_kept(self):
        broker = OrmBroker("default")
        WorkerProcess.objects.create(wid="wid-1")
        states = broker.beat([Beat(wid="wid-1", current_state="quiet"), Beat(wid="wid-1", rss_kb=7)])
        assert states == ["quiet", "quiet"]
        found = WorkerProcess.objects.get()
        assert (found.state, found.rss_kb) == ("quiet", 7)

    def test_fifty_workers_are_registered_with_few_queries(self, django_assert_max_num_queries):
        broker = OrmBroker("default")
        identities = [identity(f"wid-{number}") for number in range(50)]
        with django_assert_max_num_queries(8):
            answers = broker.register([*identities, identity("bad\x00wid"), identity("wid-1")])
        assert [answer is None for answer in answers] == [True] * 50 + [False, True]
        assert WorkerProcess.objects.count() == 50
        assert broker.register(identities) == [None] * 50


def identity(wid):
    return WorkerIdentity(wid=wid, hostname="localhost", pid=1)


def test_a_second_pause_writes_nothing(django_assert_num_queries):
    """On SQLite each write delays all other writes."""
    names = [f"queue-{number:03d}" for number in range(250)]
    assert queues.pause(Store(), names) == names
    with django_assert_num_queries(1):
        assert queues.pause(Store(), names) == []


def test_the_server_pauses_a_client_after_each_run_of_refused_lines(connect, server, monkeypatch):
    """Without the pause, sixty such clients delayed a command of another client by 0.1 s."""
    resting = []
    monkeypatch.setattr(server.rest_queue, "wait", resting.append)
    client = connect()
    [connection] = server._connections
    client.send("NOPE\n" * (2 * MAX_IN_A_ROW + 5), end="")
    for left in (MAX_IN_A_ROW + 5, 5, 0):
        wait_until(lambda left=left: (connection._protocol.buffered_bytes, bool(resting)) == (5 * left, left > 0))
        if resting:
            server.loop.call_soon_threadsafe(resting.pop())
    assert {client.reply() for _ in range(2 * MAX_IN_A_ROW + 5)} == {b"-ERR unknown command NOPE"}
