"""Unused queues and totals of unused tasks are deleted; queues and totals in use or with settings stay."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.histograms import OTHER, JobTiming, Recorder
from django_faktory.models import Job, Limit, Measure, Queue
from django_faktory.models.queue import QueueQuerySet
from django_faktory.runtime.maintenance import Maintenance
from django_faktory.store import queues
from django_faktory.store.statistics import histograms
from django_faktory.store.store import Store
from tests.factories import JobFactory, QueueFactory, payload

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"


def names():
    return sorted(Queue.objects.values_list("name", flat=True))


def unused(name, **fields):
    return QueueFactory(name=name, used_at=timezone.now() - timedelta(seconds=queues.UNUSED_S + 60), **fields)


def test_only_an_empty_unused_queue_without_settings_is_deleted():
    unused("gone")
    unused("paused", paused_at=timezone.now())
    unused("limited")
    Limit.objects.create(scope="queue", name="limited", concurrency=1)
    Limit.objects.create(scope="task", name="gone", concurrency=1)
    for state in ("enqueued", "blocked"):
        unused(state)
        JobFactory(queue=state, **({"blocked": True} if state == "blocked" else {}))
    QueueFactory(name="fresh", used_at=timezone.now() - timedelta(seconds=queues.UNUSED_S - 600))
    assert queues.forget_unused(using=USING) == (1, "")
    assert names() == ["blocked", "enqueued", "fresh", "limited", "paused"]


def test_unused_queues_are_deleted_in_portions():
    for number in range(5):
        unused(f"q{number}")
    assert queues.forget_unused(using=USING, portion_size=2) == (2, "q1")
    assert queues.forget_unused(using=USING, portion_size=2, after="q1") == (2, "q3")
    assert queues.forget_unused(using=USING, portion_size=2, after="q3") == (1, "")
    assert names() == []


USES = {
    "push": lambda: queues.add(["mail"], using=USING),  # as after the commit of a push
    "pause": lambda: queues.pause(Store(USING), ["mail"]),
    "limit": lambda: Limit.objects.create(scope="queue", name="mail", concurrency=1),
}


@pytest.mark.parametrize("use", USES)
def test_a_queue_used_again_before_its_deletion_is_kept(monkeypatch, use):
    """The use happens between the look and the delete."""
    unused("mail")
    run = queues.run

    def use_before_the_delete(using, verb, *, atomic=True):
        if atomic:
            monkeypatch.setattr(queues, "run", run)
            USES[use]()
        return run(using, verb, atomic=atomic)

    monkeypatch.setattr(queues, "run", use_before_the_delete)
    assert queues.forget_unused(using=USING) == (0, "")
    assert names() == ["mail"]


@pytest.mark.skipif(connection.vendor == "sqlite", reason="it has one writer at a time")
def test_a_pause_is_not_lost_to_a_concurrent_deletion(monkeypatch):
    """The delete happens after the pause has found the row."""
    unused("mail")
    create = QueueQuerySet.bulk_create
    counts = []

    def forget():
        try:
            counts.append(queues.forget_unused(using=USING)[0])
        finally:
            connection.close()

    def create_and_forget(self, *args, **options):
        found = create(self, *args, **options)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(forget).result(30)
        return found

    monkeypatch.setattr(QueueQuerySet, "bulk_create", create_and_forget)
    assert queues.pause(Store(USING), ["mail"]) == ["mail"]
    assert counts == [0]
    assert queues.read_paused(using=USING) == {"mail"}


def test_a_push_creates_a_deleted_queue_again():
    unused("mail")
    broker = OrmBroker(USING)
    queues.forget_unused(using=USING)
    broker.push([payload(queue="mail")])
    assert names() == ["mail"]


def test_use_of_a_queue_is_recorded_at_most_once_an_hour():
    before = unused("mail").used_at
    queues.add(["mail"], using=USING)
    first = Queue.objects.get().used_at
    assert first > before
    queues.add(["mail"], using=USING)
    assert Queue.objects.get().used_at == first


def test_maintenance_adds_queues_of_waiting_jobs_and_deletes_unused_ones():
    unused("gone")
    JobFactory(queue="callbacks")
    JobFactory(queue="locked", blocked=True)
    Maintenance(USING).run_once()
    assert names() == ["callbacks", "locked"]


def test_names_of_450_queues_are_found_in_at_most_five_statements():
    rows = JobFactory.many(450)
    for number, row in enumerate(rows):
        row.queue = f"q{number:03}"
    Job.objects.bulk_create(rows)
    JobFactory(queue="q001", blocked=True)
    JobFactory(queue="r", blocked=True)
    with CaptureQueriesContext(connection) as caught:
        assert queues.known_names(using=USING) == [*(f"q{number:03}" for number in range(450)), "r"]
    assert len(caught) <= 5


def passed(queue, *jobtypes, times=1):
    recorder = Recorder()
    recorder.started([JobTiming(queue, jobtype, 1.0) for jobtype in jobtypes] * times)
    recorder.ended([JobTiming(queue, jobtype, 2.0) for jobtype in jobtypes] * times, succeeded=True)
    histograms.add(recorder.take(), using=USING)


def sums():
    return {names: (one.started, one.succeeded, one.ran_s, sum(one.waits))
            for names, one in histograms.read_totals(using=USING).items()}  # fmt: skip


def test_totals_of_unused_tasks_are_folded_into_the_total_of_others():
    # Enough for two portions.
    count = histograms.CHUNK + 5
    passed("mail", *(f"task{number}" for number in range(1, count)))
    passed("mail", "task0", times=4)
    old = timezone.now() - timedelta(seconds=histograms.UNUSED_S + 60)
    Measure.objects.exclude(jobtype="task3").update(used_at=old)
    Maintenance(USING).run_once()
    idle = count + 2  # 4 jobs of task0, and 1 job of each other task except task3
    assert sums() == {(OTHER, OTHER): (idle, idle, 2.0 * idle, idle), ("mail", "task3"): (1, 1, 2.0, 1)}
    assert Measure.objects.exclude(minute=histograms.ALL_TIME).count() == count
    passed("mail", "task0", times=7)
    assert sums()["mail", "task0"] == (7, 7, 14.0, 7)
    Measure.objects.filter(minute=histograms.ALL_TIME).update(used_at=old)
    Maintenance(USING).run_once()
    every = idle + 8
    assert sums() == {(OTHER, OTHER): (every, every, 2.0 * every, every)}


def test_totals_of_a_task_in_use_are_kept():
    passed("mail", "task")
    Measure.objects.update(used_at=timezone.now() - timedelta(seconds=histograms.UNUSED_S + 60))
    passed("mail", "task")
    assert histograms.fold_idle_series(using=USING) is None
    assert sums() == {("mail", "task"): (2, 2, 4.0, 2)}
