"""Prefetched jobs of the server (`PrefetchBuffer`); PostgreSQL only. Rules: W13, W14, W16, W24, W28; ADR 0026."""

import asyncio
import json
import time
from contextlib import closing
from datetime import timedelta

import pytest
from django.db import connection, transaction

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import Delivery, FetchRequest, Reservation
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job, Limit, WorkerProcess
from django_faktory.server import waiting_fetches
from django_faktory.server.deliveries import DeliveryTracker
from django_faktory.server.group_commit import CommitQueue
from django_faktory.server.prefetch_buffer import MAX_UNPRODUCTIVE, FetchRate
from django_faktory.server.tuning import Tuning
from tests.factories import payload
from tests.server.raw import RawClient, push, worker
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # On a busy machine jobs that are held for too long go back to their queue while later ones are delivered.
    pytest.mark.tuning(hold_s=600.0, trust_s=600.0, confirm_s=600.0, low_watermark=-1),
]

AHEAD = 4


@pytest.fixture
def slow(monkeypatch):
    """Prefetch four jobs for any client."""
    if connection.vendor != "postgresql":
        pytest.skip("about PostgreSQL")
    monkeypatch.setattr(FetchRate, "expected_fetches", lambda *_: AHEAD)


@pytest.fixture
def client(slow, connect):
    return connect(**worker())


def store(*names, **fields):
    """Enqueue jobs of these names as another process does, without a hint."""
    errors = OrmBroker("default", announce=lambda *_: None).push([payload(name, **fields) for name in names])
    assert not any(errors)


def fetch(client, *queues):
    """Fetch a job and return its name, or None if no job came."""
    reply = client.ask(" ".join(["FETCH", *(queues or ["default"])]))
    return reply and json.loads(reply)["jid"].removeprefix("job-").rstrip(".")


def jid(name):
    return f"job-{name}".ljust(8, ".")


def ack(client, name):
    return client.ask(f'ACK {{"jid":"{jid(name)}"}}')


def job(name):
    return Job.objects.get(jid=jid(name))


def on_the_shelf():
    """Return the names of prefetched jobs: their rows have no worker yet."""
    working = Job.objects.filter(state="working", claim__lt=0, wid="")
    jids = working.order_by("enqueued_at", "id").values_list("jid", flat=True)
    return " ".join(one.removeprefix("job-").rstrip(".") for one in jids)


class TestCrowd:
    def test_four_clients_that_fetch_concurrently_trigger_prefetch(self):
        fetch_rate = FetchRate(hold_s=0.02)
        for at in range(16):
            fetch_rate.record_fetch(1.0 + at / 1000, "default", at % 4, "w")
        assert fetch_rate.expected_fetches(1.016, "default") == 10

    def test_three_clients_trigger_no_prefetch_at_any_rate(self):
        fetch_rate = FetchRate(hold_s=0.02)
        for at in range(60):
            fetch_rate.record_fetch(1.0 + at / 10_000, "default", at % 3, "w")
        assert fetch_rate.expected_fetches(1.006, "default") == 0

    def test_expected_fetches_follow_the_recent_rate_of_each_queue(self):
        fetch_rate = FetchRate(hold_s=0.02)
        for at in range(16):
            fetch_rate.record_fetch(1.0 + at / 1000, "slow" if at % 8 == 0 else "quick", at % 4, "w")
        assert (
            fetch_rate.expected_fetches(1.016, "slow"),
            fetch_rate.expected_fetches(1.016, "quick"),
            fetch_rate.expected_fetches(1.016, "other"),
        ) == (1, 9, 0)

    def test_clients_that_fetched_before_the_hold_time_do_not_count(self):
        fetch_rate = FetchRate(hold_s=0.02)
        for client in range(4):
            fetch_rate.record_fetch(1.0, "default", client, "w")
        assert fetch_rate.expected_fetches(1.0202, "default") == 0


class TestTaking:
    def test_prefetched_jobs_are_delivered_in_order_without_the_database(self, client):
        store("a", "b", "c", "d", "e", "f")
        assert fetch(client) == "a"
        assert on_the_shelf() == "b c d e"
        with connection.cursor() as cursor:
            cursor.execute("BEGIN; LOCK TABLE django_faktory_job IN ACCESS EXCLUSIVE MODE")
            try:
                assert [fetch(client) for _ in range(4)] == ["b", "c", "d", "e"]
            finally:
                cursor.execute("ROLLBACK")
        assert fetch(client) == "f"

    def test_three_clients_get_their_jobs_without_prefetch(self, connect):
        store(*map(str, range(60)))
        clients = [connect(**worker(f"w{n}")) for n in range(3)]
        for turn in range(45):
            assert fetch(clients[turn % 3]) == str(turn)
            assert on_the_shelf() == ""

    @pytest.mark.tuning(low_watermark=Tuning().low_watermark)
    def test_many_clients_get_each_job_once_and_nearly_in_order(self, slow, monkeypatch, connect):
        monkeypatch.undo()
        from_shelf, add = [], DeliveryTracker.add
        monkeypatch.setattr(DeliveryTracker, "add", lambda self, one: from_shelf.append(one.jid) or add(self, one))
        store(*map(str, range(400)))
        clients = [connect(**worker()) for _ in range(8)]
        taken = []
        while len(taken) < 400:
            for client in clients:
                client.send("FETCH default")
            taken += [json.loads(reply)["jid"] for client in clients if (reply := client.reply())]
        assert from_shelf, "no job was prefetched"
        assert sorted(taken) == sorted(jid(n) for n in range(400))
        places = [int(one.removeprefix("job-").rstrip(".")) for one in taken]
        assert all(abs(place - n) <= 8 for n, place in enumerate(places)), f"8 clients fetched at a time: {places}"

    @pytest.mark.tuning(low_watermark=2)
    def test_a_low_buffer_is_refilled_with_the_next_ack(self, client):
        store(*"abcdefgh")
        assert [fetch(client) for _ in range(3)] == ["a", "b", "c"]
        assert on_the_shelf() == "b c d e", "none of them is confirmed"
        assert ack(client, "a") == b"+OK"
        wait_until(lambda: on_the_shelf() == "b c d e f g")
        assert [fetch(client) for _ in range(5)] == ["d", "e", "f", "g", "h"]

    def test_read_ahead_0_disables_prefetch(self, slow, settings, serve):
        settings.FAKTORY = {"PREFETCH": 0}
        server = serve()
        client = RawClient.identified(server.address, **worker())
        store("a", "b")
        assert fetch(client) == "a"
        assert on_the_shelf() == ""
        client.close()

    def test_a_quiet_worker_gets_no_prefetched_job(self, client):
        store("a", "b")
        assert fetch(client) == "a"
        WorkerProcess.objects.update(state="quiet")
        assert b"quiet" in client.ask('BEAT {"wid":"wid-1"}')
        assert fetch(client) is None

    def test_only_delivered_jobs_are_recorded_as_started(self, slow, serve):
        started_jobs = []

        class Recorder:
            def started(self, jobs):
                started_jobs.extend(jobs)

        server = serve(OrmBroker("default", recorder=Recorder()))
        client = RawClient.identified(server.address, **worker())
        store("a", "b", "c")
        assert [fetch(client), fetch(client)] == ["a", "b"]
        assert len(started_jobs) == 2
        client.close()


class TestOrder:
    def test_a_pushed_priority_job_is_delivered_before_prefetched_jobs(self, client):
        store("a", "b", "c")
        assert fetch(client) == "a"
        assert client.ask(push(jid=jid("first"), priority=9)) == b"+OK"
        assert [fetch(client) for _ in range(3)] == ["first", "b", "c"]
        assert on_the_shelf() == "", "this queue is not prefetched for a while"

    def test_a_priority_job_of_a_pushb_is_delivered_before_prefetched_jobs(self, client):
        store("a", "b", "c")
        assert fetch(client) == "a"
        jobs = [{"jid": jid(name), "jobtype": "noop", "args": [], "priority": p} for name, p in (("d", 5), ("up", 6))]
        assert client.ask(f"PUSHB {json.dumps(jobs)}") == b"{}"
        assert [fetch(client) for _ in range(4)] == ["up", "b", "c", "d"]

    @pytest.mark.parametrize(
        "custom", [{"expires_in": 30}, {"unique_for": 600, "unique_until": "start"}, {"lock": "key"}, {"limit": "key"}]
    )
    def test_prefetch_stops_before_a_job_with_an_expiry_lock_or_limit(self, client, custom):
        store("a", "b")
        store("special", custom=custom)
        store("c")
        assert fetch(client) == "a"
        assert on_the_shelf() == "b"
        assert [fetch(client) for _ in range(3)] == ["b", "special", "c"]

    def test_a_queue_with_a_limit_is_not_prefetched(self, client):
        Limit.objects.create(scope="queue", name="default", concurrency=10)
        store("a", "b")
        assert fetch(client) == "a"
        assert on_the_shelf() == ""

    def test_prefetch_pauses_after_many_consecutive_jobs_with_locks(self, client):
        """A prefetch that finds no eligible job delays concurrent FETCHes, so the server stops prefetching."""
        locked = [f"locked{number}" for number in range(MAX_UNPRODUCTIVE + 1)]
        for name in locked:
            store(name, custom={"lock": name})
        store("a", "b", "c")
        assert [fetch(client) for _ in locked] == locked
        assert on_the_shelf() == ""
        assert fetch(client) == "a"
        assert on_the_shelf() == "", "the other clients were not known yet"
        assert fetch(client) == "b"
        assert on_the_shelf() == "c"

    def test_prefetch_continues_if_only_some_jobs_have_locks(self, client):
        for number in range(MAX_UNPRODUCTIVE + 2):
            store(f"locked{number}", custom={"lock": str(number)})
            store(f"plain{number}")
        for number in range(MAX_UNPRODUCTIVE + 2):
            assert fetch(client) == f"locked{number}"
            assert on_the_shelf() == f"plain{number}"
            assert fetch(client) == f"plain{number}"
            assert ack(client, f"plain{number}") == b"+OK"

    def test_jobs_of_lower_priority_are_not_prefetched(self, client):
        store("a", "b")
        store("low", priority=-50)
        assert fetch(client) == "a"
        assert on_the_shelf() == "b"

    def test_earlier_queues_of_a_fetch_precede_prefetched_jobs(self, client):
        store("a", "b", "c", queue="second")
        assert fetch(client, "second") == "a"
        store("urgent", queue="first")
        assert fetch(client, "first", "second") == "urgent"

    def test_prefetched_jobs_precede_the_database_if_earlier_queues_are_empty(self, client):
        store("a", "b", "c", "d", "e", "f", queue="second")
        assert fetch(client, "second") == "a"
        assert [fetch(client, "first", "second") for _ in range(5)] == ["b", "c", "d", "e", "f"]

    def test_waiting_fetches_share_one_claim_so_that_the_longest_is_served_first(self, slow, serve, monkeypatch):
        """If they were tried one by one, a job pushed meanwhile would go to an arbitrary client."""
        sets, real = [], CommitQueue._pop_set

        def spy(commit_queue):
            commands = real(commit_queue)
            sets.append([item.count for item, _ in commands if isinstance(item, FetchRequest)])
            return commands

        server = serve()
        clients = [RawClient.identified(server.address, **worker(f"w{n}")) for n in range(5)]
        for number, client in enumerate(clients):
            client.send("FETCH default")
            wait_until(lambda number=number: idle(server) == number + 1)
        monkeypatch.setattr(CommitQueue, "_pop_set", spy)
        store("a")
        server.wake()
        assert json.loads(clients[0].reply())["jid"] == jid("a")
        wait_until(lambda: idle(server) == 4)
        assert [found for found in sets if found] == [[1, 1, 1, 1, 1]]
        for client in clients:
            client.close()


class TestWaiting:
    @pytest.mark.tuning(low_watermark=2)
    def test_a_fetch_waits_for_a_running_prefetch_for_a_limited_time(self, slow, settings, serve):
        """The prefetched jobs come with an ACK that waits for another transaction."""
        settings.FAKTORY = {"POLL_INTERVAL": 600}
        server = serve()
        client, other = (RawClient.identified(server.address, **worker()) for _ in range(2))
        with closing(client), closing(other):
            store(*"abcdefgh")
            assert [fetch(client) for _ in range(3)] == ["a", "b", "c"]
            with transaction.atomic():
                Job.objects.select_for_update().get(jid=jid("a"))
                other.send(f'ACK {{"jid":"{jid("a")}"}}')
                wait_until(lambda: server.prefetch_buffer._prefetching)
                assert [fetch(client), fetch(client)] == ["d", "e"]
                asked_at = time.monotonic()
                assert fetch(client) == "f"
                assert time.monotonic() - asked_at >= waiting_fetches.MAX_DELAY_S / 2
            assert other.reply() == b"+OK"
            assert [fetch(client), fetch(client)] == ["g", "h"]


class TestGoingBack:
    @pytest.mark.tuning(hold_s=0.01)
    def test_unused_prefetched_jobs_are_released_to_their_old_position(self, client):
        store("a", "b", "c")
        places = {name: job(name).enqueued_at for name in "bc"}
        assert fetch(client) == "a"
        wait_until(lambda: Job.objects.filter(state="enqueued").count() == 2)
        assert {name: job(name).enqueued_at for name in "bc"} == places
        assert (job("b").wid, job("b").reserved_until) == ("", None)
        assert fetch(client) == "b"

    def test_a_stopping_server_releases_prefetched_jobs_and_confirms_delivered_ones(self, slow, serve):
        server = serve()
        client = RawClient.identified(server.address, **worker())
        store("a", "b", "c")
        assert [fetch(client), fetch(client)] == ["a", "b"]
        server.stop()
        wait_until(lambda: job("c").state == "enqueued")
        wait_until(lambda: job("b").wid == "wid-1")
        client.close()

    def test_a_job_is_released_if_its_client_disconnects_before_delivery(self, client, connect, monkeypatch):
        store("a", "b")
        assert fetch(client) == "a"
        other = connect(**worker())
        [session] = [one for one in client_connections(other) if one]
        monkeypatch.setattr(session, "_write", lambda _: session.abort() or False)
        other.send("FETCH default")
        wait_until(lambda: job("b").state == "enqueued")

    @pytest.mark.parametrize("command", ["QUEUE PAUSE default", "QUEUE PAUSE *"])
    def test_a_paused_queue_delivers_no_prefetched_jobs(self, client, command):
        store("a", "b", "c")
        assert fetch(client) == "a"
        assert client.ask(command) == b"+OK"
        assert fetch(client) is None
        wait_until(lambda: on_the_shelf() == "")
        assert client.ask("QUEUE RESUME *") == b"+OK"
        assert [fetch(client), fetch(client)] == ["b", "c"]

    def test_flush_removes_prefetched_jobs(self, client, settings):
        settings.FAKTORY = {"ALLOW_FLUSH": True}
        store("a", "b", "c")
        assert fetch(client) == "a"
        assert client.ask("FLUSH") == b"+OK"
        assert fetch(client) is None
        assert not Job.objects.exists()


class TestHandedOut:
    def test_a_delivered_job_with_an_expired_lease_belongs_to_its_next_worker(self, client, server, connect):
        store("a", "b")
        assert [fetch(client), fetch(client)] == ["a", "b"]
        Job.objects.filter(jid=jid("b")).update(state="enqueued", reserved_until=None)  # as if its lease had expired
        other = connect(**worker("wid-2"))
        assert fetch(other) == "b"
        assert ack(other, "b") == b"+OK"
        assert not Job.objects.filter(jid=jid("b")).exists()

    @pytest.mark.tuning(confirm_s=0.01)
    def test_a_delivered_job_that_keeps_running_is_confirmed(self, client):
        store("a", "b", reserve_for=600)
        assert [fetch(client), fetch(client)] == ["a", "b"]
        wait_until(lambda: job("b").claim > 0)
        one = job("b")
        assert (one.wid, one.state, one.claims) == ("wid-1", "working", 1)
        assert one.reserved_until == one.started_at + timedelta(seconds=600)

    def test_a_late_confirmation_does_not_restore_an_acknowledged_job(self, client, server):
        store("a", "b")
        assert [fetch(client), fetch(client)] == ["a", "b"]
        _, handed = server.deliveries._unconfirmed[jid("b")]
        assert ack(client, "b") == b"+OK"
        OrmBroker("default").confirm([Delivery(handed, 0.0)])
        assert not Job.objects.filter(jid=jid("b")).exists()
        assert jid("b") not in server.deliveries._unconfirmed

    def test_another_worker_cannot_end_an_unconfirmed_job(self, client, connect):
        store("a", "b")
        assert [fetch(client), fetch(client)] == ["a", "b"]
        stranger = connect(**worker("wid-2"))
        assert ack(stranger, "b") == b"+OK"
        assert stranger.ask(f'FAIL {{"jid":"{jid("b")}","errtype":"E","message":"m"}}') == b"+OK"
        assert job("b").state == "working"
        assert ack(client, "b") == b"+OK"
        assert not Job.objects.filter(jid=jid("b")).exists()

    def test_a_confirmation_is_not_repeated_while_one_is_running(self):
        asked, loop = [], asyncio.new_event_loop()
        handed = DeliveryTracker(confirm=lambda jobs, callback: asked.append((len(jobs), callback)), loop=loop)
        handed.add(Reservation(jid="job-a...", queue="default", text="{}", wid="w1", attempt=1))
        handed.confirm_all()
        handed._confirm_due()
        assert [jobs for jobs, _ in asked] == [1]
        for left in (BrokerUnavailable("database unavailable"), {"job-a..."}):
            asked.pop()[1](left)
            handed.confirm_all()
            assert [jobs for jobs, _ in asked] == [1], "the confirmation is still due"
        asked.pop()[1](set())
        handed.confirm_all()
        assert not asked
        loop.close()

    def test_a_job_may_fail_before_its_delivery_is_confirmed(self, client):
        store("a", "b")
        assert [fetch(client), fetch(client)] == ["a", "b"]
        assert client.ask(f'FAIL {{"jid":"{jid("b")}","errtype":"E","message":"m"}}') == b"+OK"
        assert job("b").state == "retries"


def idle(server):
    """Return the number of FETCHes that wait and are in no claim."""
    index = server.fetch_queue._waiting
    return sum(
        waiting_fetch.is_kept and not waiting_fetch.in_claim and waiting_fetch not in index._untried
        for waiting_fetch in list(index)
    )


def client_connections(client):
    """Return the server's `Connection` objects for a client."""
    import gc

    from django_faktory.server.connection import Connection

    mine = client.socket.getsockname()
    return [
        one
        for one in gc.get_objects()
        if type(one) is Connection and one._transport and one._transport.get_extra_info("peername") == mine
    ]
