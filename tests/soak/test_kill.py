"""A worker that is killed, again and again, at moments of chance. `make soak` does it 200 times."""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter

import pytest
from django.db import connections

from django_faktory.brokers.orm import OrmBroker
from django_faktory.models import Job
from django_faktory.worker.runner import Worker
from tests.project import tasks
from tests.project.models import Mark
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(600)]
KILLS = int(os.environ.get("FAKTORY_SOAK_KILLS", "4"))
JOBS_A_KILL = 60


def live(wid, drain):
    """A worker process's whole life. Its connections are its own."""
    for alias in connections:
        del connections[alias]
    Worker(OrmBroker("default"), queues=["default"], concurrency=4, wid=wid, drain=drain).run()


def worker(wid, *, drain=False):
    connections.close_all()  # a forked process must not share them
    process = multiprocessing.get_context("fork").Process(target=live, args=(wid, drain))
    process.start()
    return process


def is_given_up(wid):
    """As the upkeep does, again and again: what a dying transaction still locks comes free a little later."""
    OrmBroker("default").lost([wid])
    return not Job.objects.filter(state="working").exists()


def marks_after_kills(task):
    """How often each job's row was written, by workers that were killed while they wrote."""
    rng = random.Random()
    for kill in range(KILLS):
        task.enqueue_many([(f"{kill}-{number}",) for number in range(JOBS_A_KILL)])
        before = Mark.objects.count()
        process = worker(f"wid-{kill}")
        wait_until(lambda before=before: Mark.objects.count() > before, every_s=0.002)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        wait_until(lambda wid=f"wid-{kill}": is_given_up(wid))
        Job.objects.update(losses=0)  # three lost workers in a row are no poison here
    last = worker("wid-last", drain=True)
    last.join(120)
    assert last.exitcode == 0
    assert set(Job.objects.values_list("state", flat=True)) <= {"succeeded"}
    return Counter(Mark.objects.values_list("text", flat=True))


def expected():
    return {f"{kill}-{number}" for kill in range(KILLS) for number in range(JOBS_A_KILL)}


def test_killed_at_any_moment_an_atomic_task_has_written_each_row_once():
    found = marks_after_kills(tasks.writes_mark_atomically)
    assert found.keys() == expected()
    assert {text: times for text, times in found.items() if times != 1} == {}


def test_without_atomic_some_are_written_twice_and_none_is_missing():
    """What shows that the test above can fail."""
    found = marks_after_kills(tasks.writes_mark)
    assert found.keys() == expected()
    assert max(found.values()) > 1
