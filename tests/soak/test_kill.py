"""A worker that is killed repeatedly, at random moments. `make soak` kills it 200 times."""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter

import pytest
from django.db import connections, transaction
from django.test import override_settings

from django_faktory.brokers.orm import OrmBroker
from django_faktory.models import Job, OutboxEntry
from django_faktory.runtime.outbox_relay import make_outbox_relay
from django_faktory.store.workers import find_unknown_wids
from django_faktory.worker.worker import Worker
from tests.project import tasks
from tests.project.models import Mark
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
KILLS = int(os.environ.get("FAKTORY_SOAK_KILLS", "4"))
JOBS_A_KILL = 60


def live(wid, drain):
    """Run a worker process. It must not use its parent's connections."""
    forget_connections()
    Worker(OrmBroker("default"), queues=["default"], concurrency=4, wid=wid, drain=drain).run()


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


def worker(wid, *, drain=False):
    return forked(live, wid, drain)


def kill_soon(process, rng):
    """Kill the process a short random time after it has started to write."""
    before = Mark.objects.count()
    wait_until(lambda: Mark.objects.count() > before, every_s=0.002)
    time.sleep(rng.uniform(0, 0.05))
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)


def is_given_up(wid):
    """Release the jobs of lost workers, and return True if none is left; call it until then, as the maintenance does.

    Jobs that a dying transaction has locked or claimed become free a little later.
    """
    OrmBroker("default").lost([wid, *find_unknown_wids(0, using="default")])
    return not Job.objects.filter(state="working").exists()


def marks_after_kills(task):
    """Count the rows that each job wrote, with workers that were killed while they wrote."""
    rng = random.Random()
    for kill in range(KILLS):
        task.enqueue_many([(f"{kill}-{number}",) for number in range(JOBS_A_KILL)])
        kill_soon(worker(f"wid-{kill}"), rng)
        wait_until(lambda wid=f"wid-{kill}": is_given_up(wid))
        Job.objects.update(losses=0)  # a job may lose three workers in a row here and is no poison pill
    last = worker("wid-last", drain=True)
    last.join(120)
    assert last.exitcode == 0
    assert set(Job.objects.values_list("state", flat=True)) <= {"succeeded"}
    return Counter(Mark.objects.values_list("text", flat=True))


def expected():
    return {f"{kill}-{number}" for kill in range(KILLS) for number in range(JOBS_A_KILL)}


def test_an_atomic_task_writes_each_row_once_while_workers_are_killed():
    found = marks_after_kills(tasks.writes_mark_atomically)
    assert found.keys() == expected()
    assert {text: times for text, times in found.items() if times != 1} == {}


def test_non_atomic_tasks_write_some_rows_twice_and_miss_none():
    """Show that the test above can fail. A kill may come between two jobs: it tries again."""
    for _ in range(10):
        Mark.objects.all().delete()
        found = marks_after_kills(tasks.writes_mark)
        assert found.keys() == expected()
        if max(found.values()) > 1:
            return
    raise AssertionError("no kill came between the write of a task and the end of its job")


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
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
