"""Locks with real workers and servers: cases L04, L19, L20, L22, L24, L28."""

import random
import threading

import pytest
from django.db import connections

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.locket import Locket, locket
from django_faktory.core.payloads import Ack, Beat, FetchRequest, failure
from django_faktory.models import Job, JobLock
from django_faktory.store import workers
from django_faktory.store.locks import locks
from django_faktory.store.maintenance import due
from django_faktory.store.notifier import publisher
from django_faktory.store.notifier.base import PollingListener
from django_faktory.store.store import Store
from tests.factories import payload
from tests.server.conftest import connect, serve, server, transport  # noqa: F401  (fixtures)
from tests.store.locks import tasks
from tests.store.locks.conftest import holders, jid
from tests.store.locks.places import Place
from tests.waiting import wait_until
from tests.worker.conftest import state, work  # noqa: F401  (fixtures)

pytestmark = pytest.mark.django_db(transaction=True)


# --- our worker


def test_the_worker_timer_extends_a_lock_while_its_job_runs(work, state):  # noqa: F811
    """Check this without BEATs, over at least 2.5 s with a lease of 1 s (L19)."""
    broker = OrmBroker("default", locket=Locket(locket(heartbeat_frequency=0.1, job_lock_duration=1)))
    extensions = []
    real = broker.extend_locks
    broker.extend_locks = lambda tokens: extensions.append(tokens) or real(tokens)
    first, second = tasks.held.enqueue("a"), tasks.held.enqueue("b")
    work(broker, beat_interval=60)
    running = tasks.Gate.wait_for("a")
    began_at = JobLock.objects.get().expires_at
    wait_until(lambda: len(extensions) >= 25)
    assert JobLock.objects.get().expires_at > began_at
    assert locks.mark_expired(using="default") == 0
    assert Job.objects.get(jid=second.id).state == "blocked"
    running.opened.set()
    tasks.Gate.wait_for("b").opened.set()
    assert state(first, "succeeded").jid == first.id
    assert state(second, "succeeded").jid == second.id
    assert holders() == []


def test_a_worker_fetches_the_next_job_of_a_key_without_polling(work, state, monkeypatch):  # noqa: F811
    jobs = [tasks.by_shop.enqueue(1, page) for page in range(5)]
    woken = []
    monkeypatch.setattr(publisher, "_local_receivers", [lambda _: [one.wake() for one in woken]])
    woken.append(work(listen=PollingListener, poll_interval=600).worker)
    for job in jobs:
        state(job, "succeeded")


def test_the_task_context_exposes_the_lock_token_and_lock_loss(work, state):  # noqa: F811
    """Check `lock_token` and `lock_lost` of the task's context (L22)."""
    broker = OrmBroker("default", locket=Locket(locket(heartbeat_frequency=0.05, job_lock_duration=1)))
    stale = tasks.watching.enqueue()
    work(broker, beat_interval=60)
    gate = tasks.Gate.wait_for("watching")
    token = JobLock.objects.get().pk
    assert (gate.context.lock_token, gate.context.lock_lost) == (token, False)
    JobLock.objects.all().delete()  # as if it had been paused, and another job had had the key since
    wait_until(lambda: gate.context.lock_lost)
    gate.opened.set()
    assert state(stale, "succeeded").jid == stale.id


def test_a_lock_key_may_be_computed_from_the_task_arguments():
    tasks.by_shop.enqueue(1, page=1)
    tasks.by_shop.enqueue(1, page=2)
    tasks.by_shop.enqueue(2, page=1)
    tasks.by_shop.enqueue(0)
    keys = Job.objects.order_by("id").values_list("lock_key", "state")
    assert sorted(keys, key=str) == sorted(
        [("shop 1", "enqueued"), ("shop 1", "blocked"), ("shop 2", "enqueued"), (None, "enqueued")], key=str
    )


# --- over the wire


@pytest.fixture
def never_polls(settings):
    """Start no server that looks for jobs without a reason."""
    settings.FAKTORY = {**settings.FAKTORY, "POLL_INTERVAL": 600.0}


@pytest.mark.tuning(fetch_wait_s=600.0)
def test_an_ack_wakes_a_fetch_waiting_for_the_same_key(never_polls, server, connect, monkeypatch):  # noqa: F811
    """Cases L04 and L28."""
    monkeypatch.setattr(publisher, "_local_receivers", [server.wake])  # as runfaktory does
    holder, waiting = connect(wid="w1"), connect(wid="w2")
    for name in ("A", "A1"):
        assert holder.ask(f'PUSH {{"jid":"{jid(name)}","jobtype":"noop","args":[],"custom":{{"lock":true}}}}') == b"+OK"
    assert jid("A").encode() in holder.ask("FETCH default")
    waiting.send("FETCH default")
    wait_until(lambda: Job.objects.filter(state="blocked").count() == 1)
    assert holder.ask(f'ACK {{"jid":"{jid("A")}"}}') == b"+OK"
    assert jid("A1").encode() in waiting.reply()


def test_a_beat_command_extends_the_locks_of_its_worker(connect):  # noqa: F811
    """Check that BEAT extends the locks of its worker (L20)."""
    client = connect(wid="w1")
    client.ask(f'PUSH {{"jid":"{jid("A")}","jobtype":"noop","args":[],"custom":{{"lock":"key"}}}}')
    client.ask("FETCH default")
    before = JobLock.objects.get().expires_at
    assert client.ask('BEAT {"wid":"w1"}') == b"+OK"
    assert JobLock.objects.get().expires_at > before


# --- many at once


class Node:
    """One of several clients: claim jobs, and end, fail or abandon them. Each job is in its key's place meanwhile."""

    def __init__(self, broker, number, folder, done):
        self.broker, self.wid, self.rng = broker, f"w{number}", random.Random(number)
        self.folder, self.done = folder, done
        self.overlaps = []

    def run(self, total):
        while len(self.done) < total:
            due.enqueue_due(Store())
            [found] = self.broker.fetch(
                [FetchRequest(queues=("q1", "q2"), wid=self.wid, count=self.rng.choice((1, 3)))]
            )
            places = [self._entered(job) for job in found]
            while found and self._end(found.pop(0), places):
                pass
            for place in places:
                place.leave()
        connections.close_all()

    def _entered(self, job):
        place = Place(self.folder, job.lock_key)
        inside = place.enter(job.jid)
        if inside is not None:
            self.overlaps.append((job.lock_key, inside, job.jid))
        return place

    def _end(self, job, places):
        """End the job. Return False if the worker unregisters and so abandons all its jobs."""
        self.broker.beat([Beat(wid=self.wid)])  # a statement during which other threads can run
        places.pop(0).leave()
        chance = self.rng.random()
        if chance < 0.1:
            self.broker.fail([failure(jid=job.jid, wid=self.wid, errtype="E", retry_in_s=0.01)])
        elif chance < 0.15:
            while places:
                places.pop().leave()
            workers.unregister(Store(), [self.wid])
            return False
        elif self.broker.ack([Ack(jid=job.jid, wid=self.wid, attempt=job.attempt)]) == [True]:
            self.done.append(job.jid)
        return True


@pytest.mark.slow
def test_eight_clients_with_ten_keys_never_overlap_and_lose_no_job(node, tmp_path):
    """Check exclusion and completeness with 8 clients, 10 keys and 300 jobs (L24)."""
    total, names = 300, "ABCDEFGHIJ"
    one = node()
    for start in range(0, total, 100):
        one.broker.push(
            [
                payload(jid=f"n{number}", args=[names[number % 10]], queue=("q1", "q2")[number % 2])
                for number in range(start, start + 100)
            ]
        )
    done = []
    nodes = [Node(node().broker, number, tmp_path, done) for number in range(8)]
    threads = [threading.Thread(target=client.run, args=(total,)) for client in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert [overlap for client in nodes for overlap in client.overlaps] == []
    assert sorted(done) == sorted(set(done))
    assert (len(done), Job.objects.count(), holders()) == (total, 0, [])
