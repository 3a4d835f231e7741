"""Run every pair of verbs concurrently on the same rows, from several nodes: none may deadlock.

A retried deadlock counts too, because PostgreSQL counts each one that it resolves. The pairs run in random order, as
many as fit into the time; FAKTORY_TEST_PAIRS=600 allows 600 s, which is enough for all of them.
"""

import itertools
import os
import random
import time
from functools import partial

import pytest
from django.db import connection, transaction

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.job_parser import parse_job
from django_faktory.core.limits import Allowance
from django_faktory.core.payloads import Ack, Beat, FetchRequest, NewBatch, Reservation, WorkerIdentity, failure
from django_faktory.core.steps import StepRecord
from django_faktory.models import Batch, Job, JobLock, Limit
from django_faktory.store.batches import batches
from django_faktory.store.jobs import bulk, edits, failures, steps, transitions
from django_faktory.store.limits import definitions, limiters
from django_faktory.store.locks import locks
from django_faktory.store.maintenance import due
from django_faktory.store.statistics import deltas
from django_faktory.store.store import Store
from tests.deadlocks.nodes import count_deadlocks, run_concurrently
from tests.factories import payload
from tests.store import by_ids

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="one writer at a time"),
]

SECONDS = float(os.environ.get("FAKTORY_TEST_PAIRS", "15"))
ROUNDS = 3
WIDS = ("w1", "w2")
QUEUES = ("narrow", "default")
KEYS = 3


class World:
    """The rows that all verbs use."""

    def __init__(self):
        self.bids = []
        self.numbers = itertools.count()
        for wid in WIDS:
            OrmBroker("default").hello(WorkerIdentity(wid=wid))

    def fill(self):
        """Store jobs with and without locks, limits, batches and results; start some of them."""
        broker = OrmBroker("default")
        for scope, name, number in (("task", "noop", 3), ("queue", "narrow", 4), ("key", "mail", 3)):
            definitions.save_limit(scope, name, Allowance(concurrency=number), using="default")
        self.bids = [broker.new_batch(NewBatch(complete=payload(jobtype="done"))) for _ in range(2)]
        broker.push(self.jobs(24))
        for wid in WIDS:
            broker.fetch([FetchRequest(queues=QUEUES, wid=wid, count=6)])

    def jobs(self, count, *, unique=False):
        """Return jobs that reuse the same 48 jids and the same keys."""
        found = []
        for _ in range(count):
            at = next(self.numbers) % 48
            custom = {"lock": f"k{at % KEYS}"} if at % 2 else {}
            if at % 3 == 0:
                custom["limit"] = "mail"
            if at % 8 == 0 and self.bids:
                custom["bid"] = self.bids[at % 2]
            if unique:
                custom |= {"unique_for": 100 if at % 2 else 0.001, "unique_until": "start" if at % 4 else "success"}
            found.append(
                payload(
                    jid=f"pair-{at:04d}",
                    jobtype="noop" if at % 4 else "plain",
                    queue=QUEUES[at % 2],
                    args=[at % 6],
                    result_ttl=60 if at % 5 == 0 else None,
                    custom=custom,
                )
            )
        return sorted({job.jid: job for job in found}.values(), key=lambda job: job.jid)


def shuffled(rows, count=8):
    found = list(rows)
    random.shuffle(found)
    return found[:count]


def working():
    return shuffled(Job.objects.filter(state="working"))


def ids():
    return shuffled(Job.objects.exclude(state="working").values_list("pk", flat=True))


def batch(world):
    broker = OrmBroker("default")
    bid = broker.new_batch(NewBatch(complete=payload(jobtype="done"), parent_bid=""))
    broker.push([payload(jid=f"pair-{next(world.numbers) % 48:04d}", custom={"bid": bid})])
    broker.commit_batch(bid)


def commit(world):
    for bid in shuffled(Batch.objects.filter(committed_at=None).values_list("bid", flat=True), 2):
        batches.commit(Store(), bid)


def edit_limit(world):
    scope, name = random.choice([("task", "noop"), ("queue", "narrow"), ("key", "mail"), ("key", "mail:1")])
    definitions.save_limit(scope, name, Allowance(concurrency=random.randint(2, 5)), using="default")


def remove_limit(world):
    for one in shuffled(Limit.objects.all(), 1):
        definitions.remove(one, using="default")
        definitions.save_limit(one.scope, one.name, Allowance(concurrency=3), using="default")


def pause(world):
    definitions.pause(["noop"], using="default")
    definitions.resume(["noop"], using="default")


def edit(world):
    for row in shuffled(Job.objects.filter(state__in=["enqueued", "blocked"]), 2):
        text = row.payload

        def change(row, text=text):
            return edits.Edit(parse_job(text), 0, None)

        edits.edit(row.jid, change, using="default")


def exchange(world):
    acks = [Ack(jid=job.jid, wid=job.wid) for job in working()[:4]]
    requests = [FetchRequest(queues=QUEUES, wid=wid, count=2) for wid in WIDS]
    # An exchange that stores a jid waits for a transaction that ends the job with this jid, whatever locks it has.
    plain = [payload(jid=f"new-{next(world.numbers)}", custom={"lock": f"k{at}"} if at else {}) for at in range(KEYS)]
    OrmBroker("default").exchange(plain, acks, requests)


def held(count):
    return [
        Reservation(jid=row.jid, queue=row.queue, text="", wid=row.wid, attempt=row.attempt, permits=row.permits)
        for row in working()[:count]
    ]


def step(world):
    """Commit a step, and a chunk of a walk."""
    for job, done in zip(held(2), (None, next(world.numbers)), strict=False):
        with transaction.atomic():
            name = "walk" if done else f"step {next(world.numbers)}"
            OrmBroker("default").record_step(job, StepRecord(name=name, done=done))


def reap(world):
    Job.objects.filter(pk__in=[row.pk for row in working()[:1]]).update(reserved_until="2020-01-01T00:00:00Z")
    failures.reap(Store())


def expire_locks(world):
    token = JobLock.objects.order_by("?").values_list("pk", flat=True).first()
    JobLock.objects.filter(pk=token).update(expires_at="2020-01-01T00:00:00Z")
    locks.mark_expired(using="default")


def flush(world):
    for step in bulk.flush(Store()):
        step()
    world.fill()


VERBS = {
    "push": lambda world: OrmBroker("default").push(world.jobs(6)),
    "push unique": lambda world: OrmBroker("default").push(world.jobs(4, unique=True)),
    "fetch": lambda world: OrmBroker("default").fetch([FetchRequest(queues=QUEUES, wid=random.choice(WIDS), count=4)]),
    "ack": lambda world: OrmBroker("default").ack([Ack(jid=job.jid, wid=job.wid) for job in working()]),
    "keep logs": lambda world: OrmBroker("default").keep_logs(
        [Ack(jid=job.jid, wid=job.wid, log=("a line",)) for job in working()]
    ),
    "fail": lambda world: OrmBroker("default").fail(
        [failure(jid=job.jid, wid=job.wid, errtype="E") for job in working()]
    ),
    "put off": lambda world: OrmBroker("default").fail(
        [failure(jid=job.jid, wid=job.wid, errtype="E", verdict="later", retry_in_s=0.0) for job in working()[:3]]
    ),
    "release": lambda world: OrmBroker("default").release(held(4)),
    "step": step,
    "exchange": exchange,
    "beat": lambda world: OrmBroker("default").beat([Beat(wid=wid) for wid in WIDS]),
    "extend": lambda world: locks.extend_held(Store(), shuffled(JobLock.objects.values_list("pk", flat=True))),
    "lose": lambda world: failures.reclaim_lost(Store(), [random.choice(WIDS)]),
    "reap": reap,
    "set limit": edit_limit,
    "remove limit": remove_limit,
    "pause": pause,
    "sweep limiters": lambda world: limiters.sweep(using="default"),
    "sweep locks": lambda world: locks.sweep(using="default", pause=lambda _: None),
    "lapse": expire_locks,
    "due": lambda world: due.enqueue_due(Store()),
    "expire": lambda world: due.expire(Store()),
    "purge": lambda world: due.purge(Store()),
    "purge steps": lambda world: steps.purge(using="default"),
    "kill": lambda world: by_ids.kill(ids(), using="default"),
    "discard": lambda world: by_ids.discard(ids()[:3], using="default"),
    "requeue": lambda world: by_ids.requeue(ids(), using="default"),
    "start over": lambda world: by_ids.restart(ids(), using="default"),
    "cancel": lambda world: transitions.cancel(Store(), shuffled(Job.objects.values_list("jid", flat=True), 4)),
    "edit": edit,
    "free locks": lambda world: transitions.free_locks(
        shuffled(JobLock.objects.values_list("pk", flat=True), 2), using="default"
    ),
    "batch": batch,
    "commit batch": commit,
    "fold": lambda world: deltas.fold(using="default"),
    "flush": flush,
}


PAIRS = sorted(itertools.combinations_with_replacement(VERBS, 2))


@pytest.mark.timeout(SECONDS + 600)
def test_no_pair_of_verbs_deadlocks(collisions):
    world = World()
    world.fill()
    before, until, done = count_deadlocks(), time.monotonic() + SECONDS, 0
    for first, second in random.sample(PAIRS, len(PAIRS)):
        if time.monotonic() > until:
            break
        verbs = {name: partial(VERBS[name], world) for name in (first, second)}
        run_concurrently([(name, verbs[name]) for name in (first, first, second, second)], rounds=ROUNDS)
        done += 1
        if Job.objects.filter(state="working").count() < 4 or Job.objects.filter(state="enqueued").count() < 4:
            world.fill()
    print(f"{done} of {len(PAIRS)} pairs")  # noqa: T201  (pytest -s shows it)
    print(f"{len(collisions)} deadlocks")  # noqa: T201
    if connection.vendor == "postgresql":  # MariaDB locks gaps too; there each verb succeeded on a retry
        assert [one[0] for one in collisions] == []
        assert count_deadlocks() == before
