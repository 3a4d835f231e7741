"""Fixtures of the lock tests: jobs of one key, and short forms of the broker's verbs."""

import pytest

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.locket import Locket, locket
from django_faktory.core.payloads import Ack, FetchRequest, failure
from django_faktory.models import Job, JobLock
from tests.factories import payload


class Locketed:
    """A node with its broker. Its verbs take the names of the specification's cases: A and A1 are twins, B is not."""

    def __init__(self, broker):
        self.broker = broker

    def push(self, *names, **fields):
        """Push jobs with the first letter of their name as argument, so that A, A1 and A2 have the same key."""
        sent = [payload(jid=name, args=[name[0]], **fields) for name in names]
        assert self.broker.push(sent) == [None] * len(sent)
        return sent

    def fetch(self, *queues, wid="w1", count=1):
        """Return the jids of the claimed jobs."""
        [found] = self.broker.fetch([FetchRequest(queues=queues or ("default",), wid=wid, count=count)])
        return [job.jid for job in found]

    def reserve(self, *queues, wid="w1"):
        [[found]] = self.broker.fetch([FetchRequest(queues=queues or ("default",), wid=wid)])
        return found

    def ack(self, name, wid="w1"):
        return self.broker.ack([Ack(jid=jid(name), wid=wid)])

    def fail(self, name, wid="w1"):
        return self.broker.fail([failure(jid=jid(name), wid=wid, errtype="E")])


def jid(name):
    return payload_jid(name)


def payload_jid(name):
    return f"job-{name}".ljust(8, ".")


def state_of(name):
    return Job.objects.get(jid=jid(name)).state


def holders():
    return sorted(JobLock.objects.values_list("jid", flat=True))


@pytest.fixture
def node(transactional_db):
    """Make a node with all queues locketed, or with the given arguments of `locket`."""

    def make(queues=None, *, key=None, **options):
        return Locketed(OrmBroker("default", locket=Locket(locket(queues, **options), key=key)))

    return make


@pytest.fixture
def plain(transactional_db):
    """A node without locketed queues."""
    return Locketed(OrmBroker("default"))
