"""Fixtures: a Redis server that is emptied for each test, and workers that are always stopped."""

import threading

import pytest

from django_faktory.contrib.gearmonkey import Client, Worker
from tests.conftest import _require
from tests.contrib.gearmonkey import servers
from tests.contrib.gearmonkey.naive import NaiveClient
from tests.services import redis_program
from tests.waiting import wait_until

LEASE_S = 1.0


@pytest.fixture(scope="session")
def own_server(tmp_path_factory):
    _require(redis_program())
    server = servers.RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.clean_up()


@pytest.fixture
def own(tmp_path):
    """Return a function that starts a Redis server with options, for this test only."""
    _require(redis_program())
    started = []

    def start(*options):
        started.append(servers.RedisServer(tmp_path, *options))
        return started[-1]

    yield start
    for one in started:
        one.clean_up()


@pytest.fixture
def server(own_server):
    client = own_server.client()
    client.config_set("maxmemory", 0)
    client.flushall()
    yield own_server
    client.close()


@pytest.fixture
def redis(server):
    client = server.client()
    yield client
    client.close()


@pytest.fixture
def client(server):
    with Client(server.url) as made:
        yield made


@pytest.fixture
def naive(redis):
    return NaiveClient(redis)


@pytest.fixture
def work(server):
    """Start a worker of this package in a thread: `work(fn=function, …)`."""
    started = []

    def start(lease_s=LEASE_S, **functions):
        worker = Worker(server.url, lease_s=lease_s, sweep_every_s=0.1)
        for fn, function in functions.items():
            worker.accept(fn, function)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        started.append((worker, thread))
        return worker

    yield start
    for worker, thread in started:
        worker.stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def events(server):
    """Return a function that waits for `count` events on `channel:f`, and returns all received events in order."""
    client = server.client()
    pubsub = client.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe("channel:f")
    received = []
    while pubsub.subscribed and not pubsub.channels:
        pubsub.get_message(timeout=0.1)
    pubsub.get_message(timeout=1)

    def wait_for_events(count):
        def enough():
            message = pubsub.get_message(timeout=0.01)
            if message:
                received.append(message["data"].decode())
            return len(received) >= count

        wait_until(enough, what=f"{count} events, so far {received}")
        while message := pubsub.get_message(timeout=0.05):
            received.append(message["data"].decode())
        return received

    yield wait_for_events
    pubsub.close()
    client.close()
