"""Exchanges that take several transactions, and reservations that a client has extended before its delivery counts."""

from datetime import timedelta

import pytest
from django.utils import timezone

from django_faktory.core.payloads import Ack, Delivery, FetchRequest, Lease, TrackUpdate
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job
from django_faktory.store.jobs import claims, exchanges, tracking
from django_faktory.store.store import Store
from tests.factories import payload
from tests.store.limits.conftest import Node


@pytest.fixture
def node(transactional_db):
    return Node()


@pytest.mark.parametrize("fails", ["push", "fetch"])
def test_an_error_after_the_acknowledgement_is_not_its_answer(node, monkeypatch, fails):
    def fail(*_, **__):
        raise BrokerUnavailable("database unavailable: gone")

    node.push("a")
    [job] = node.reserve()
    if fails == "push":
        monkeypatch.setattr(exchanges, "push", fail)
    else:
        monkeypatch.setattr(claims.ClaimContext, "claim", fail)
    # A unique job takes a transaction of its own.
    jobs = [payload("unique-1", custom={"unique_for": 60})]
    reply = node.broker.exchange(jobs, [Ack(jid=job.jid, wid="w1")], [FetchRequest(queues=("none",), wid="w1")])
    assert list(reply.acked) == [True]
    assert [answer is None for answer in reply.pushed] == [fails == "fetch"]
    assert reply.fetched == [[]]


def test_a_confirmation_does_not_shorten_a_reservation_that_track_set_has_extended(node):
    node.push("a")
    [[job]] = node.broker.fetch([FetchRequest(queues=("default",), wid="w1", lease=Lease.DELIVERY)])
    until = timezone.now() + timedelta(hours=5)
    tracking.track_set(Store(), [TrackUpdate(jid=job.jid, wid="w1", reserve_until=until)])
    assert node.broker.confirm([Delivery(job, 2.0)]) == set()
    assert Job.objects.get().reserved_until > timezone.now() + timedelta(hours=4)
