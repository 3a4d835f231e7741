"""After any crash a job's permits are released with the job, and no job waits without end."""

import logging
from datetime import timedelta

import pytest
from django.db import connection
from django.db.models import F

from django_faktory.core.payloads import FetchRequest, WorkerIdentity
from django_faktory.models import Job, Limiter
from django_faktory.runtime.maintenance import Maintenance
from django_faktory.store.dialects import dialect_of
from django_faktory.store.dialects.values import ClaimPlan, ClaimSlot
from django_faktory.store.limits import limiters
from tests.store.limits.conftest import blocked, counts_are_true, in_use, jid, limit, states


def test_permits_of_a_lost_worker_are_released(node):
    limit("task", "noop", 2)
    node.push(*"abc")
    node.fetch(2)
    assert node.fetch(2, wid="w2") == []
    assert node.broker.lost(["w1"]) == 2
    assert in_use("noop") == 0
    assert node.fetch(5, wid="w2") == ["a", "b"]


def test_permits_are_released_when_a_worker_shuts_down(node):
    limit("task", "noop", 1)
    node.push(*"ab")
    node.broker.hello(WorkerIdentity(wid="w1"))
    node.fetch(2)
    node.broker.bye(["w1"])
    assert in_use("noop") == 0
    assert node.fetch(2, wid="w2") == ["a"]


def test_an_expired_reservation_releases_its_permit(node):
    limit("task", "noop", 1)
    node.push(*"ab")
    node.fetch(2)
    Job.objects.filter(jid=jid("a")).update(reserved_until=F("reserved_until") - timedelta(days=1))
    Maintenance("default").run_once()
    assert states("a") == ["retries"]
    assert node.fetch(2) == ["b"]
    counts_are_true()


def test_a_job_killed_by_its_third_loss_releases_its_permit(node):
    limit("task", "noop", 1)
    node.push(*"ab")
    for _ in range(3):
        assert node.fetch(1) == ["a"]
        node.broker.lost(["w1"])
    assert states("a") == ["dead"]
    assert node.fetch(1) == ["b"]


def test_maintenance_requeues_a_claimed_job_that_acquired_no_permits(node, caplog):
    limit("task", "noop", 1)
    node.push("z")
    assert node.fetch() == ["z"]
    node.push(*"ab")
    dialect_of(connection).claim(connection, ClaimPlan([ClaimSlot("default", "w1", 1)], 1), None)
    node.broker.hello(WorkerIdentity(wid="w1"))
    assert (states("a"), in_use("noop")) == (["working"], 1)
    Job.objects.update(started_at=F("started_at") - timedelta(minutes=1))
    with caplog.at_level(logging.WARNING):
        Maintenance("default").run_once()
    assert "got no lock or no permits" in caplog.text
    assert states("a") == ["enqueued"]
    node.ack("z")
    assert node.fetch(5) == ["a"]


@pytest.mark.parametrize("wrong", [0, 5])
def test_sweep_corrects_and_logs_a_wrong_permit_count(node, caplog, wrong):
    limit("task", "noop", 2)
    node.push(*"abc")
    node.fetch(3)
    node.fetch(3)
    Limiter.objects.update(in_use=wrong)
    with caplog.at_level(logging.WARNING):
        assert limiters.sweep(using="default") == 1
    assert "wrong count" in caplog.text
    assert in_use("noop") == 2
    counts_are_true()


def test_sweep_unblocks_jobs_of_a_deleted_limiter(node):
    limit("task", "noop", 1)
    node.push(*"abc")
    node.fetch(3)
    Limiter.objects.all().delete()
    limiters.sweep(using="default")
    assert blocked() == 0


def test_sweep_unblocks_jobs_that_a_limiter_no_longer_awaits(node):
    limit("task", "noop", 1)
    node.push(*"abc")
    node.fetch(3)
    Limiter.objects.update(in_use=0, is_awaited=False)
    Job.objects.filter(jid=jid("a")).delete()
    limiters.sweep(using="default")
    assert states("b") == ["enqueued"]


def test_idle_limiters_of_keys_are_deleted(node):
    limit("key", "customer", 1)
    node.push("a", custom={"limit": "customer:1"})
    node.push("b", custom={"limit": "customer:2"})
    node.fetch(2)
    node.ack("a")
    Limiter.objects.update(filled_at=F("filled_at") - timedelta(hours=2))
    assert limiters.delete_idle(using="default") == 1
    assert [limiter.name for limiter in Limiter.objects.all()] == ["customer:2"]
    node.ack("b")
    node.push("c", custom={"limit": "customer:1"})
    assert node.fetch() == ["c"]


def test_a_rolled_back_fetch_holds_no_permit(node):
    from django.db import transaction

    limit("task", "noop", 1)
    node.push("a")
    with transaction.atomic():
        [found] = node.broker.fetch([FetchRequest(queues=("default",), wid="w1", count=1)])
        assert len(found) == 1
        transaction.set_rollback(True)
    assert in_use("noop") == 0
    assert node.fetch() == ["a"]
