"""Fixtures of the limit tests: a node with short forms of the broker's verbs, and reads of the rows."""

import threading

import pytest
from django.db import connections

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.limits import Allowance
from django_faktory.core.payloads import Ack, FetchRequest, failure
from django_faktory.models import Job, Limiter
from django_faktory.store.limits import definitions, limiters
from tests.factories import payload


class Node:
    """A broker with verbs that take short names of jobs."""

    def __init__(self):
        self.broker = OrmBroker("default")

    def push(self, *names, **fields):
        assert self.broker.push([payload(jid=name, **fields) for name in names]) == [None] * len(names)

    def reserve(self, count=1, *, queues=("default",), wid="w1"):
        [found] = self.broker.fetch([FetchRequest(queues=queues, wid=wid, count=count)])
        return found

    def fetch(self, count=1, *, queues=("default",), wid="w1"):
        """Return the short names of the claimed jobs."""
        return [short(job.jid) for job in self.reserve(count, queues=queues, wid=wid)]

    def ack(self, *names, wid="w1"):
        return self.broker.ack([Ack(jid=jid(name), wid=wid) for name in names])

    def fail(self, name, wid="w1"):
        return self.broker.fail([failure(jid=jid(name), wid=wid, errtype="E")])


def jid(name):
    return f"job-{name}".ljust(8, ".")


def short(jid):
    return jid.removeprefix("job-").rstrip(".")


def limit(scope, name, value):
    return definitions.save_limit(scope, name, Allowance.of(value), using="default")


def in_use(name):
    return Limiter.objects.get(name=name).in_use


def states(*names):
    found = dict(Job.objects.values_list("jid", "state"))
    return [found.get(jid(name), "gone") for name in names]


def blocked():
    return Job.objects.filter(state="blocked").count()


def counts_are_true():
    """Check that every limiter's count equals the number of jobs that hold its permits."""
    assert not limiters.sweep(using="default")


@pytest.fixture
def node(transactional_db):
    return Node()


def at_once(count, work):
    """Run `work(number)` in threads that begin together. Return their results, or raise their exceptions as a group."""
    barrier, found, errors = threading.Barrier(count), [None] * count, []

    def body(number):
        try:
            barrier.wait(60)
            found[number] = work(number)
        except Exception as error:  # noqa: BLE001  (reported to the test)
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=body, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {count} threads", errors[:3]) from errors[0]
    return found
