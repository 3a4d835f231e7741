"""Process sets of jobs that overlap in different orders: no transactions wait for each other in a circle (ADR 0024).

Each test fails on a store that locks jobs in the caller's order: the sets are large enough for that.
"""

import random
from datetime import timedelta
from functools import partial

import pytest
from django.db import connection
from django.utils import timezone

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import Ack, FetchRequest, NewBatch
from django_faktory.models import Job
from django_faktory.store.jobs import pushes
from django_faktory.store.store import Store
from tests.deadlocks.nodes import count_deadlocks, run_concurrently
from tests.factories import JobFactory, payload
from tests.store import by_ids

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="MariaDB locks gaps of indexes too"),
]

USING = "default"
ROUNDS = 12
SIZE = 120
FETCH = [FetchRequest(queues=("nothing",), wid="w1", count=1)]


@pytest.fixture
def race(collisions):
    """Return a function that runs verbs concurrently on the rows that `prepare` stores, and expects no deadlock."""

    def run(*verbs, prepare):
        before = count_deadlocks()
        run_concurrently(verbs, rounds=ROUNDS, prepare=prepare)
        assert [name for name, _ in collisions] == []
        assert count_deadlocks() == before

    return run


def shuffled(values, count=None):
    found = list(values)
    random.shuffle(found)
    return found[:count]


def names(count=SIZE):
    """Return names that are not in alphabetical order, like names that clients send."""
    return [f"set-{number * 7919 % 1000:04d}" for number in range(count)]


def made(names, **fields):
    return [payload(jid=name, **fields) for name in names]


def unique(names, prefix="", **custom):
    """Return unique jobs; each key depends only on the name."""
    return [payload(jid=prefix + name, args=[name], custom={"unique_for": 600} | custom) for name in names]


def delete_all():
    Job.objects.all().delete()


def store(**fields):
    """Store a row for each name, in the order of `names`."""
    delete_all()
    rows = JobFactory.many(SIZE, **fields)
    for row, job in zip(rows, made(names()), strict=True):
        row.jid = job.jid
    Job.objects.bulk_create(rows)


def store_overdue():
    """Store jobs that own two thirds of the unique keys, half of them dead, and half of them with an expired key."""
    delete_all()
    chosen = shuffled(names(), SIZE * 2 // 3)
    pushes.push(Store(USING), unique(chosen, prefix="old-"))
    held = shuffled(Job.objects.values_list("pk", flat=True))
    by_ids.kill(held[: SIZE // 3], using=USING)
    Job.objects.filter(pk__in=held[::2]).update(unique_expires_at=timezone.now() - timedelta(seconds=1))


def ids():
    """Return two thirds of the rows' ids, in ascending order."""
    return sorted(shuffled(Job.objects.values_list("pk", flat=True), SIZE * 2 // 3))


def push_some(push=pushes.push, **fields):
    push(Store(USING), made(shuffled(names(), SIZE * 2 // 3), **fields))


def push_mixed(**fields):
    """Push jobs with and without options in an exchange that ends no job."""
    chosen = shuffled(names())
    mixed = made(chosen[: SIZE // 2], **fields) + made(chosen[SIZE // 2 :])
    OrmBroker(USING).exchange(shuffled(mixed), [], FETCH)


def turn():
    """End half of the jobs and push the jids of the others, in one exchange."""
    chosen = shuffled(made(names()))
    acks = [Ack(jid=job.jid, wid="w1") for job in chosen[: SIZE // 2]]
    OrmBroker(USING).exchange(chosen[SIZE // 2 :], acks, FETCH)


def push_unique():
    pushes.push(Store(USING), unique(shuffled(names(), SIZE // 2)))


def push_unique_and_plain(push=pushes.push):
    chosen = shuffled(names())
    push(Store(USING), shuffled(unique(chosen[: SIZE // 3]) + made(f"plain-{name}" for name in chosen)))


def push_members(bid):
    pushes.push(Store(USING), unique(shuffled(names(), SIZE // 2), bid=bid))


def requeue():
    by_ids.requeue(ids(), using=USING)


def discard():
    by_ids.discard(ids(), using=USING)


KINDS = {
    "plain": {},
    "of other numbers": {"retry": 3},
    "with options": {"custom": {"limit": "mail"}},
    "with locks": {"custom": {"lock": "one"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_pushes_of_the_same_jids_in_different_orders_do_not_deadlock(race, kind):
    push, mixed = partial(push_some, **KINDS[kind]), partial(push_mixed, **KINDS[kind])
    race(("push", push), ("push", push), ("turn", mixed), prepare=delete_all)


@pytest.mark.parametrize("kept_s", [None, 60])
def test_exchanges_that_push_jids_acked_by_others_do_not_deadlock(race, kept_s):
    race(("turn", turn), ("turn", turn), ("turn", turn), prepare=partial(store, working=True, result_ttl=kept_s))


@pytest.mark.parametrize("kind", KINDS)
def test_pushes_over_dead_jobs_do_not_deadlock_with_changes_of_them(race, kind):
    push = partial(push_some, **KINDS[kind])
    race(("push", push), ("turn", turn), ("requeue", requeue), ("discard", discard), prepare=partial(store, dead=True))


@pytest.mark.parametrize("push_set", [push_some, push_unique_and_plain])
def test_pushes_that_need_several_statements_do_not_deadlock(race, push_set):
    push = partial(push_set, push=partial(pushes.push, chunk_size=SIZE // 8))
    race(("push", push), ("push", push), ("requeue", requeue), ("discard", discard), prepare=partial(store, dead=True))


def test_unique_pushes_in_different_orders_do_not_deadlock(race):
    race(
        ("push unique", push_unique),
        ("push unique and plain", push_unique_and_plain),
        ("push unique and plain", push_unique_and_plain),
        prepare=delete_all,
    )


def test_pushes_that_free_expired_unique_keys_do_not_deadlock_with_changes(race):
    bid = OrmBroker(USING).new_batch(NewBatch(complete=payload(jobtype="done")))
    members = partial(push_members, bid)
    race(
        ("push unique", push_unique),
        ("push unique and plain", push_unique_and_plain),
        ("push members", members),
        ("push members", members),
        ("discard", discard),
        prepare=store_overdue,
    )
