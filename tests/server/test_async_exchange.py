"""Commands that run on the event loop, over connections that it owns; PostgreSQL only.

Rules: W10, W14, W29, W30; ADR 0005.
"""

import json
import os
import socket
from contextlib import closing
from functools import partial

import pytest
from django.db import connection, transaction
from django.db.utils import ConnectionHandler

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.locket import Locket
from django_faktory.core.payloads import Ack, JobPayload
from django_faktory.models import Job, JobLock, Queue
from django_faktory.runtime import db_watchdog
from django_faktory.server.group_commit import CommitQueue
from django_faktory.store import transactions
from django_faktory.store.dialects.postgresql import pipeline
from django_faktory.store.dialects.postgresql.loop_connection import PostgresqlLoopConnection
from django_faktory.store.dialects.postgresql.prepared import Command
from tests.bouncer import needs_session
from tests.factories import JobFactory
from tests.server.raw import RawClient, push, worker
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), needs_session("prepared statements need a session")]

ENOUGH = 30
"""Number of jobs after which the event loop has both of its connections, with a margin."""


@pytest.fixture(autouse=True)
def on_postgresql():
    if connection.vendor != "postgresql" or not pipeline.has_psycopg3():
        pytest.skip("about PostgreSQL with psycopg 3")
    yield
    Command.works = True


@pytest.fixture
def given(monkeypatch):
    """Record each set that a thread runs instead of the event loop."""
    sets, real = [], CommitQueue._execute_in_thread

    def spy(commit_queue, lane, items):
        sets.append([type(item).__name__ for item in items])
        return real(commit_queue, lane, items)

    monkeypatch.setattr(CommitQueue, "_execute_in_thread", spy)
    return sets


@pytest.fixture
def broker():
    """The broker as `runfaktory` makes it: another thread sends the hints."""
    return OrmBroker("default", announce=lambda *_: None, announces_in_thread=True)


@pytest.fixture
def client(serve, broker, given):
    """A worker's client on a server with an event loop that has its connections."""
    server = serve(broker)
    client = RawClient.identified(server.address, **worker())
    client.server = server
    for _ in range(ENOUGH):
        one_job(client)
    given.clear()
    yield client
    client.close()


def one_job(client):
    assert client.ask(push(jid="the-only-one")) == b"+OK"
    job = json.loads(client.ask("FETCH default"))
    assert client.ask(f'ACK {{"jid":"{job["jid"]}"}}') == b"+OK"
    return job


def sessions():
    """Return the backend pids that wait for a lock held by the test's session."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            " AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"
        )
        return [pid for (pid,) in cursor.fetchall()]


def end(pids):
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", [pids])


def suspend_process():
    """Block all changes of jobs by other sessions until the transaction ends."""
    with connection.cursor() as cursor:
        cursor.execute("LOCK TABLE django_faktory_job IN SHARE ROW EXCLUSIVE MODE")


def raw_connections(server):
    return [one.connection.connection for one in loop_connections(server)]


def loop_connections(server):
    return [lane.connection for lane in server.exchanges._lanes if lane.connection]


def test_an_exchange_on_the_event_loop_creates_no_connection_object(client, given, monkeypatch):
    """Each callback of the loop has its own `connections`: a look-up there makes a new wrapper, in 40 µs."""
    created, create = [], ConnectionHandler.create_connection

    def spy(handler, alias):
        created.append(alias)
        return create(handler, alias)

    monkeypatch.setattr(ConnectionHandler, "create_connection", spy)
    for _ in range(5):
        one_job(client)
    assert (given, created) == ([], [])


def test_push_fetch_and_ack_run_on_the_event_loop_without_a_thread(client, given):
    """W29: a job's PUSH, FETCH and ACK all run on the event loop."""
    job = one_job(client)
    assert given == []
    assert (job["jid"], job["queue"], job["args"]) == ("the-only-one", "default", [])
    assert not Job.objects.exists()


def test_a_reply_is_sent_only_after_the_commit(client, given):
    """W29: the reply follows the commit."""
    assert client.ask(push(jid="the-job-one")) == b"+OK"
    assert Job.objects.get().jid == "the-job-one"
    client.ask("FETCH default")
    assert Job.objects.get().state == "working"
    assert client.ask('ACK {"jid":"the-job-one"}') == b"+OK"
    assert not Job.objects.exists()
    assert given == []


def pushed_together(server, *jids):
    """Push jobs in one set and return the answers by jid."""
    answers = {}

    def submit():
        for jid in jids:
            job = JobPayload(jid=jid, jobtype="noop", queue="default", text='{"jobtype":"noop"}')
            server.push([job], partial(answers.__setitem__, jid))

    server.loop.call_soon_threadsafe(submit)
    wait_until(lambda: len(answers) == len(jids))
    return answers


def test_a_failing_job_is_refused_alone_and_its_set_is_retried(client, given):
    """W29: a statement that fails rolls back the whole set."""
    for number in range(ENOUGH):
        pushed_together(client.server, f"warming-{number}-1", f"warming-{number}-2")
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION refuse() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$ LANGUAGE plpgsql;"
            "CREATE TRIGGER refuse BEFORE INSERT ON django_faktory_job FOR EACH ROW WHEN (NEW.jid = 'job-poison')"
            " EXECUTE FUNCTION refuse()"
        )
    try:
        given.clear()
        pushed_together(client.server, "job-good-1", "job-good-2")
        assert given == [], "it needs no thread"
        answers = pushed_together(client.server, "job-good-3", "job-poison", "job-good-4")
        assert given == [["list"] * 3], "the thread executed all of it"
        assert answers.pop("job-poison").args == ("internal error",)
        assert answers == {"job-good-3": [None], "job-good-4": [None]}
        stored = Job.objects.filter(jid__startswith="job-").values_list("jid", flat=True)
        assert set(stored) == {f"job-good-{number}" for number in (1, 2, 3, 4)}
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION refuse CASCADE")


@pytest.mark.parametrize("line", [push(jid="the-job-two"), "FETCH default", 'ACK {"jid":"the-job-one"}'])
def test_a_database_connection_lost_during_a_command_is_reported_and_replaced(client, broker, given, line):
    """W30: the client gets an error, and the next set a new connection."""
    client.ask(push(jid="the-job-one"))
    with transaction.atomic():
        suspend_process()
        client.send(line)
        end(wait_until(sessions))
        assert client.reply() == b"-ERR database unavailable"
    assert given == []
    assert client.ask(push(jid="the-job-three")) == b"+OK"
    assert set(Job.objects.values_list("jid", flat=True)) == {"the-job-one", "the-job-three"}
    assert broker.claim_numbers.has_checks_left() == line.startswith("FETCH"), (
        "the broker checks for an unanswered claim"
    )
    assert json.loads(client.ask("FETCH default"))["jid"] == "the-job-one"


def test_a_database_connection_lost_while_idle_is_closed(client, given):
    """W30: otherwise the event loop would report the closed socket again and again."""
    connections = loop_connections(client.server)
    assert connections
    end([raw.info.backend_pid for raw in raw_connections(client.server)])
    wait_until(lambda: all(one.connection.connection is None for one in connections))
    assert client.ask(push(jid="the-job-one")) == b"+OK"
    assert len(given) == 1
    assert client.ask(push(jid="the-job-two")) == b"+OK"


def test_database_timeout_applies_to_commands_on_the_event_loop(serve, broker, given, monkeypatch):
    """Reliability class D2: DATABASE_TIMEOUT applies on the event loop too."""
    monkeypatch.setattr(transactions, "limit_attempt", transactions.limit_attempt)
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", dict(connection.settings_dict["OPTIONS"]))
    server = serve(broker)
    with closing(RawClient.identified(server.address, **worker())) as client:
        for _ in range(ENOUGH):
            one_job(client)
        given.clear()
        db_watchdog.enforce("default", 0.2, check_every_s=0.05)
        with transaction.atomic():
            suspend_process()
            assert client.ask(push(jid="the-job-one")) == b"-ERR database unavailable"
        assert given == []
        assert client.ask(push(jid="the-job-two")) == b"+OK"


def test_a_request_larger_than_the_socket_buffer_is_sent_in_parts(client, given, monkeypatch):
    sendings, real = [], PostgresqlLoopConnection._on_writable

    def spy(loop_connection):
        sendings.append(loop_connection)
        real(loop_connection)

    monkeypatch.setattr(PostgresqlLoopConnection, "_on_writable", spy)
    for raw in raw_connections(client.server):
        with socket.socket(fileno=os.dup(raw.fileno())) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    text = "x" * 300_000
    for turn in range(50):  # PostgreSQL may read fast enough that the socket never fills
        with transaction.atomic():
            suspend_process()  # block the backend while the client's text fills the socket
            client.send(push(jid=f"job-long-{turn}", args=[text]))
            wait_until(sessions)
        assert client.reply() == b"+OK"
        assert json.loads(client.ask("FETCH default"))["args"] == [text]
        if sendings:
            break
    assert sendings
    assert given == []


def test_a_claim_that_acquires_a_lock_runs_on_the_event_loop(client, given):
    client.ask(push(jid="job-locked", custom={"lock": "one at a time"}))
    given.clear()
    assert json.loads(client.ask("FETCH default"))["jid"] == "job-locked"
    assert given == []
    assert JobLock.objects.get().jid == "job-locked"


def test_invalid_locket_settings_refuse_a_fetch_on_the_event_loop(client, broker):
    """ADR 0015: a FETCH on the event loop checks the LOCKET settings too."""
    client.ask(push(jid="the-job-one"))
    broker.locket = Locket({"ENABLED": False, "HEARTBEAT_FREQUENCY": 0})
    assert client.ask("FETCH default").startswith(b"-ERR LOCKET: HEARTBEAT_FREQUENCY")
    assert Job.objects.get().state == "enqueued"


def test_an_ack_does_not_wait_for_counters_of_a_blocked_set(client, given):
    """Both sets add to the totals of the day."""
    server = client.server
    for jid in ("the-job-one", "the-job-two"):
        client.ask(push(jid=jid))
        client.ask("FETCH default")
    blocked, answers = JobFactory(), []
    with transaction.atomic():
        Job.objects.filter(pk=blocked.pk).update(sort_priority=1)
        jobs = [JobPayload(jid=blocked.jid, jobtype="noop", queue="default", text='{"jobtype":"noop"}')]

        def both():
            server.exchanges.submit(Ack(jid="the-job-one"), answers.append)
            server.push(jobs, answers.append)

        server.loop.call_soon_threadsafe(both)
        wait_until(sessions)
        for _ in range(ENOUGH):
            one_job(client)
        given.clear()
        assert client.ask('ACK {"jid":"the-job-two"}') == b"+OK"
        assert given == []
        assert answers == []
    wait_until(lambda: answers == [True, [None]])


def test_a_new_queue_is_stored_before_its_push_is_answered(client, given):
    assert client.ask(push(jid="in-a-new-queue", queue="unheard-of")) == b"+OK"
    assert Queue.objects.filter(name="unheard-of").exists()
    assert len(given) == 1


def test_a_queue_dropped_from_the_cache_is_stored_by_the_next_push(client, broker, given):
    """W29: the event loop must not query the database for it, nor fail the push."""
    Queue.objects.all().delete()
    broker._announce = lambda *_: broker._known_queues.clear()  # as when the cached names expire or are cleared
    assert client.ask(push(jid="the-job-one")) == b"+OK"
    assert given == []
    assert client.ask(push(jid="the-job-two")) == b"+OK"
    assert Queue.objects.get().name == "default"


def test_a_broker_subclass_that_overrides_push_is_not_bypassed(serve, given):
    class Counting(OrmBroker):
        pushed = 0

        def push(self, jobs):
            self.pushed += len(jobs)
            return super().push(jobs)

    broker = Counting("default", announce=lambda *_: None, announces_in_thread=True)
    client = RawClient.identified(serve(broker).address, **worker())
    for _ in range(ENOUGH):
        one_job(client)
    client.close()
    assert broker.pushed == ENOUGH


def test_a_stopping_server_closes_database_connections_of_the_event_loop(serve, broker, given):
    """W28."""
    server = serve(broker)
    with closing(RawClient.identified(server.address, **worker())) as client:
        for _ in range(ENOUGH):
            one_job(client)
        connections = raw_connections(server)
    server.stop()
    wait_until(server.loop.is_closed)
    assert connections
    assert all(raw.closed for raw in connections)
