"""What the tests of locks share: jobs of one key, and the verbs in few words."""

import pytest

from django_faktory.brokers.orm import OrmBroker
from django_faktory.locket import Locket, locket
from django_faktory.models import Job, JobLock
from django_faktory.payloads import Ack, FetchRequest, failure
from tests.factories import payload


class Locketed:
    """A node: its broker, and its verbs by the letters of the cases: A and A' are twins, B is another."""

    def __init__(self, broker):
        self.broker = broker

    def push(self, *names, **fields):
        """Jobs whose arguments are the letter of their names: A, A1 and A2 are twins."""
        sent = [payload(jid=name, args=[name[0]], **fields) for name in names]
        assert self.broker.push(sent) == [None] * len(sent)
        return sent

    def fetch(self, *queues, wid="w1", count=1):
        """The jids of the jobs handed out."""
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
    """A node with all queues locketed, or as `locket` is called."""

    def make(queues=None, *, key=None, **options):
        return Locketed(OrmBroker("default", locket=Locket(locket(queues, **options), key=key)))

    return make


@pytest.fixture
def plain(transactional_db):
    """A node where nothing is locketed."""
    return Locketed(OrmBroker("default"))
