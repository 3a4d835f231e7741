"""Sizes of queues: for many queues in a few statements, and without counting a long queue to its end."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

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
    found = queues.read_waiting(["mail", "low", "empty"], using="default")
    assert {name: (one.size, round(one.latency_s, -1)) for name, one in found.items()} == {
        "mail": (2, 50),
        "low": (2, 20),
        "empty": (0, 0),
    }
    assert found["mail"].latency_s == pytest.approx(queues.latency(Store(), ["mail"])["mail"], abs=5)


def test_a_hundred_queues_cost_as_many_statements_as_one():
    for number in range(100):
        JobFactory(queue=QueueFactory(name=f"q{number:02}").name)

    def statements(names):
        with CaptureQueriesContext(
            connection,
        ) as caught:
            assert {one.size for one in queues.read_waiting(names, using="default").values()} == {1}
        return len(caught)

    assert statements(["q00"]) == statements([f"q{number:02}" for number in range(100)])


def test_the_size_of_a_queue_is_counted_up_to_a_maximum():
    QueueFactory(name="mail")
    for _ in range(5):
        JobFactory(queue="mail")
    assert queues.read_waiting(["mail"], using="default", max_count=3)["mail"].size == 3
