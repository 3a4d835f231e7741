"""The count of a limiter equals the rows of the jobs at every commit, after any change, release, block or sweep."""

import logging
import os
import threading
import time

import pytest
from django.db import connection, connections, transaction
from django.db.models import F

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.limits import parse_permits
from django_faktory.core.payloads import Ack, FetchRequest
from django_faktory.models import Job, JobLock, Limiter
from django_faktory.store.dialects import dialect_of
from django_faktory.store.dialects.values import ClaimPlan, ClaimSlot
from django_faktory.store.jobs import acquire as acquiring
from django_faktory.store.jobs import failures
from django_faktory.store.limits import definitions, limiters
from django_faktory.store.locks import locks
from django_faktory.store.store import Store
from tests.factories import payload
from tests.settings import VIA
from tests.store import by_ids
from tests.store.limits.conftest import at_once, blocked, counts_are_true, in_use, jid, limit, states

SECONDS = float(os.environ.get("FAKTORY_TEST_LIMITS_S", "4"))
NODES, CLIENTS, PLACES = 2, 12, 3

needs_row_locks = pytest.mark.skipif(connection.vendor == "sqlite", reason="one writer at a time")


def claim(node, count=1):
    """Return reservations that have not acquired their locks and permits yet."""
    found = dialect_of(connections["default"]).claim(
        connections["default"], ClaimPlan([ClaimSlot("default", "w1", count)], count), None
    )
    assert len(found) == count
    return found


def acquire(claimed):
    return acquiring.acquire(Store(), claimed, lease_s=35)


@pytest.mark.parametrize("scope", ["task", "queue", "key"])
@pytest.mark.parametrize("end", ["ack", "fail", "release", "lost", "exchange"])
def test_a_job_started_before_its_limit_was_set_releases_a_permit(node, scope, end):
    name = {"task": "noop", "queue": "default", "key": "mail"}[scope]
    node.push(*"abc", custom={"limit": "mail"})
    held = node.reserve(2)
    limit(scope, name, 2)
    if scope == "key":
        assert node.fetch() == [], "the limiter of a key is created on first use"
    assert in_use(name) == 2
    assert node.fetch() == []
    if end == "release":
        assert node.broker.release(held) == 2
    elif end == "lost":
        assert failures.reclaim_lost(Store(), ["w1"]) == 2
    elif end == "exchange":
        node.broker.exchange([], [Ack(jid=job.jid, wid="w1", attempt=job.attempt) for job in held], [])
    else:
        for name_ in "ab":
            assert getattr(node, end)(name_) in ([True], [[True]])
    assert in_use(name) == 0
    assert len(node.fetch(5)) == (2 if end in ("release", "lost") else 1)
    counts_are_true()


def test_release_requeues_plain_jobs_together_with_newly_limited_ones(node):
    node.push("a", "b")
    node.push("x", jobtype="other")
    held = node.reserve(3)
    limit("task", "noop", 1)
    assert node.broker.release(held) == 3
    assert states("a", "b", "x") == ["enqueued"] * 3
    assert in_use("noop") == 0
    counts_are_true()


def test_permits_of_a_running_job_follow_ten_rounds_of_limit_changes(node):
    node.push("a", "b", custom={"limit": "mail"})
    assert node.fetch() == ["a"]
    for _ in range(10):
        found = [limit(scope, name, 1) for scope, name in (("task", "noop"), ("queue", "default"), ("key", "mail"))]
        assert node.fetch() == []
        held = parse_permits(Job.objects.get(jid=jid("a")).permits)
        assert sorted(held) == sorted(Limiter.objects.values_list("pk", flat=True))
        for one in found:
            definitions.remove(one, using="default")
    assert node.ack("a") == [True]
    assert node.fetch() == ["b"]


def test_sweep_opens_a_limiter_left_shut_by_a_crash_before_counting(node, monkeypatch):
    node.push(*"abc")
    node.fetch(2)

    def crash(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(limiters, "count_running", crash)
        with pytest.raises(KeyboardInterrupt):
            limit("task", "noop", 3)
    assert node.fetch() == [], "the limit admits no job until running jobs are counted"
    limiters.sweep(using="default")
    assert in_use("noop") == 2
    assert node.fetch(5) == ["c"]
    counts_are_true()


@needs_row_locks
def test_a_claim_concurrent_with_a_new_limit_is_counted(node):
    node.push(*"ab")
    claimed, resume = threading.Event(), threading.Event()

    def work(number):
        if number:
            assert claimed.wait(60)
            limit("task", "noop", 1)
        else:
            with transaction.atomic():
                assert node.fetch() == ["a"]
                claimed.set()
                resume.wait(0.05)  # within the time that claims are waited for

    at_once(2, work)
    assert in_use("noop") == 1
    assert node.fetch() == []


def test_a_limit_set_in_a_transaction_counts_running_jobs_at_commit(node):
    node.push(*"abc")
    node.fetch(2)
    with transaction.atomic():
        limit("task", "noop", 2)
    assert in_use("noop") == 2
    assert node.fetch() == []
    counts_are_true()


def test_sweep_counts_a_job_claimed_while_its_limit_was_being_set(node):
    limit("task", "noop", 2)
    node.push(*"abc")
    node.fetch(1)
    Limiter.objects.update(in_use=0)
    Job.objects.filter(state="working").update(permits=None)
    limiters.sweep(using="default")
    assert in_use("noop") == 1
    assert len(node.fetch(5)) == 1
    counts_are_true()


def test_a_job_that_fails_to_acquire_its_lock_holds_no_permit(node):
    limit("task", "noop", 5)
    node.push("a", custom={"lock": "same"})
    assert node.fetch() == ["a"]
    node.push("b", custom={"lock": "same"})
    Job.objects.filter(jid=jid("b")).update(state="enqueued")  # the state that a race leaves
    commits = []
    with transaction.atomic():
        transaction.on_commit(lambda: commits.append(1))
        claimed = claim(node)
        assert acquire(claimed) == []
        assert (states("b"), in_use("noop")) == (["blocked"], 1)
    counts_are_true()


def test_a_job_blocked_by_its_limiter_frees_its_lock_at_once(node):
    limit("task", "noop", 1)
    node.push("a", jobtype="noop")
    assert node.fetch() == ["a"]
    node.push("b", custom={"lock": "same"})
    node.push("x", custom={"lock": "same"}, queue="other", jobtype="free")
    assert node.fetch() == []
    assert states("b") == ["blocked"]
    assert not JobLock.objects.exists()
    assert Job.objects.get(jid=jid("b")).lock_token is None
    assert node.fetch(queues=("other",)) == ["x"], "a job at a limiter holds no key"


def test_reclaiming_a_lost_worker_before_it_acquires_releases_permits_once(node):
    limit("task", "noop", 2)
    node.push("a", "b", custom={"lock": "same"})
    node.push("c")
    assert node.fetch(1) == ["a"]
    claimed = claim(node)
    assert failures.reclaim_lost(Store(), ["w1"]) == 2
    assert in_use("noop") == 0
    # On PostgreSQL the claim itself has acquired what it could.
    assert acquire([job for job in claimed if job.permits == ""]) == []
    assert in_use("noop") == 0
    counts_are_true()


@pytest.mark.parametrize("change", ["kill", "discard"])
def test_killing_or_discarding_a_blocked_job_frees_its_lock_for_the_next(node, change):
    limit("task", "narrow", 1)
    node.push("z", jobtype="narrow")
    assert node.fetch() == ["z"]
    node.push("a", jobtype="narrow", custom={"lock": "same"})
    node.push("b", custom={"lock": "same"})
    assert node.fetch(5) == []
    assert Job.objects.get(jid=jid("a")).limiter is not None
    getattr(by_ids, change)([Job.objects.get(jid=jid("a")).pk], using="default")
    assert states("b") == ["enqueued"]
    assert node.fetch(5) == ["b"]


def test_flush_keeps_the_permit_of_a_job_claimed_meanwhile(node):
    from django_faktory.store.jobs import bulk

    limit("task", "noop", 2)
    node.push("a", "b", custom={"lock": "one"})
    node.fetch(1)
    steps = bulk.flush(Store())
    first = next(steps)  # all ids are read
    node.push("c", custom={"lock": "two"})
    assert node.fetch(5) == ["c"]
    first()
    for step in steps:
        step()
    assert states("a", "b", "c") == ["gone", "gone", "working"]
    assert in_use("noop") == 1
    assert JobLock.objects.get().jid == jid("c")
    counts_are_true()


class Watched:
    """Count how many jobs run at a time."""

    def __init__(self):
        self.inside, self.most, self.done, self.guard = set(), 0, 0, threading.Lock()

    def begin(self, jids):
        with self.guard:
            self.inside.update(jids)
            self.most = max(self.most, len(self.inside))

    def end(self, jids):
        with self.guard:
            self.inside.difference_update(jids)
            self.done += len(jids)


@pytest.mark.slow
@pytest.mark.skipif(VIA == "pool", reason="more threads than connections")
def test_two_nodes_with_locks_and_sweeps_keep_the_limit_without_repairs(node, caplog):
    """FAKTORY_TEST_LIMITS_S=60 python -m pytest tests/store/limits/test_exact.py -k sweeps"""
    limit("task", "noop", PLACES)
    nodes, until, watched = [OrmBroker("default") for _ in range(NODES)], time.monotonic() + SECONDS, Watched()
    sweeps = []

    def push(broker, count):
        for at in range(0, count, 100):
            broker.push(
                [
                    payload(jid=f"{time.monotonic_ns()}-{at}", custom={"lock": f"k{at % 7}"} if at % 4 else {})
                    for at in range(100)
                ]
            )

    def work(number):
        broker, wid, stop = nodes[number % NODES], f"w{number}", threading.Event()
        if number >= CLIENTS:
            while time.monotonic() < (until if watched.done > CLIENTS else until + 60):
                limiters.sweep(using="default")
                locks.sweep(using="default", pause=lambda _: None)
                sweeps.append(1)
            return
        while time.monotonic() < (until if watched.done > CLIENTS else until + 60):
            [found] = broker.fetch([FetchRequest(queues=("default",), wid=wid, count=1 + number % 2)])
            jids = [job.jid for job in found]
            watched.begin(jids)
            if not found:
                stop.wait(0.005)
            running = Job.objects.filter(state="working", permits__gt="").count()
            watched.end(jids)
            with watched.guard:
                watched.most = max(watched.most, running)
            if number % 4 == 0:
                broker.release(found)
            else:
                broker.ack([Ack(jid=job.jid, wid=wid, attempt=job.attempt) for job in found])
                push(broker, 100 * (Job.objects.filter(state="enqueued").count() + blocked() < 50))

    push(nodes[0], 300)
    with caplog.at_level(logging.WARNING):
        at_once(CLIENTS + NODES, work)
    assert watched.most <= PLACES
    assert watched.done > CLIENTS
    print(f"{watched.done} executions in {SECONDS:g} s, {watched.most} at once, {len(sweeps)} sweeps")  # noqa: T201  (pytest -s shows it)
    assert [record.getMessage() for record in caplog.records if "wrong count" in record.getMessage()] == []
    counts_are_true()


def test_a_duplicate_ack_does_not_release_a_second_permit(node):
    limit("task", "noop", 3)
    node.push(*"abc")
    node.fetch(3)
    Limiter.objects.update(in_use=F("in_use"))
    node.ack("a", "a")
    assert in_use("noop") == 2
    counts_are_true()
