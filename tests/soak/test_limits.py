"""Check a rate with nodes, workers and the real clock. The stored start times are counted.

SOAK_LIMIT_S=10 SOAK_LIMIT_RATE=100 python -m pytest tests/soak/test_limits.py -s
"""

import os
import threading
from datetime import timedelta

import pytest
from django.db import connection, connections
from django.utils import timezone

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.limits import Allowance
from django_faktory.core.payloads import Ack, FetchRequest
from django_faktory.models import Job
from django_faktory.runtime.maintenance import Maintenance
from django_faktory.store.limits import definitions
from tests.factories import payload

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

SECONDS = float(os.environ.get("SOAK_LIMIT_S", "3"))
RATE = int(os.environ.get("SOAK_LIMIT_RATE", "40" if connection.vendor == "sqlite" else "100"))
CLIENTS = 8


@pytest.fixture
def nodes():
    """Run the maintenance of two nodes."""
    loops = [Maintenance("default") for _ in range(2)]
    threads = [threading.Thread(target=loop.run) for loop in loops]
    for thread in threads:
        thread.start()
    yield
    for loop in loops:
        loop.stop()
    for thread in threads:
        thread.join(60)


class Client:
    """Fetch jobs and acknowledge them until `stopping` is set. The rows of the ended jobs stay."""

    def __init__(self, number, stopping):
        self.wid, self.stopping = f"w{number}", stopping
        self.plain = 0

    def run(self):
        broker = OrmBroker("default")
        request = FetchRequest(queues=("limited", "plain"), wid=self.wid, count=4)
        while not self.stopping.is_set():
            [found] = broker.fetch([request])
            self.plain += sum(job.queue == "plain" for job in found)
            broker.ack([Ack(jid=job.jid, wid=self.wid) for job in found])
            if not found:
                self.stopping.wait(0.01)
        connections.close_all()


def started():
    return Job.objects.filter(queue="limited", started_at__isnull=False, state="succeeded")


def test_a_rate_limit_is_enforced_without_delaying_other_jobs(nodes):
    definitions.save_limit("task", "throttled", Allowance(rate=RATE), using="default")
    wanted = int(RATE * SECONDS)
    many = [payload(jobtype="throttled", queue="limited", result_ttl=1000) for _ in range(wanted * 2)]
    plain = [payload(queue="plain") for _ in range(300)]
    broker = OrmBroker("default")
    for start in range(0, len(many), 500):
        broker.push(many[start : start + 500])
    broker.push(plain)
    stopping = threading.Event()
    clients = [Client(number, stopping) for number in range(CLIENTS)]
    threads = [threading.Thread(target=client.run) for client in clients]
    began_at = timezone.now()
    for thread in threads:
        thread.start()

    def all_plain_ran():
        return sum(client.plain for client in clients) == len(plain)

    was_blocked = False
    while not (started().count() >= wanted and all_plain_ran()) and not stopping.wait(0.1):
        was_blocked = was_blocked or Job.objects.filter(state="blocked").exists()
    stopping.set()
    for thread in threads:
        thread.join(60)
    # From a time before the first permit: a slow machine delays the first start, and permits accumulate meanwhile.
    inside = started().filter(started_at__lt=began_at + timedelta(seconds=SECONDS)).count()
    print(f"{inside} started in {SECONDS:g} s, {RATE} a second are {wanted}")  # noqa: T201  (pytest -s shows it)
    burst = 0.4 * RATE  # the initial content of the bucket
    assert inside <= wanted + burst + 1
    if SECONDS >= 10:
        assert abs(inside - wanted) <= 0.05 * wanted
    assert all_plain_ran(), "unlimited jobs behind limited ones run"
    assert was_blocked
