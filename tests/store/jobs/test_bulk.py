"""Bulk changes to any number of jobs, in steps. Rules: W23 to W25."""

import threading

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.mutation import Mutation
from django_faktory.core.payloads import Ack
from django_faktory.models import Job, Queue, Tracking
from django_faktory.store import queues, workers
from django_faktory.store.jobs import bulk
from django_faktory.store.store import Store
from tests.factories import JobFactory, QueueFactory, WorkerFactory

pytestmark = pytest.mark.django_db


SMALL = bulk.StepSizes(chunk=3, read_at_once=2)


def steps(command, target="dead", sizes=SMALL, **filters):
    return bulk.mutate(Store(), Mutation(command=command, target=target, **filters), sizes=sizes)


def dead(count, **fields):
    """Create dead jobs with others between them, so that the ids of the set have gaps."""
    made = []
    for _ in range(count):
        made.append(JobFactory(dead=True, **fields))
        JobFactory()
    return made


@pytest.mark.parametrize("command", ["kill", "requeue", "discard", "clear"])
def test_a_bulk_command_changes_all_jobs_in_steps_of_limited_size(command):
    """W23: eight jobs take steps of 3, 3 and 2."""
    dead(8)
    assert [step() for step in steps(command)] == [3, 3, 2]


def test_bulk_commands_by_jids_or_glob_run_in_steps_too():
    jobs = dead(5)
    assert [step() for step in steps("kill", jids=tuple(job.jid for job in jobs))] == [3, 2]
    assert [step() for step in steps("kill", regexp="*noop*")] == [2, 2, 1]


def test_a_bulk_command_on_an_empty_set_takes_no_step():
    JobFactory()
    assert list(steps("kill")) == []


def test_a_bulk_command_ignores_jobs_that_arrive_while_it_runs():
    """W23: the operation ends although jobs keep arriving."""
    dead(4)
    changed = 0
    for step in steps("requeue"):
        changed += step()
        dead(2)
    assert changed == 4
    assert Job.objects.filter(state="dead").count() == 4


def test_a_bulk_command_skips_a_job_that_left_the_set_meanwhile():
    jobs = dead(4)
    under_way = steps("discard")
    next(under_way)()
    Job.objects.filter(pk=jobs[-1].pk).update(state="enqueued")
    assert [step() for step in under_way] == [0]
    assert Job.objects.filter(pk=jobs[-1].pk).exists()


def test_a_new_bulk_command_finishes_an_aborted_one():
    dead(7)
    next(steps("discard"))()
    assert sum(step() for step in steps("discard")) == 4


def test_a_removed_queue_keeps_its_pause_until_it_is_empty():
    """W24: no worker may get a job that is about to be dropped."""
    JobFactory.create_batch(4, queue="q")
    queues.pause(Store(), ["q"])
    *dropping, forgetting = bulk.remove_queues(Store(), ["q"], sizes=SMALL)
    assert [step() for step in dropping] == [3, 1]
    assert Queue.objects.get(name="q").paused_at
    forgetting()
    assert not Queue.objects.exists()


def test_the_removal_of_many_empty_queues_takes_few_statements(django_assert_max_num_queries):
    """W24: a client may send 1,000 names, and each took 7 statements."""
    names = [f"q{number}" for number in range(300)]
    queues.add(names, using="default")
    JobFactory(queue="q299")
    with django_assert_max_num_queries(40):
        assert sum(step() for step in bulk.remove_queues(Store(), names)) == 1
    assert not Queue.objects.exists()


def test_a_flush_deletes_jobs_in_steps_and_totals_at_the_end():
    """W25: the steps delete batches, jobs, progress records, and totals at the end."""
    dead(2)
    working = JobFactory(working=True)
    OrmBroker("default").ack([Ack(jid=working.jid)])
    QueueFactory()
    Tracking.objects.bulk_create(Tracking(jid=f"tracked{number}") for number in range(4))
    assert [step() for step in bulk.flush(Store(), sizes=SMALL)] == [0, 3, 1, 3, 1, 0]
    assert not Job.objects.exists()
    assert not Tracking.objects.exists()
    assert OrmBroker("default").info()["total_processed"] == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
@pytest.mark.parametrize("command", ["kill", "requeue", "discard"])
@pytest.mark.parametrize("waiting_count", [1500, 100])
def test_a_bulk_step_does_not_wait_for_locked_jobs_outside_its_set(command, waiting_count):
    """W23: uncommitted claims are spread over the whole range, also if the step has most rows of the table."""
    waiting, dead = JobFactory.many(waiting_count), JobFactory.many(500, dead=True)
    rows = [*dead, *waiting]
    Job.objects.bulk_create(rows[number * 7919 % len(rows)] for number in range(len(rows)))  # 7919 is prime: a shuffle
    changed = []

    def change():
        try:
            changed.extend(step() for step in steps(command, sizes=bulk.DEFAULT_SIZES))
        finally:
            connection.close()

    with transaction.atomic():
        held = Job.objects.filter(state="enqueued").select_for_update()
        assert len(held) == waiting_count
        thread = threading.Thread(target=change)
        thread.start()
        thread.join(30)
        waited = thread.is_alive()
    thread.join(60)
    assert (waited, sum(changed)) == (False, 500)


def test_known_queue_names_include_stored_queues_and_queues_with_ready_jobs():
    for queue in ("b", "a", "b", "c"):
        JobFactory(queue=queue)
    JobFactory(queue="not-yet", scheduled=True)
    QueueFactory(name="z")
    assert queues.known_names(using="default") == ["a", "b", "c", "z"]


def test_queue_latency_takes_at_most_7_statements_for_any_number_of_jobs(django_assert_max_num_queries):
    """W24: at most 7 statements, whatever the number of jobs."""
    JobFactory.create_batch(20, queue="q")
    JobFactory(queue="q", sort_priority=-25)
    with django_assert_max_num_queries(7):
        queues.latency(Store(), ["q"])


def test_advancing_all_workers_at_once_never_reverts_a_worker_state():
    """W21: a worker's state advances and never goes back."""
    for state in ("running", "quiet", "terminate"):
        WorkerFactory(wid=state, state=state)
    assert workers.advance(None, "quiet", using="default") == 1
    assert workers.advance(["running", "unknown", "not\x00storable"], "terminate", using="default") == 1
    assert workers.advance(None, "quiet", using="default") == 0


def test_a_glob_reads_large_jobs_alone_and_small_ones_together():
    """A hundred jobs of 15 MiB used to be read at once."""
    sizes = bulk.StepSizes(read_characters=1000)
    for number, size in enumerate([10, 10, 5000, 5000, 10]):
        JobFactory(dead=True, jid=f"dead-{number:04d}", payload=f'{{"args":["{"x" * size}"]}}')
    with CaptureQueriesContext(connection) as caught:
        assert [step() for step in steps("discard", sizes=sizes, regexp="*xxx*")] == [5]
    columns = [query["sql"].split("FROM")[0] for query in caught]
    assert sum("payload" in names and "LENGTH" not in names for names in columns) == 4


def test_a_long_literal_of_a_glob_is_not_searched_for_by_the_database():
    """For a job of 15 MiB, LIKE with 998 characters took 11 s on SQLite and 33 s on PostgreSQL."""
    literal = "a" * 500
    JobFactory(dead=True, payload=f'{{"jid":"long-literal","args":["{literal}"]}}')
    with CaptureQueriesContext(connection) as caught:
        assert [step() for step in steps("discard", regexp=f"*{literal}*")] == [1]
    searches = [query["sql"] for query in caught if "LIKE" in query["sql"].upper()]
    assert searches
    assert not any("a" * 50 in search for search in searches)
