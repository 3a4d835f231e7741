"""MUTATE, QUEUE, FLUSH, and quieting workers from the server's side, over raw sockets.

Rules: W5, W15, W21 to W25, W28.
"""

import json
import threading
from datetime import timedelta

import pytest
from django.utils import timezone

from django_faktory.brokers.orm import OrmBroker
from django_faktory.models import Job, Queue
from django_faktory.store import notifier, workers
from django_faktory.store.jobs import bulk
from tests.factories import JobFactory, QueueFactory, WorkerFactory
from tests.server.raw import RawClient, push, worker
from tests.waiting import wait_until

pytestmark = pytest.mark.once_if_quick


@pytest.fixture
def open_client():
    """Return a function that opens identified clients to any server; all are closed at the end of the test."""
    clients = []

    def start(server, **hello):
        clients.append(RawClient.identified(server.address, **hello))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@pytest.fixture
def polls_seldom(settings):
    """Never poll during a test, so that a job that arrives was not found by a poll."""
    settings.FAKTORY = {"POLL_INTERVAL": 600.0}


def waits(server, client, *queues):
    """Send FETCH, and return once it has found no job and waits."""
    client.send(f"FETCH {' '.join(queues)}")
    wait_until(
        lambda: any(fetcher.is_kept for fetcher in list(server.fetch_queue._waiting)), what="a fetcher that waits"
    )


def test_mutate_requeues_the_matching_jobs_and_is_answered_ok(connect):
    """W23: JSON with spaces is accepted too."""
    jobs = [JobFactory(dead=True, jobtype="a b"), JobFactory(dead=True)]
    client = connect()
    assert client.ask('MUTATE { "cmd": "requeue", "target": "dead", "filter": { "jobtype": "a b" } }') == b"+OK"
    assert [Job.objects.get(jid=job.jid).state for job in jobs] == ["enqueued", "dead"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('MUTATE {"cmd":"x","target":"dead"}', b"-ERR unknown mutate operation "),
        ('MUTATE {"cmd":"kill","target":"x"}', b"-ERR invalid target for mutation command"),
        ("MUTATE", b"-ERR invalid JSON: expected an object"),
        ("QUEUE x", b"-ERR no such QUEUE subcommand: x"),
        ("QUEUE PAUSE", b"-ERR QUEUE PAUSE: expected the names of queues"),
        ("QUEUE PAUSE fine b/d", b'-ERR cannot get "b/d" queue'),
        ("QUEUE LATENCY *", b"-ERR QUEUE LATENCY does not support wildcards"),
        ("queue PAUSE a", b"-ERR unknown command queue"),
    ],
)
def test_an_invalid_command_changes_nothing_and_keeps_the_connection_open(connect, line, message):
    """W5, W23, W24: the error line leaves the connection open."""
    JobFactory(dead=True)
    client = connect()
    assert client.ask(line).startswith(message)
    assert (Job.objects.get().state, Queue.objects.count()) == ("dead", 0)
    assert client.ask(push(jid="abcdefgh")) == b"+OK"


def test_a_requeue_mutation_wakes_waiting_fetches(polls_seldom, server, connect):
    """W23, W13: the fetcher gets the job before the next poll."""
    job = JobFactory(dead=True)
    fetcher, person = connect(**worker()), connect()
    waits(server, fetcher, "default")
    assert person.ask('MUTATE {"cmd":"requeue","target":"dead"}') == b"+OK"
    assert json.loads(fetcher.reply())["jid"] == job.jid


def test_a_waiting_fetch_gets_no_job_from_a_queue_paused_meanwhile(server, connect):
    """W24: on the original server such a fetch still gets the job."""
    fetcher, person = connect(**worker()), connect()
    waits(server, fetcher, "q")
    assert person.ask("QUEUE pause q") == b"+OK"
    assert person.ask(push(jid="abcdefgh", queue="q")) == b"+OK"
    assert fetcher.reply() is None
    assert Job.objects.get().state == "enqueued"


@pytest.mark.parametrize("names", ["q", "*"])
def test_a_resume_wakes_waiting_fetches(polls_seldom, server, connect, names):
    """W24: the fetcher gets the job before the next poll."""
    fetcher, person = connect(**worker()), connect()
    person.ask("QUEUE PAUSE q")
    person.ask(push(jid="abcdefgh", queue="q"))
    waits(server, fetcher, "q")
    assert person.ask(f"QUEUE RESUME {names}") == b"+OK"
    assert json.loads(fetcher.reply())["jid"] == "abcdefgh"


def test_a_resume_wakes_waiting_fetches_on_other_nodes(serve, open_client):
    """W24: a hint reaches the other nodes."""
    here, there = serve(), serve(listen=lambda: notifier.listen("default"))
    JobFactory(queue="q")
    QueueFactory(name="q", paused_at=timezone.now())
    fetcher = open_client(there, **worker())
    waits(there, fetcher, "q")
    assert open_client(here).ask("QUEUE RESUME q") == b"+OK"
    assert json.loads(fetcher.reply())["queue"] == "q"


def test_queue_latency_is_reported_in_seconds(connect):
    """W24: queue age in seconds, 0 for an unknown queue."""
    JobFactory(queue="q", enqueued_at=timezone.now() - timedelta(seconds=100))
    answer = connect().ask("QUEUE latency q unknown")
    assert b'"unknown":0}' in answer  # as the original server writes it, not 0.0
    latencies = json.loads(answer)
    assert latencies == {"q": pytest.approx(100, abs=20), "unknown": 0}
    assert json.loads(connect().ask("QUEUE LATENCY")) == {}


def test_queue_remove_of_all_deletes_only_enqueued_jobs(connect):
    """W24: only jobs in other states remain."""
    JobFactory(queue="a")
    JobFactory(queue="b")
    dead = JobFactory(dead=True)
    client = connect()
    assert client.ask("QUEUE REMOVE *") == b"+OK"
    assert [job.jid for job in Job.objects.all()] == [dead.jid]
    assert json.loads(client.ask("INFO"))["faktory"]["queues"] == {}


@pytest.mark.parametrize(
    ("debug", "setting", "is_allowed"),
    [(False, {}, False), (True, {}, True), (True, {"ALLOW_FLUSH": False}, False), (False, {"ALLOW_FLUSH": True}, True)],
)
def test_flush_is_refused_unless_allow_flush_or_debug_permits_it(
    settings, serve, open_client, debug, setting, is_allowed
):
    """W25: the project's DEBUG decides if ALLOW_FLUSH is not set."""
    settings.FAKTORY, settings.DEBUG = setting, debug
    JobFactory()
    reply = open_client(serve()).ask("FLUSH")
    if is_allowed:
        assert reply == b"+OK"
    else:
        assert reply == b'-ERR FLUSH is disabled; to allow it, set FAKTORY["ALLOW_FLUSH"] = True where the server runs'
    assert Job.objects.exists() is not is_allowed


def test_a_running_job_is_unknown_after_a_flush(settings, serve, open_client):
    """W25, W16, W17: ACK succeeds, FAIL reports an unknown job."""
    settings.FAKTORY = {"ALLOW_FLUSH": True}
    client = open_client(serve(), **worker())
    for jid in ("abcdefg1", "abcdefg2"):
        client.ask(push(jid=jid))
        client.ask("FETCH default")
    assert client.ask("FLUSH") == b"+OK"
    assert client.ask('ACK {"jid":"abcdefg1"}') == b"+OK"
    assert client.ask('FAIL {"jid":"abcdefg2"}') == b"-ERR Job not found abcdefg2"
    assert json.loads(client.ask("INFO"))["faktory"]["total_processed"] == 0


class _SlowBroker(OrmBroker):
    """OrmBroker that makes MUTATE wait until `may_end` is set."""

    def __init__(self):
        super().__init__("default")
        self.begun, self.may_end = threading.Event(), threading.Event()

    def mutate(self, mutation, *, should_continue):
        self.begun.set()
        assert self.may_end.wait(60)
        super().mutate(mutation, should_continue=should_continue)


def test_a_long_mutation_does_not_block_other_clients(serve, open_client):
    """W23: MUTATE runs apart from short commands."""
    broker = _SlowBroker()
    server = serve(broker)
    person = open_client(server)
    try:
        person.send('MUTATE {"cmd":"kill","target":"dead"}')
        assert broker.begun.wait(60)
        other = open_client(server, **worker("wid-other"))
        assert other.ask('BEAT {"wid":"wid-other"}') == b"+OK"
        assert json.loads(other.ask("INFO"))["faktory"]
        assert other.ask(push(jid="abcdefgh")) == b"+OK"
        assert json.loads(other.ask("FETCH default"))["jid"] == "abcdefgh"
        assert other.ask('ACK {"jid":"abcdefgh"}') == b"+OK"
        assert other.ask("QUEUE PAUSE q") == b"+OK"
        assert other.ask('MUTATE {"cmd":"explode","target":"dead"}').startswith(b"-ERR unknown")
    finally:
        broker.may_end.set()
    assert person.reply() == b"+OK"


def test_a_stopping_server_ends_a_long_mutation_between_two_steps(serve, open_client):
    """W28: completed steps stay, and the error asks the client to send the command again."""
    JobFactory.create_batch(2)
    Job.objects.bulk_create(JobFactory.many(bulk.CHUNK * 2, dead=True))

    def stop_after_the_first_step(alias, queues):
        server.stop()

    server = serve(OrmBroker("default", announce=stop_after_the_first_step))
    reply = open_client(server).ask('MUTATE {"cmd":"requeue","target":"dead"}')
    assert reply.startswith(b"-ERR shutdown in progress: the jobs so far were changed; send it again")
    assert Job.objects.filter(state="dead").count() == bulk.CHUNK


def test_a_waiting_fetch_takes_no_job_after_its_worker_is_quieted(server, connect):
    """W15: on each connection of the wid; other workers continue."""
    first, second, other = connect(**worker("wid-q")), connect(**worker("wid-q")), connect(**worker("wid-other"))
    waits(server, first, "default")
    workers.advance(["wid-q"], "quiet", using="default")
    assert other.ask(push(jid="abcdefgh")) == b"+OK"
    assert first.reply() is None
    assert second.ask("FETCH default") is None
    assert json.loads(other.ask("FETCH default"))["jid"] == "abcdefgh"


@pytest.mark.parametrize("state", ["quiet", "terminate"])
def test_every_node_answers_beats_with_the_requested_worker_state(serve, open_client, state):
    """W21: on every connection and node; the state cannot be reset."""
    clients = [open_client(serve(), **worker("wid-q")) for _ in range(2)]
    workers.advance(None, state, using="default")
    for client in clients:
        for beat in ('BEAT {"wid":"wid-q"}', 'BEAT {"wid":"wid-q","current_state":"running"}'):
            assert json.loads(client.ask(beat)) == {"state": state}


def test_the_number_of_workers_is_the_same_on_every_node(serve, open_client):
    """W22: the database counts them, so all nodes agree."""
    here, there = serve(), serve()
    open_client(here, **worker("wid-1"))
    open_client(there, **worker("wid-2"))
    open_client(there)
    WorkerFactory(wid="wid-gone", seen_at=timezone.now() - timedelta(hours=1))
    for node in (here, there):
        info = json.loads(open_client(node).ask("INFO"))["faktory"]
        assert info["tasks"]["Workers"] == {"reaped": 0, "size": 2}


@pytest.mark.parametrize(("hello", "by"), [({"hostname": "web-1", "pid": 77}, "web-1:77"), ({}, "127.0.0.1")])
def test_a_pause_records_the_client_that_asked_for_it(connect, hello, by):
    assert connect(**hello).ask("QUEUE PAUSE mail") == b"+OK"
    assert Queue.objects.values_list("paused_by", "pause_reason").get() == (by, "")
