"""Test that a naive peer notices nothing of this package's workers but keys that begin with `gm:` (GearMonkey H13)."""

import re
import threading
from collections import defaultdict
from contextlib import contextmanager

import pytest

from django_faktory.contrib.gearmonkey import Worker
from tests.contrib.gearmonkey.naive import NaiveClient, NaiveWorker
from tests.waiting import wait_until

pytestmark = pytest.mark.once

SPOKEN = re.compile(r"(?:uid|count|job|queue|lock|gm):[\w:.{}-]+")
END = "this is the end"


def shout(input):
    return input.decode().upper()


@contextmanager
def overheard(server):
    """Collect each command until the block ends, with MONITOR: (client address, command, is sent by a script)."""
    received, listens = [], threading.Event()
    client = server.client()

    def listen():
        with client.monitor() as monitor:
            listens.set()
            while True:
                one = monitor.next_command()
                if END in one["command"]:
                    return
                by = one["client_address"], one["client_port"]
                received.append((by, one["command"], one["client_type"] == "lua"))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert listens.wait(60)
    try:
        yield received
    finally:
        server.client().echo(END)
        thread.join(60)


@contextmanager
def effects(server):
    """Collect the events of each key, in order, from keyspace notifications."""
    changes = defaultdict(list)
    redis = server.client()
    redis.config_set("notify-keyspace-events", "KA")
    pubsub = redis.pubsub(ignore_subscribe_messages=True)
    pubsub.psubscribe("__keyspace@0__:*")
    pubsub.get_message(timeout=1)
    yield changes
    redis.set("end", END)
    while True:
        message = pubsub.get_message(timeout=5)
        key = message["channel"].decode().partition(":")[2]
        if key == "end":
            break
        changes[key].append(message["data"].decode())
    redis.config_set("notify-keyspace-events", "")
    pubsub.close()


class Session:
    """Run a naive client's jobs with a worker; record its commands, answers, all keys named, and each key's events."""

    def __init__(self, server, worker):
        server.client().flushall()
        redis = server.client(single_connection_client=True)
        address = redis.client_info()["addr"].rpartition(":")[2]
        naive, self.answers = NaiveClient(redis), []
        with effects(server) as changes, overheard(server) as received, worker():
            wait_until(lambda: server.client().get("count:f") == b"1")
            for prio in ("normal", "high", "scheduled"):
                id = naive.run("f", prio, prio, blocking=True, rollcall=True, timeout=10, scheduled=1)
                self.answers.append((id, naive.answer, naive.get("f", id), round(redis.ttl(f"job:f:{id}"), -1)))
        self.commands = [
            command for (_, port), command, is_script in received if str(port) == address and not is_script
        ]
        self.named = {key for _, command, _ in received for key in SPOKEN.findall(command)}
        self.became = {key: visible(key, events) for key, events in changes.items() if not key.startswith("gm:")}


def visible(key, events):
    """Leave out a naive worker's EXPIRE of a lock: it has no effect after a waiting client popped the list."""
    return [event for event in events if not (key.startswith("lock:") and event == "expire")]


@pytest.fixture
def ours(server):
    @contextmanager
    def start():
        worker = Worker(server.url, lease_s=1.0, sweep_every_s=0.1)
        worker.accept("f", shout)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        yield
        worker.stop()
        thread.join(60)

    return start


@pytest.fixture
def theirs(server):
    return lambda: NaiveWorker(server.client(), "f", shout)


def test_h13_a_naive_client_sends_and_receives_the_same_with_our_worker(server, ours, theirs):
    with_ours, with_theirs = Session(server, ours), Session(server, theirs)
    assert with_ours.commands == with_theirs.commands != []
    assert with_ours.answers == with_theirs.answers
    assert [status[b"status"] for _, _, status, _ in with_ours.answers] == [b"success"] * 3


def test_h13_beyond_specified_keys_our_worker_changes_only_gm_keys(server, ours, theirs):
    with_ours, with_theirs = Session(server, ours), Session(server, theirs)
    assert with_ours.became == with_theirs.became
    assert {key.split(":")[0] for key in with_ours.became} == {"uid", "count", "job", "queue", "lock"}
    more = with_ours.named - with_theirs.named
    assert more
    assert {key.split(":")[0] for key in more} == {"gm"}
