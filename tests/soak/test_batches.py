"""Batches under everything at once: failures, doubled ACKs, members that add members, COMMIT racing the last ACK.

What must hold is in reliability's B1 to B12. The full size: FAKTORY_SOAK_BATCHES=200.
"""

import os
import random
import threading
import uuid

import pytest
from django.db import connections

from django_faktory.admission import parse_job
from django_faktory.brokers.orm import OrmBroker
from django_faktory.errors import FaktoryError
from django_faktory.models import Batch, Job
from django_faktory.payloads import Ack, FetchRequest, NewBatch, failure
from django_faktory.store import batches, operations

pytestmark = pytest.mark.django_db(transaction=True)

BATCHES = int(os.environ.get("FAKTORY_SOAK_BATCHES", "12"))
MEMBERS = 50 if BATCHES >= 100 else 12
WORKERS = 16 if BATCHES >= 100 else 6
RACES = 1000 if BATCHES >= 100 else 30


def job(jobtype, **custom):
    told = ",".join(f'"{key}":"{value}"' for key, value in custom.items())
    return parse_job(f'{{"jid":"{uuid.uuid4().hex}","jobtype":"{jobtype}","args":[],"custom":{{{told}}}}}')


class Torture:
    """Workers that fail, say everything twice and add to their batches; and what they saw."""

    def __init__(self):
        self.callbacks = []  # (bid, kind) in the order they ran
        self.noting = threading.Lock()
        self.over = threading.Event()
        self.errors = []

    def work(self, number):
        chance, broker, wid = random.Random(number), OrmBroker("default"), f"w{number}"
        try:
            while not self.over.is_set():
                [found] = broker.fetch([FetchRequest(queues=("default",), wid=wid, count=chance.randint(1, 5))])
                for one in found:
                    self._do(broker, chance, one)
                if not found:
                    self.over.wait(0.01)
        except Exception as error:  # noqa: BLE001 (handed to the test)
            self.errors.append(error)
        finally:
            connections.close_all()

    def _do(self, broker, chance, one):
        text = one.text
        if '"jobtype":"callback"' in text:
            custom = text.split('"_bid":"')[1]
            with self.noting:
                self.callbacks.append((custom.split('"')[0], text.split('"_cb":"')[1].split('"')[0]))
        elif chance.random() < 0.1 and one.attempt == 1:
            report = failure(jid=one.jid, wid=one.wid, attempt=one.attempt, errtype="E", message="m", retry_in_s=0)
            broker.fail([report] * (1 + (chance.random() < 0.05)))
            return
        elif one.attempt == 1 and chance.random() < 0.05:  # later, complete may have been enqueued
            bid = text.split('"bid":"')[1].split('"')[0]
            more = job("member", bid=bid)
            assert broker.push([more]) == [None], "a running member may add"
        ack = Ack(jid=one.jid, wid=one.wid, attempt=one.attempt)
        broker.ack([ack] * (2 if chance.random() < 0.05 else 1))
        if chance.random() < 0.05:
            broker.ack([ack])


def make(parent, depth, chance):
    """A tree of batches; returns the bids, parents first."""
    broker = OrmBroker("default")
    callbacks = {kind: job("callback") for kind in ("complete", "success") if depth or chance.random() < 0.7}
    callbacks = callbacks or {"success": job("callback")}
    bid = broker.new_batch(NewBatch(parent_bid=parent, **callbacks))
    count = chance.randrange(MEMBERS)
    assert broker.push([job("member", bid=bid) for _ in range(count)]) == [None] * count
    found = [bid]
    if depth < 2 and chance.random() < 0.6:
        found += make(bid, depth + 1, chance)
    broker.commit_batch(bid)
    return found


def place(torture, bid, kind):
    """When this callback ran, among all of them; None where it did not."""
    return torture.callbacks.index((bid, kind)) if (bid, kind) in torture.callbacks else None


def test_batches_keep_their_invariants_whatever_comes_together():
    torture = Torture()
    threads = [threading.Thread(target=torture.work, args=[number]) for number in range(WORKERS)]
    for thread in threads:
        thread.start()
    bids, chance = [], random.Random(7)
    try:
        while len(bids) < BATCHES:
            bids += make("", 0, chance)
        for _ in range(6000):
            if not Batch.objects.filter(finished_at=None).exists() or torture.errors:
                break
            late = Job.objects.filter(state="retries").values_list("pk", flat=True)
            operations.requeue(list(late), using="default")
            torture.over.wait(0.01)
    finally:
        torture.over.set()
        for thread in threads:
            thread.join(60)
    assert torture.errors == []
    rows = {row.bid: row for row in Batch.objects.all()}
    assert sorted(rows) == sorted(bids)
    assert [row.bid for row in rows.values() if not row.is_over] == [], "all came to an end"
    for row in rows.values():
        assert (row.pending, row.unrun, row.failed, row.open_children, row.unsucceeded_children) == (0, 0, 0, 0, 0)
        assert (row.complete_st, row.success_st) == ("2", "2")
        ran = [kind for bid, kind in torture.callbacks if bid == row.bid]
        assert ran == [kind for kind in ("complete", "success") if getattr(row, kind)], "each once, in order"
        for kind in ("complete", "success"):  # a parent's complete need not wait for a child's last retry
            own, parents = place(torture, row.bid, kind), place(torture, row.parent_bid, kind)
            assert own is None or parents is None or own < parents, "the child's comes first"
    assert not Job.objects.exists()
    assert batches.sweep(using="default") == 0


def test_a_commit_that_races_the_last_ack_fires_once():
    broker = OrmBroker("default")
    for _ in range(RACES):
        bid = broker.new_batch(NewBatch(success=job("callback")))
        broker.push([job("member", bid=bid)])
        [[member]] = broker.fetch([FetchRequest(queues=("default",), wid="w", count=1)])
        barrier = threading.Barrier(2)
        errors = []

        def at_once(verb, *args, barrier=barrier, errors=errors):
            try:
                barrier.wait(10)
                verb(*args)
            except FaktoryError as error:
                errors.append(error)
            finally:
                connections.close_all()

        racers = [
            threading.Thread(target=at_once, args=(broker.commit_batch, bid)),
            threading.Thread(target=at_once, args=(broker.ack, [Ack(jid=member.jid, wid="w", attempt=1)])),
        ]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join(30)
        assert errors == []
        [[callback]] = broker.fetch([FetchRequest(queues=("default",), wid="w", count=9)])
        broker.ack([Ack(jid=callback.jid, wid="w", attempt=1)])
        assert broker.batch_status(bid).success_st == "2"
