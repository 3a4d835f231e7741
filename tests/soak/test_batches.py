"""Test the batch invariants B1 to B12 under all kinds of load at the same time.

The load: failures, duplicate ACKs, members that add jobs and children, operators' drops and kills, COMMIT racing the
last ACK. The full size: FAKTORY_SOAK_BATCHES=200.
"""

import os
import random
import threading
import time
from datetime import timedelta

import pytest
from django.db import connections
from django.utils import timezone

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.lifecycle import count_claims
from django_faktory.core.payloads import Ack, FetchRequest, NewBatch, failure
from django_faktory.errors import BatchClosed, FaktoryError
from django_faktory.models import Batch, Job
from django_faktory.store.batches import batches
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from tests.soak.batch_history import History, Insistent, insist, job
from tests.store import by_ids

BATCHES = int(os.environ.get("FAKTORY_SOAK_BATCHES", "12"))
IS_FULL = BATCHES >= 100
MEMBERS, WORKERS, RACES = (50, 16, 1000) if IS_FULL else (12, 6, 30)
FINAL_WITHIN_S = 60
DEEPEST = 2
pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.timeout(900 if IS_FULL else 600)]


class Turning(threading.Thread):
    """Call `turn` in a loop until `over` is set."""

    is_satisfied = True

    def __init__(self, history, number):
        super().__init__(daemon=True)
        self.history, self.wid = history, f"w{number}"
        self.chance, self.broker = random.Random(number), Insistent(OrmBroker("default"))
        self.over = threading.Event()
        self.error = None

    def run(self):
        try:
            while not self.over.is_set():
                self.turn()
        except Exception as error:  # noqa: BLE001 (handed to the test)
            self.error = error
        finally:
            connections.close_all()


class Upkeep(Turning):
    """Run the server's periodic maintenance, and requeue dead jobs as an operator would."""

    def turn(self):
        insist(due.enqueue_due, Store())
        dead = Job.objects.filter(state="dead").values_list("pk", flat=True)
        insist(by_ids.requeue, list(dead), using="default")
        self.over.wait(0.02)


class Hands(Turning):
    """Act as operators: drop some members and kill others, in any state."""

    is_satisfied = False

    def turn(self):
        waiting = Job.objects.filter(jobtype="member").exclude(state="working")
        picked = dict(waiting.order_by("?").values_list("pk", "jid")[:5])
        self.history.given_up |= set(picked.values())
        self.is_satisfied |= insist(by_ids.discard, list(picked)[:1], using="default") > 0
        insist(by_ids.kill, list(picked), using="default")
        self.over.wait(0.02)


class Torture(Turning):
    """A worker that fails, sends commands twice or late, and adds to the batches of the jobs that it runs."""

    def __init__(self, *args):
        super().__init__(*args)
        self.late = []

    def turn(self):
        request = FetchRequest(queues=("default",), wid=self.wid, count=self.chance.randint(1, 10))
        [found] = self.broker.fetch([request])
        self.report([one for one in found if self.ends_well(one)])
        if not found:
            self.over.wait(0.01)

    def ends_well(self, one):
        """Run a job, and return True if it must be acknowledged. A failure has already been reported."""
        if callback := self.history.callback_ran(one):
            self.refused_after(*callback)
            return True
        bid = self.history.member_ran(one)
        if self.chance.random() < 0.05:
            try:
                self.add(bid)
            except BatchClosed:  # too late: the job has already counted as executed
                assert count_claims(one.attempt) > 1 or one.jid in self.history.given_up
        if count_claims(one.attempt) == 1 and self.chance.random() < 0.1:
            verdict = "kill" if self.chance.random() < 0.2 else ""
            report = failure(
                jid=one.jid, wid=one.wid, attempt=one.attempt, errtype="E", message="m", retry_in_s=0, verdict=verdict
            )
            self.broker.fail([report] * (1 + (self.chance.random() < 0.05)))
            return False
        self.history.member_succeeded(one)
        return True

    def report(self, done):
        acks = [Ack(jid=one.jid, wid=one.wid, attempt=one.attempt) for one in done]
        twice = [ack for ack in acks if self.chance.random() < 0.05]
        if self.chance.random() < 0.3:
            for ack in acks:
                self.broker.ack([ack])
        elif acks:
            self.broker.ack([*acks, *(ack for ack in twice if self.chance.random() < 0.5)])
        self.broker.ack([*self.late, *twice]) if self.late or twice else None
        self.late = [ack for ack in acks if self.chance.random() < 0.02]

    def add(self, bid):
        """Add a job to the batch of the running job, or a child with jobs of its own."""
        if self.chance.random() < 0.8 or self.history.depth(bid) >= DEEPEST:
            self.history.push(self.broker, bid, 1)
        else:
            make(self.history, self.broker, self.chance, bid, 3)

    def refused_after(self, bid, _kind):
        """Check B9: a batch accepts no job, no opening and no child after its callback has run."""
        for attempt in (
            lambda: self.history.push(self.broker, bid, 1),
            lambda: self.broker.open_batch(bid, caller_wid=self.wid),
            lambda: self.broker.new_batch(NewBatch(parent_bid=bid, success=job("callback"))),
        ):
            with pytest.raises(BatchClosed, match=bid):
                attempt()


def make(history, broker, chance, parent, members):
    """Create a batch with members and perhaps children, and commit it, sometimes twice. Some have one callback only."""
    kinds = chance.choice([("complete", "success"), ("success",), ("complete",)])
    bid = history.new(broker, parent, kinds)
    history.push(broker, bid, members)
    if history.depth(bid) < DEEPEST and members > 3:
        for _ in range(chance.choice([0, 0, 1, 2])):
            make(history, broker, chance, bid, members)
    for _ in range(1 + (chance.random() < 0.1)):
        history.commit(broker, bid)
    return bid


def tortured(*others):
    """Run all the load until every batch has finished, and return the history."""
    history, chance, broker = History(), random.Random(7), Insistent(OrmBroker("default"))
    working = [Torture(history, number) for number in range(WORKERS)] + [kind(history, 99) for kind in others]
    for one in working:
        one.start()
    try:
        while len(history.batches) < BATCHES or not all(one.is_satisfied for one in working):
            assert [one.error for one in working if one.error] == []
            make(history, broker, chance, "", chance.choice([0, *[MEMBERS] * 9]))
        forgotten = [history.new(broker, "", ("complete", "success")) for _ in range(3)]
        for bid in forgotten:
            history.push(broker, bid, 3)
        made = time.monotonic()
        open_ones = Batch.objects.filter(finished_at=None).exclude(bid__in=forgotten)
        while open_ones.exists() or Job.objects.exists():  # B12: jobs of batches that are never committed run too
            assert time.monotonic() - made < FINAL_WITHIN_S, "all jobs ended in time"
            assert [one.error for one in working if one.error] == []
            working[0].over.wait(0.05)
        print(f"{history} final {time.monotonic() - made:.1f} s after the last COMMIT")  # noqa: T201
    finally:
        for one in working:
            one.over.set()
        for one in working:
            one.join(60)
    assert [one.error for one in working if one.error] == []
    assert batches.expire(Store(now=timezone.now() + timedelta(hours=1))) == len(forgotten)
    history.forget(forgotten)
    assert batches.sweep(Store()) == 0
    return history


def test_batches_keep_their_invariants_under_concurrent_load():
    history = tortured(Upkeep)
    assert history.violations() == []
    assert not Batch.objects.filter(expired_at=None, is_broken=True).exists()


def test_batches_keep_their_invariants_while_members_are_discarded_and_killed():
    history = tortured(Upkeep, Hands)
    assert history.violations() == []
    assert Batch.objects.filter(expired_at=None, is_broken=True).exists()
    assert Batch.objects.filter(is_broken=False).exists()


def test_a_commit_that_races_the_last_ack_runs_the_callback_once():
    broker = OrmBroker("default")
    ran = []
    for _ in range(RACES):
        bid = broker.new_batch(NewBatch(success=job("callback")))
        broker.push([job("member", bid=bid)])
        [[member]] = broker.fetch([FetchRequest(queues=("default",), wid="w", count=1)])
        barrier = threading.Barrier(2)
        errors = []

        def at_once(verb, *args, barrier=barrier, errors=errors):
            try:
                barrier.wait(60)
                verb(*args)
            except FaktoryError as error:
                errors.append(error)
            finally:
                connections.close_all()

        racers = [
            threading.Thread(target=at_once, args=(broker.commit_batch, bid)),
            threading.Thread(target=at_once, args=(broker.ack, [Ack(jid=member.jid, wid="w")])),
        ]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join(60)
        assert errors == []
        [[callback]] = broker.fetch([FetchRequest(queues=("default",), wid="w", count=9)])
        broker.ack([Ack(jid=callback.jid, wid="w")])
        ran.append(callback.jid)
        assert broker.batch_status(bid).success_st == "2"
    assert len(set(ran)) == RACES
    assert batches.sweep(Store()) == 0
