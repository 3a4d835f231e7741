"""INFO and other reads that clients share: never older than the last answer of this node (W22)."""

import json
import threading

import pytest

from django_faktory.brokers import serving_broker
from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.histograms import Recorder
from django_faktory.models import Job
from django_faktory.server.reads import compute_rest_s
from tests.factories import JobFactory
from tests.server.raw import RawClient, push
from tests.waiting import wait_until

pytestmark = pytest.mark.once_if_quick

WAITING = 6_000
"""Jobs that make INFO slow: it counts more than 5,000 rows of a queue in portions."""


@pytest.fixture
def clients():
    """Connections that are closed at the end of the test."""
    opened = []
    yield opened
    for client in opened:
        client.close()


def test_info_shows_each_push_that_was_answered_before_however_long_it_takes(serve, clients):
    """Ruby's and Node's suites push a job and compare INFO with the numbers of an earlier INFO."""
    server = serve(serving_broker(lambda *_: None, Recorder()))
    Job.objects.bulk_create(JobFactory.build_batch(WAITING), batch_size=1000)
    clients += [RawClient.identified(server.address) for _ in range(2)]

    def size(client):
        return json.loads(client.ask("INFO"))["faktory"]["queues"]["default"]

    for number in range(5):
        assert clients[0].ask(push(jid=f"own-push-{number}")) == b"+OK"
        assert [size(client) for client in clients] == [WAITING + number + 1] * 2


class CountingBroker(OrmBroker):
    """OrmBroker that counts its calls of `info`; each waits for `released`."""

    def __init__(self):
        super().__init__("default")
        self.calls, self.released = 0, threading.Event()

    def info(self):
        self.calls += 1
        assert self.released.wait(60)
        return super().info()


def test_infos_that_arrive_during_a_read_share_the_next_one(serve, clients):
    broker = CountingBroker()
    server = serve(broker)
    clients += [RawClient.identified(server.address) for _ in range(12)]
    clients[0].send("INFO")
    wait_until(lambda: broker.calls)
    for client in clients[1:]:
        client.send("INFO")
    wait_until(lambda: server.command_count == 24)
    broker.released.set()
    assert all(client.reply() for client in clients)
    assert broker.calls == 2


@pytest.mark.parametrize(
    ("ran_s", "rest_s"), [(0.0005, 0.0), (0.004, 0.04), (0.02, 0.1), (0.7, 0.7), (4.7, 1.0)], ids=str
)
def test_reads_rest_longer_the_more_they_cost(ran_s, rest_s):
    assert compute_rest_s(ran_s) == pytest.approx(rest_s)
