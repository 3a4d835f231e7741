"""Sizes of queues: for many queues in a few statements, and without counting a long queue to its end."""

from datetime import timedelta

import pytest
from django.utils import timezone

from django_faktory.operations import queue_sizes
from django_faktory.store import queues
from django_faktory.store.store import Store
from tests.factories import JobFactory, QueueFactory

pytestmark = pytest.mark.django_db


def test_size_and_latency_include_enqueued_and_blocked_jobs():
    now = timezone.now()
    for name in ("mail", "low", "empty"):
        QueueFactory(name=name)
    JobFactory(queue="mail", enqueued_at=now - timedelta(seconds=50), sort_priority=3)
    JobFactory(queue="mail", enqueued_at=now - timedelta(seconds=10), sort_priority=-3)
    JobFactory(queue="low", blocked=True, enqueued_at=now - timedelta(seconds=20))
    JobFactory(queue="low", enqueued_at=now - timedelta(seconds=5))
    JobFactory(queue="low", scheduled=True)
    found = queue_sizes.read(["mail", "low", "empty"], using="default")
    assert {name: (one.size, round(one.latency_s, -1)) for name, one in found.items()} == {
        "mail": (2, 50),
        "low": (2, 20),
        "empty": (0, 0),
    }
    assert found["mail"].latency_s == pytest.approx(queues.latency(Store(), ["mail"])["mail"], abs=5)
