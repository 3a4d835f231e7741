"""Nodes that are killed at random while clients push and work lose no job. `make soak` kills them more often."""

import itertools
import json
import os
import random
import threading

import pytest

from django_faktory.brokers.orm import OrmBroker
from django_faktory.models import Job
from tests.runtime.processes.test_nodes import kill
from tests.server.raw import RawClient, push, worker
from tests.waiting import wait_until

KILLS = int(os.environ.get("FAKTORY_SOAK_KILLS", "2"))
pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 + 30 * KILLS)]
WIDS = ("wid-0", "wid-1")
MOST_AHEAD = 500


class Roamer(threading.Thread):
    """A client that repeats each command until it is answered, and connects to another node if one does not answer."""

    def __init__(self, addresses, number):
        super().__init__(daemon=True)
        self.addresses, self.number = addresses, number
        self.hello = {}
        self.enough = threading.Event()
        self.error = None
        self._client = None

    def run(self):
        try:
            while not self.enough.is_set():
                self.live()
        except Exception as error:  # noqa: BLE001 (handed to the test)
            self.error = error
        finally:
            self._leave()

    def insist(self, line):
        """Return the reply of the first node that gives one."""
        while True:
            try:
                if self._client is None:
                    self._client = RawClient.identified(random.choice(self.addresses), **self.hello)
                reply = self._client.ask(line)
            except (OSError, AssertionError):  # refused, reset, or closed before HELLO was answered
                reply = b""
            if reply is None or reply[:1] not in (b"", b"-"):
                return reply
            self._leave()
            self.enough.wait(0.02)

    def _leave(self):
        if self._client is not None:
            self._client.close()
            self._client = None


class Producer(Roamer):
    """Push jobs, but wait while the consumers are far behind: a slow machine could not finish the backlog in time."""

    def __init__(self, *args, backlog):
        super().__init__(*args)
        self.accepted = set()
        self._backlog = backlog
        self._count = itertools.count()

    def live(self):
        if self._backlog() > MOST_AHEAD:
            self.enough.wait(0.02)
            return
        jid = f"job-{self.number}-{next(self._count):06d}"
        self.insist(push(jid=jid, queue=random.choice("ab")))
        self.accepted.add(jid)


class Consumer(Roamer):
    def __init__(self, *args):
        super().__init__(*args)
        self.hello = worker(WIDS[self.number])
        self.ended = set()

    def live(self):
        job = self.insist("FETCH a b")
        if job is not None:
            jid = json.loads(job)["jid"]
            self.insist(f"ACK {json.dumps({'jid': jid})}")
            self.ended.add(jid)


def is_all_done():
    OrmBroker("default").lost(WIDS)
    Job.objects.update(losses=0)  # no poison pills here
    return not Job.objects.exists()


def test_repeatedly_killed_nodes_lose_no_accepted_job(runfaktory, address):
    """Check that killed nodes lose no accepted job (W14, W29)."""

    def start():
        return runfaktory("127.0.0.1:0", "--server-only", "--no-reload")

    nodes = [(address(program), program) for program in [start(), start()]]
    addresses = [at for at, _ in nodes]
    consumers = [Consumer(addresses, number) for number in range(2)]

    def backlog():
        return sum(len(one.accepted) for one in producers) - sum(len(one.ended) for one in consumers)

    producers = [Producer(addresses, number, backlog=backlog) for number in range(3)]
    for client in (*producers, *consumers):
        client.start()
    for _ in range(KILLS):
        before = sum(len(one.accepted) for one in producers)
        wait_until(lambda before=before: sum(len(one.accepted) for one in producers) > before + 50, 60)
        threading.Event().wait(random.uniform(0, 0.2))
        place = random.randrange(2)
        kill(nodes[place])
        program = start()
        nodes[place] = address(program), program
        addresses[place] = nodes[place][0]
    for producer in producers:
        producer.enough.set()
        producer.join(60)
    accepted = set().union(*(one.accepted for one in producers))
    # Jobs claimed for a reply that no client received are released with their worker, and run again.
    wait_until(lambda: not Job.objects.filter(state="enqueued").exists(), 120)
    wait_until(is_all_done, 120, every_s=0.5)
    for consumer in consumers:
        consumer.enough.set()
        consumer.join(60)
    assert [one.error for one in (*producers, *consumers)] == [None] * 5
    assert accepted - set().union(*(one.ended for one in consumers)) == set()
    assert len(accepted) > 50 * KILLS
