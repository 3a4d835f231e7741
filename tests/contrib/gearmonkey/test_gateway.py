"""Test the gateway: it stores GearMonkey jobs as rows and writes results back, even if a process dies."""

import json
import os
import signal
import sqlite3
import threading
from datetime import timedelta

import psutil
import pytest
from django.db import connection
from django.test import override_settings

from django_faktory import brokers, conf
from django_faktory.contrib.gearmonkey import OPT_BLOCKING, Status
from django_faktory.contrib.gearmonkey.gateway import Gateway
from django_faktory.contrib.gearmonkey.redis_worker import MAX_DEATHS, RedisWorker
from django_faktory.contrib.gearmonkey.registry import served_tasks
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job
from django_faktory.testing import drain
from tests.contrib.gearmonkey import tasks  # noqa: F401  (it registers them)
from tests.runtime.processes.conftest import runfaktory  # noqa: F401  (a fixture)
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

FUNCTIONS = ("shout", "add", "fails", "flaky")


@pytest.fixture(autouse=True)
def gateway_mode():
    with override_settings(FAKTORY={"GEARMONKEY_MODE": "gateway"}):
        yield


@pytest.fixture
def make_gateway(server):
    """Return a function that makes a `Gateway`, which the test runs round by round."""

    def make(wid="b1", lease_s=20.0):
        functions = {fn: task for fn, task in served_tasks().items() if fn in FUNCTIONS}
        redis_worker = RedisWorker(server.client(), list(functions), wid=wid, lease_s=lease_s)
        return Gateway(redis_worker, brokers.get_broker(), conf.get("DATABASE"), functions)

    return make


def idle(gateway):
    while gateway.round() == 0.0:
        pass


def newest(program):
    """Return the pid of the living child that was started last, or None."""
    return max((child.pid for child in program.children() if child.status() != psutil.STATUS_ZOMBIE), default=None)


def succeeded(client, ids):
    return all(client.get("shout", id).status is Status.SUCCESS for id in ids)


def outcome(client, fn, id):
    job = client.get(fn, id)
    return job.status, job.text


def test_a_job_becomes_a_row_and_its_result_is_written_back(make_gateway, client, redis):
    here = make_gateway()
    ids = [client.run("shout", "hello"), client.run("add", [2, 3])]
    idle(here)
    assert sorted(Job.objects.values_list("jobtype", flat=True)) == [
        "tests.contrib.gearmonkey.tasks.add",
        "tests.contrib.gearmonkey.tasks.shout",
    ]
    assert client.get("shout", ids[0]).status is Status.BUSY
    drain()
    idle(here)
    assert outcome(client, "shout", ids[0]) == (Status.SUCCESS, "HELLO")
    assert outcome(client, "add", ids[1]) == (Status.SUCCESS, "5")
    assert [key for key in redis.keys("gm:*") if b":meta:" in key or b":held:" in key or b":lease:" in key] == []


def test_a_gateway_job_is_retried_like_any_other_job(make_gateway, client):
    here = make_gateway()
    id = client.run("flaky", "")
    idle(here)
    drain(until=timedelta(minutes=5))
    idle(here)
    assert outcome(client, "flaky", id) == (Status.SUCCESS, "3")


def test_a_dead_job_is_reported_to_the_client_as_an_error(make_gateway, client):
    here = make_gateway()
    id = client.run("fails", "no luck")
    idle(here)
    drain(raise_errors=False)
    idle(here)
    assert outcome(client, "fails", id) == (Status.ERROR, "ValueError: no luck")


def test_a_removed_row_is_reported_to_the_client_as_an_error(make_gateway, client):
    here = make_gateway()
    id = client.run("shout", "x")
    idle(here)
    Job.objects.all().delete()
    idle(here)
    assert outcome(client, "shout", id) == (Status.ERROR, "JobRemoved: its row was removed")


def test_invalid_input_creates_no_row(make_gateway, client):
    here = make_gateway()
    id = client.run("shout", b"\xff")
    idle(here)
    assert client.get("shout", id).text.startswith("InvalidInput: input: expected UTF-8")
    assert not Job.objects.exists()


@pytest.mark.skipif(connection.vendor != "sqlite", reason="only SQLite has a limit that a session can set")
def test_a_job_that_the_database_refuses_ends_with_the_reason_and_the_others_are_stored(make_gateway, client):
    here = make_gateway()
    first, large, last = (client.run("shout", text) for text in ("a", "x" * 20_000, "b"))
    connection.ensure_connection()
    before = connection.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)
    try:
        idle(here)
    finally:
        connection.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, before)
    status, text = outcome(client, "shout", large)
    assert status is Status.ERROR
    assert text.startswith("InvalidPayload: invalid payload: the database cannot store a value that is too long")
    assert Job.objects.count() == 2
    drain()
    idle(here)
    assert succeeded(client, [first, last])


def test_a_gateway_that_dies_before_the_handover_leaves_one_row(make_gateway, client, monkeypatch):
    """The row is committed, its lease is not handed over: the next gateway finds the row and creates no second one."""
    dead, heir = make_gateway("dead", lease_s=0.05), make_gateway("heir")
    id = client.run("shout", "x")
    taken = dead._redis_worker.take(1)
    dead._redis_worker.hand_over = lambda job: (_ for _ in ()).throw(ConnectionError("killed"))
    with pytest.raises(ConnectionError):
        dead._store_jobs(taken)
    assert Job.objects.count() == 1
    wait_until(lambda: heir._redis_worker.sweep().requeued == [f"shout:{id}"])
    idle(heir)
    assert Job.objects.count() == 1
    drain()
    idle(heir)
    assert outcome(client, "shout", id) == (Status.SUCCESS, "X")


def test_a_database_outage_counts_as_no_dead_worker(make_gateway, client, monkeypatch):
    here = make_gateway(lease_s=0.2)
    id = client.run("shout", "x")
    with monkeypatch.context() as patch:
        patch.setattr(
            here._broker, "push", lambda jobs: (_ for _ in ()).throw(BrokerUnavailable("database unavailable"))
        )
        for _ in range(2 * MAX_DEATHS):
            with pytest.raises(BrokerUnavailable):
                here.round()
            assert client.get("shout", id).status is Status.IDLE
    assert here._redis_worker.sweep() == ([], [])
    idle(here)
    drain()
    idle(here)
    assert outcome(client, "shout", id) == (Status.SUCCESS, "X")


def test_a_finished_row_is_not_rerun_by_the_next_gateway(make_gateway, client):
    dead, heir = make_gateway("dead", lease_s=0.05), make_gateway("heir")
    id = client.run("shout", "x")
    idle(dead)
    drain()
    attempts = Job.objects.get().attempt

    def adopted():
        heir._beat_at = 0.0
        idle(heir)
        return client.get("shout", id).status is Status.SUCCESS

    wait_until(adopted)
    assert Job.objects.get().attempt == attempts
    assert heir._redis_worker.sweep().requeued == []
    dead._write_outcomes()
    assert outcome(client, "shout", id) == (Status.SUCCESS, "X")


def test_a_job_with_a_row_is_not_requeued_when_its_gateway_dies(make_gateway, client, redis):
    dead, other = make_gateway("dead", lease_s=0.01), make_gateway("other")
    client.run("shout", "x")
    idle(dead)
    for _ in range(3):
        assert other._redis_worker.sweep().requeued == []
    assert redis.llen("queue:shout:normal") == 0


def test_another_gateway_takes_over_at_once_when_one_unregisters(make_gateway, client):
    first, second = make_gateway("first"), make_gateway("second")
    id = client.run("shout", "x")
    idle(first)
    first._shut_down()
    drain()
    idle(second)
    assert outcome(client, "shout", id) == (Status.SUCCESS, "X")


@pytest.mark.slow
def test_runfaktory_runs_a_gateway_and_kills_lose_no_job(runfaktory, server, client, redis):  # noqa: F811
    program = runfaktory(
        *("--worker-only", "--processes", "1", "--concurrency", "2", "--gearmonkey", server.url),
        environment={"FAKTORY_TEST_APPS": "tests.contrib.gearmonkey"},
        GEARMONKEY_MODE="gateway",
        GEARMONKEY_LEASE=2,
    )
    wait_until(lambda: int(redis.get("count:shout") or 0) > 0, what=program.lines)
    assert "GearMonkey gateway at" in program.text
    ids = []
    stopping = threading.Event()

    def make():
        while not stopping.wait(0.01):
            ids.append(client.run("shout", f"job {len(ids)}"))

    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _ in range(3):
            before = len(ids)
            wait_until(lambda before=before: len(ids) > before + 50, 60)
            os.kill(wait_until(lambda: newest(program), 60), signal.SIGKILL)
            # wait until each is done before the next kill: the third lost worker ends a job
            wait_until(lambda made=tuple(ids): succeeded(client, made), 120, every_s=0.5)
    finally:
        stopping.set()
        thread.join()
    wait_until(lambda: succeeded(client, ids), 120, every_s=0.5)
    assert [client.get("shout", id).text for id in ids] == [f"JOB {number}" for number in range(len(ids))]
    job = client.get("add", client.run("add", [1, 2], options=[OPT_BLOCKING], timeout=20))
    assert json.loads(job.text) == 3
    program.signal(signal.SIGTERM)
    assert program.code() == 0
