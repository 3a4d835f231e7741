"""Changes of limits while a transaction has limiters locked: neither waits for the other in a circle (ADR 0024)."""

import threading
from functools import partial

import pytest
from django.db import connection, transaction

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import Ack, FetchRequest
from django_faktory.models import Limit, Limiter
from django_faktory.store.jobs import exchanges
from django_faktory.store.limits import definitions, limiters
from django_faktory.store.store import Store
from django_faktory.store.transactions import run
from tests.factories import payload
from tests.store.jobs.test_prefetch import is_a_session_waiting
from tests.store.limits.conftest import limit
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="MariaDB locks gaps of indexes too"),
]


def start(*keys):
    """Run a job of each key, so that the key has a limiter."""
    for key in keys:
        OrmBroker("default").push([payload(custom={"limit": key})])
        assert OrmBroker("default").fetch([FetchRequest(queues=("default",), wid="w1", count=1)])[0]


@pytest.fixture
def run_meanwhile(collisions):
    """Return a function that starts a change in another session, and waits until it waits for this one."""
    threads, errors = [], []

    def run_and_close(change):
        try:
            change()
        except Exception as error:  # noqa: BLE001  (raised in the test)
            errors.append(error)
        finally:
            connection.close()

    def run_meanwhile(change):
        threads.append(threading.Thread(target=run_and_close, args=[change]))
        threads[-1].start()
        wait_until(is_a_session_waiting)

    yield run_meanwhile
    for thread in threads:
        thread.join(60)
    assert (collisions, errors) == ([], [])


CHANGES = {
    "edited": lambda: limit("task", "noop", 3),
    "paused": lambda: definitions.pause(["noop"], using="default"),
    "removed": lambda: definitions.remove(Limit.objects.get(), using="default"),
    "counted": lambda: run("default", partial(limiters._settle, limiter_id=Limiter.objects.get().pk)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_limit_changes_while_an_exchange_ends_a_job_and_claims_another_one(run_meanwhile, change):
    limit("task", "noop", 2)
    requests = [FetchRequest(queues=("default",), wid="w1", count=1)]
    [job, _] = jobs = [payload(), payload()]
    assert [found.jid for found in exchanges.exchange(Store(), jobs, [], requests).fetched[0]] == [job.jid]
    with transaction.atomic():
        # The second change of a row in one transaction makes PostgreSQL check its foreign key at the commit.
        reply = exchanges.exchange(Store(), [], [Ack(jid=job.jid, wid="w1")], requests)
        assert (reply.acked, len(reply.fetched[0])) == ([True], 1)
        run_meanwhile(change)


def remove_key():
    definitions.remove(Limit.objects.get(name="mail:1"), using="default")


@pytest.mark.parametrize(
    ("own", "keys", "change"),
    [
        ("mail", ("mail:0", "mail"), partial(limit, "key", "mail", 3)),
        ("mail:1", ("mail:0", "mail:1"), remove_key),
    ],
    ids=["edited", "removed"],
)
def test_a_change_of_a_limit_locks_its_limiters_and_those_of_its_family_by_id(run_meanwhile, own, keys, change):
    limit("key", "mail", 2)
    limit("key", own, 2)
    start(*keys)
    first, second = Limiter.objects.filter(name__in=keys).order_by("pk")
    assert first.name == keys[0]
    with transaction.atomic():
        Limiter.objects.select_for_update().get(pk=first.pk)
        run_meanwhile(change)
        Limiter.objects.select_for_update().get(pk=second.pk)
