"""When the ORM broker announces new jobs: after the commit that brought them, and not without any."""

import pytest
from django.db import transaction

from django_faktory.brokers.orm import OrmBroker
from tests.factories import payload

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def heard():
    return []


@pytest.fixture
def broker(heard):
    return OrmBroker("default", announce=lambda _, queues: heard.append(set(queues)))


def test_a_push_is_announced(broker, heard):
    broker.push([payload(queue="a"), payload(queue="b")])
    assert heard == [{"a", "b"}]


@pytest.mark.parametrize("verb", ["push", "exchange"])
def test_a_push_in_a_transaction_is_announced_after_the_commit(broker, heard, verb):
    with transaction.atomic():
        if verb == "push":
            broker.push([payload(queue="a")])
        else:
            broker.exchange([payload(queue="a")], [], [])
        assert heard == [], "a worker that fetches now finds no job, and polls again only later"
    assert heard == [{"a"}]


def test_a_push_that_is_rolled_back_is_not_announced(broker, heard):
    with transaction.atomic():
        broker.push([payload()])
        transaction.set_rollback(True)
    assert heard == []
