"""Limits that are paused, removed or taken over by code while jobs run, and jobs of theirs that expire."""

from datetime import timedelta

import pytest
from django.utils import timezone

from django_faktory.core.limits import Allowance
from django_faktory.models import Limit
from django_faktory.store.limits import definitions
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from tests.store.limits.conftest import Node, limit, states


@pytest.fixture
def node(transactional_db):
    return Node()


def test_a_limit_from_code_applies_to_a_task_that_was_paused_before(node):
    definitions.pause(["noop"], using="default")
    definitions.sync([definitions.LimitDefinition("task", "noop", Allowance.of(5))], using="default")
    assert Limit.objects.get().paused_at is not None
    definitions.resume(["noop"], using="default")
    [row] = Limit.objects.all()
    assert (row.concurrency, row.origin, row.paused_at) == (5, Limit.Origin.CODE, None)


def test_a_limit_that_is_set_during_a_resume_stays(node, monkeypatch):
    definitions.pause(["noop"], using="default")
    real = definitions._remove

    def set_before(row, **options):
        with monkeypatch.context() as patch:
            patch.setattr(definitions, "_remove", real)
            limit("task", "noop", 2)
        return real(row, **options)

    monkeypatch.setattr(definitions, "_remove", set_before)
    assert definitions.resume(["noop"], using="default") == ["noop"]
    [row] = Limit.objects.all()
    assert (row.concurrency, row.paused_at) == (2, None)


def test_a_key_that_falls_back_to_the_limit_of_its_family_starts_jobs_at_once(node):
    limit("key", "customer", 2)
    own = limit("key", "customer:1", "100/s")
    node.push(*"abcd", custom={"limit": "customer:1"})
    assert len(node.fetch(1)) == 1
    definitions.remove(own, using="default")
    assert len(node.fetch(9)) == 1


def test_a_job_with_a_lock_that_expires_behind_a_limit_makes_the_next_one_of_the_lock_ready(node):
    limit("task", "narrow", 1)
    node.push("z", jobtype="narrow")
    assert node.fetch() == ["z"]
    node.push("a", jobtype="narrow", custom={"lock": "same", "expires_in": 100})
    node.push("b", custom={"lock": "same"})
    assert node.fetch(5) == []
    assert due.expire(Store(now=timezone.now() + timedelta(seconds=200))) == 1
    assert states("b") == ["enqueued"]
