"""Limit the jobs that start in a time, counted by the database's clock for all nodes together."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_faktory.core.payloads import Ack
from django_faktory.models import Job, Limiter
from django_faktory.store.limits import limiters
from django_faktory.store.maintenance import pending_work
from django_faktory.store.store import Store
from tests.factories import T0
from tests.store.limits.conftest import blocked, jid, limit, states


@pytest.fixture
def at(node):
    """Set the clock of the node to this number of seconds after the buckets were filled."""

    def set_clock(seconds):
        moment = T0 + timedelta(seconds=seconds)
        node.broker.clock = lambda: moment
        return moment

    return set_clock


def full(name):
    Limiter.objects.filter(name=name).update(filled_at=T0)


@pytest.mark.parametrize(("scope", "name"), [("task", "noop"), ("queue", "default"), ("key", "mail")])
def test_a_burst_starts_at_once_and_more_jobs_after_a_refill(node, at, scope, name):
    limit(scope, name, "10/s")
    node.push("0", custom={"limit": "mail"})
    at(0)
    node.fetch()
    full(name)
    node.push(*map(str, range(1, 30)), custom={"limit": "mail"})
    assert len(node.fetch(20)) == 3, "the bucket holds 0.4 s of the rate, and one was taken"
    assert node.fetch(20) == []
    limiters.unblock_due(Store(now=at(0.35)))
    assert len(node.fetch(20)) == 3
    assert node.fetch(20) == []


def test_a_rate_of_100_per_second_starts_1000_jobs_in_10_seconds(node, at):
    limit("task", "noop", "100/s")
    full("noop")
    node.push(*map(str, range(1300)))
    started = 0
    for tick in range(101):
        now = at(tick * 0.1)
        limiters.unblock_if_room([Limiter.objects.get().pk], using="default", now=now)
        while found := node.reserve(500):
            started += len(found)
    assert 950 <= started <= 1050


def test_later_jobs_do_not_overtake_jobs_waiting_for_a_rate_limit(node, at):
    limit("task", "noop", "1/s")
    full("noop")
    at(0)
    node.push("a", "b", "c")
    assert node.fetch() == ["a"]
    assert node.fetch() == []
    at(0.001)  # the jobs of a set are a microsecond apart
    node.push("d")
    order = ["a"]
    for second in (1, 2, 3):
        now = at(second + 0.001)
        assert node.fetch(5) == [], "no job overtakes jobs that maintenance has not unblocked yet"
        limiters.unblock_due(Store(now=now))
        order += node.fetch(5)
    assert order == ["a", "b", "c", "d"]


def test_maintenance_sleeps_until_the_next_token_and_no_longer(node, at):
    limit("task", "noop", "1/s")
    full("noop")
    node.push("a", "b")
    assert pending_work.find_pending_work(using="default").opens_in_s is None
    at(0)
    node.fetch(2)
    node.fetch(2)
    [opens_at] = Limiter.objects.values_list("opens_at", flat=True)
    assert opens_at == T0 + timedelta(seconds=1)
    assert pending_work.find_pending_work(using="default", now=T0).opens_in_s == 1.0


def test_a_rate_limited_queue_is_skipped_until_its_next_token(node, at):
    limit("queue", "default", "1/s")
    full("default")
    node.push("a", "b")
    node.push("x", queue="other")
    at(0)
    assert node.fetch(5) == ["a"]
    assert node.fetch(5, queues=("default", "other")) == ["x"]
    assert blocked() == 0
    now = at(0.5)
    with CaptureQueriesContext(connection) as queries:
        assert node.fetch(5) == []
    assert not any("UPDATE" in one["sql"] and '"attempt" - 1' in one["sql"] for one in queries)
    now = at(1.0)
    assert limiters.unblock_due(Store(now=now)) == {"default"}
    assert node.fetch(5) == ["b"]


def test_acking_a_rate_limited_job_costs_no_more_than_a_plain_one(node):
    limit("task", "noop", "1000/s")
    node.push("a", "b", "c")
    node.push("x", "y", "z", jobtype="plain")
    node.fetch(6)

    def statements(name):
        with CaptureQueriesContext(connection) as queries:
            node.broker.ack([Ack(jid=jid(name), wid="w1")])
        return sum("PREPARE" not in one["sql"] for one in queries)

    statements("a"), statements("x")
    assert statements("b") == statements("y")


def test_maintenance_does_not_unblock_without_bound_when_no_worker_fetches(node, at):
    limit("task", "noop", "100/s")
    full("noop")
    node.push(*map(str, range(200)))
    at(0)
    while node.reserve(50):
        pass
    for tick in range(1, 100):
        limiters.unblock_due(Store(now=at(tick * 0.1)))
    assert Job.objects.filter(state="enqueued").count() <= 60
    assert blocked() >= 90


def test_a_limit_of_concurrency_and_rate_enforces_both(node, at):
    limit("task", "noop", {"concurrency": 2, "rate": "1/s", "burst": 5})
    full("noop")
    node.push(*"abcdefg")
    at(0)
    assert node.fetch(7) == ["a", "b"]
    node.ack("a", "b")
    assert len(node.fetch(7)) == 2
    assert states("e") == ["blocked"]
