"""A producer that is killed repeatedly, at random moments. `make soak` kills it 200 times."""

import multiprocessing
import os
import random
import signal
import time

import pytest
from django.db import connections, transaction
from django.test import override_settings

from django_faktory.models import Job, OutboxEntry
from django_faktory.runtime.outbox_relay import make_outbox_relay
from tests.project import tasks
from tests.project.models import Mark
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True, databases=["default", "other"])]
KILLS = int(os.environ.get("FAKTORY_SOAK_KILLS", "4"))


def enqueue_until_killed():
    """Run a producer process: data and a job in each transaction."""
    forget_connections()
    while True:
        with transaction.atomic():
            Mark.objects.create(text="data")
            tasks.noop.enqueue()


def forget_connections():
    for alias in connections:
        del connections[alias]


def forked(target, *args):
    for connection in connections.all():  # a forked process must not share them, nor pooled connections
        connection.close()
        if connection.vendor == "postgresql":
            connection.close_pool()
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    return process


def kill_soon(process, rng):
    """Kill the process a short random time after it has started to write."""
    before = Mark.objects.count()
    wait_until(lambda: Mark.objects.count() > before, every_s=0.002)
    time.sleep(rng.uniform(0, 0.05))
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)


@pytest.mark.parametrize("faktory", [{}, {"DATABASE": "other"}], ids=["jobs in the same database", "jobs elsewhere"])
def test_a_killed_producer_leaves_jobs_and_data_consistent(faktory):
    rng = random.Random()
    with override_settings(FAKTORY=faktory):
        for _ in range(KILLS):
            kill_soon(forked(enqueue_until_killed), rng)
        OutboxEntry.objects.update(leased_until=None)  # release the entry that the killed producer was relaying
        if handing_on := make_outbox_relay():
            assert handing_on.run_once()
        # On some servers the last transaction of a killed client ends a little later.
        wait_until(lambda: Job.objects.using(faktory.get("DATABASE", "default")).count() == Mark.objects.count())
    assert not OutboxEntry.objects.exists()
