"""A worker that stops releases its running jobs: no attempt, error or loss counts, and each keeps its old place."""

import threading
from contextlib import suppress
from datetime import datetime, timedelta

import pytest
from django.db import connections
from django.utils import timezone

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.limits import Allowance
from django_faktory.core.payloads import Ack, FetchRequest, Interruption, NewBatch, WorkerIdentity, failure
from django_faktory.errors import ReservationLost
from django_faktory.models import Batch, Job, JobLock, Limiter, WorkerProcess
from django_faktory.operations.serializers import whole_job_of
from django_faktory.store.jobs import transitions
from django_faktory.store.limits import definitions, limiters
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from django_faktory.tasks.results import attempts_of, result_of, runs_of
from tests.factories import payload
from tests.project import tasks
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def interrupted(job, **changes):
    fields = {"jid": job.jid, "wid": job.wid, "attempt": job.attempt, "queue": job.queue, "message": "stopped"}
    return Interruption(**fields | changes)


class Node:
    """A broker, with short methods for its verbs."""

    def __init__(self, **options):
        self.broker = OrmBroker("default", **options)

    def push(self, *names, **fields):
        return self.broker.push([payload(jid=name, **fields) for name in names])

    def fetch(self, count=1, wid="w1"):
        [found] = self.broker.fetch([FetchRequest(queues=("default",), wid=wid, count=count)])
        return found

    def fetch_one(self, wid="w1"):
        [job] = self.fetch(1, wid)
        return job

    def interrupt(self, *jobs):
        return self.broker.interrupt([interrupted(job) for job in jobs])


@pytest.fixture
def node():
    return Node()


def names(jobs):
    return [job.jid.removeprefix("job-").rstrip(".") for job in jobs]


def row(job):
    return Job.objects.get(jid=job.jid)


def test_an_interrupted_job_is_requeued_without_a_counted_failure_or_attempt(node):
    node.push("a")
    before = Job.objects.get()
    job = node.fetch_one()
    assert node.interrupt(job) == [True]
    after = row(job)
    assert (after.state, after.wid, after.enqueued_at, after.sort_priority) == (
        "enqueued", "", before.enqueued_at, before.sort_priority,
    )  # fmt: skip
    assert (after.failures, after.losses, after.errtype, after.failure, after.attempts) == (0, 0, "", "", 0)
    assert after.interruptions == 1


def test_interrupted_jobs_return_to_their_places_by_priority_and_age(node):
    node.push("low", priority=-5)
    node.push("first", "second")
    held = node.fetch(3)
    node.push("third")
    node.push("urgent", priority=5)
    assert node.interrupt(*held) == [True] * 3
    assert names(node.fetch(10, "w2")) == ["urgent", "first", "second", "third", "low"]


def test_only_the_worker_that_holds_a_job_can_interrupt_it(node):
    node.push("a", "b", "c")
    taken, ended, stolen = node.fetch(3)
    node.broker.ack([Ack(jid=ended.jid, wid="w1", attempt=ended.attempt)])
    node.interrupt(taken)
    again = node.fetch_one("w2")
    strangers = interrupted(stolen, wid="w9")
    earlier = interrupted(taken)
    assert node.broker.interrupt([earlier, interrupted(ended), strangers]) == [False] * 3
    assert (row(taken).wid, row(taken).attempt) == ("w2", again.attempt)
    assert row(stolen).wid == "w1"


def test_a_late_report_of_an_interrupted_run_is_ignored(node):
    node.push("a")
    job = node.fetch_one()
    node.interrupt(job)
    late = {"jid": job.jid, "wid": job.wid, "attempt": job.attempt}
    assert node.broker.ack([Ack(**late)]) == [False]
    assert node.broker.fail([failure(**late)]) == [False]
    node.fetch_one("w1")  # claimed again by the same worker
    assert node.broker.ack([Ack(**late)]) == [False]
    assert row(job).state == "working"


def test_an_attempt_is_counted_when_the_job_ends_not_when_it_is_interrupted(node):
    result = tasks.add.enqueue(1, 2)
    for wid in ("w1", "w2"):
        node.interrupt(node.fetch_one(wid))
    running = node.fetch_one("w3")
    assert result_of(row(running), tasks.add, backend="default").attempts == 1
    node.broker.ack([Ack(jid=result.id, wid="w3", attempt=running.attempt, result="3")])
    found = tasks.add.get_result(result.id)
    assert (found.attempts, found.worker_ids, found.errors, found.return_value) == (1, ["w3"], [], 3)
    assert row(running).attempts == 1


def test_the_history_records_when_and_where_a_job_was_interrupted(node):
    node.push("a")
    node.interrupt(node.fetch_one("w7"))
    job = Job.objects.get()
    [run] = runs_of(job.history)
    assert (run.is_interruption, run.wid, run.message) == (True, "w7", "interrupted by shutdown")
    assert datetime.fromisoformat(run.failed_at) >= datetime.fromisoformat(run.started_at)
    assert attempts_of(job.history) == []
    whole_job = whole_job_of(job)
    [one] = whole_job["interrupted"]
    assert (whole_job["attempt"], whole_job["attempts"], one["worker"]) == (0, [], "w7")
    assert one["interrupted_at"] == run.failed_at


def test_many_interruptions_do_not_displace_errors_from_the_history(node):
    node.push("a")
    job = node.fetch_one()
    node.broker.fail([failure(jid=job.jid, errtype="E", message="the first error", retry_in_s=0)])
    wait_until(lambda: due.enqueue_due(Store()))  # SQLite rounds the time of the retry
    for _ in range(60):
        assert node.interrupt(node.fetch_one()) == [True]
    found = Job.objects.get()
    assert [one.message for one in attempts_of(found.history)] == ["the first error"]
    assert len(runs_of(found.history)) == 11
    assert (found.interruptions, found.failures) == (60, 1)


def test_an_interruption_releases_the_lock_to_the_oldest_job_of_the_key(node):
    node.push("a", "b", custom={"lock": "key"})
    job = node.fetch_one()
    assert node.fetch() == []
    node.interrupt(job)
    assert not JobLock.objects.exists()
    [again] = node.fetch(2, "w2")
    assert again.jid == job.jid
    assert again.lock_token > job.lock_token
    assert row(again).lock_token == again.lock_token


def test_an_interrupted_job_with_a_lost_lock_waits_for_the_holder(node):
    node.push("a", "b", custom={"lock": "key"})
    job = node.fetch_one()
    JobLock.objects.all().delete()
    Job.objects.filter(state="blocked").update(state="enqueued")
    holder = node.fetch_one("w2")
    node.interrupt(job)
    assert row(job).state == "blocked"
    assert row(holder).state == "working"
    node.broker.ack([Ack(jid=holder.jid, wid="w2", attempt=holder.attempt)])
    assert node.fetch_one("w3").jid == job.jid


@pytest.mark.parametrize(("scope", "name"), [("task", "noop"), ("queue", "default"), ("key", "mail")])
def test_an_interruption_releases_the_limiter_permits_of_the_job(node, scope, name):
    definitions.save_limit(scope, name, Allowance.of(1), using="default")
    node.push("a", "b", custom={"limit": "mail"})
    job = node.fetch_one()
    assert node.fetch() == []
    node.interrupt(job)
    assert Limiter.objects.get(name=name).in_use == 0
    assert len(node.fetch(5, "w2")) == 1
    assert Limiter.objects.get(name=name).in_use == 1
    assert not limiters.sweep(using="default")


def test_an_interrupted_batch_member_is_not_counted_as_failed(node):
    bid = node.broker.new_batch(NewBatch(complete=payload(jid="done", jobtype="done")))
    node.push("a", custom={"bid": bid})
    node.broker.commit_batch(bid)
    node.interrupt(node.fetch_one())
    status = node.broker.batch_status(bid)
    assert (status.total, status.pending, status.failed, status.complete_st) == (1, 1, 0, "")
    assert Batch.objects.get().unrun == 1
    again = node.fetch_one("w2")
    node.broker.ack([Ack(jid=again.jid, wid="w2", attempt=again.attempt)])
    assert node.fetch_one("w2").jobtype == "done"


def test_an_interrupted_batch_callback_runs_again_exactly_once(node):
    bid = node.broker.new_batch(NewBatch(success=payload(jid="done", jobtype="done")))
    node.broker.commit_batch(bid)
    node.interrupt(node.fetch_one())
    again = node.fetch_one("w2")
    assert again.jobtype == "done"
    node.broker.ack([Ack(jid=again.jid, wid="w2", attempt=again.attempt)])
    assert node.broker.batch_status(bid).success_st == "2"
    assert node.fetch() == []


def test_an_interrupted_job_keeps_its_unique_key(node):
    unique = {"unique_for": 600}
    node.push("a", custom=unique)
    node.interrupt(node.fetch_one())
    [refusal] = node.push("b", custom=unique)
    assert refusal is not None


def test_an_interrupted_job_does_not_reclaim_a_unique_until_start_key(node):
    unique = {"unique_for": 600, "unique_until": "start"}
    node.push("a", custom=unique)
    job = node.fetch_one()
    assert node.push("b", custom=unique) == [None]
    assert node.interrupt(job) == [True]
    [refusal] = node.push("c", custom=unique)
    assert refusal is not None
    assert names(node.fetch(5, "w2")) == ["a", "b"]


def test_an_interrupted_job_that_was_claimed_in_time_does_not_expire(node):
    node.push("a", custom={"expires_in": 60}, result_ttl=600)
    node.interrupt(node.fetch_one())
    later = timezone.now() + timedelta(seconds=120)
    due.expire(Store(now=later))
    assert names(node.fetch(1, "w2")) == ["a"]


def test_an_interrupted_job_that_was_cancelled_is_discarded(node):
    node.push("a", result_ttl=600)
    job = node.fetch_one()
    transitions.cancel(Store(), [job.jid])
    assert node.interrupt(job) == [True]
    assert (row(job).state, row(job).errtype) == ("discarded", "Cancelled")


def test_bye_of_a_worker_interrupts_the_jobs_that_it_holds(node):
    node.broker.hello(WorkerIdentity(wid="w1"))
    node.push("a")
    job = node.fetch_one()
    node.broker.bye(["w1"])
    assert (row(job).state, row(job).interruptions, row(job).losses) == ("enqueued", 1, 0)
    assert not WorkerProcess.objects.exists()


def test_interruptions_beyond_max_interruptions_count_as_failures():
    node = Node(max_interruptions=2)
    node.push("a")
    for _ in range(2):
        node.interrupt(node.fetch_one())
    job = node.fetch_one()
    assert node.interrupt(job) == [True]
    found = row(job)
    assert (found.state, found.errtype, found.failures, found.interruptions) == ("retries", "WorkerShutdown", 1, 2)


def test_a_finished_job_that_is_pushed_again_starts_without_interruptions(node):
    node.push("a", result_ttl=600)
    node.interrupt(node.fetch_one())
    job = node.fetch_one()
    node.broker.ack([Ack(jid=job.jid, wid="w1", attempt=job.attempt)])
    node.push("a")
    again = Job.live.get()
    assert (again.state, again.interruptions, again.history) == ("enqueued", 0, "")


def test_an_ack_that_is_being_committed_wins_over_an_interruption(node):
    """An atomic task commits its end just as its worker releases it."""
    node.push("a", result_ttl=600)
    job = node.fetch_one()
    results, threads = [], []

    def give_back():
        try:
            results.append(node.interrupt(job))
        finally:
            connections.close_all()

    with node.broker.atomic():
        assert node.broker.ack_last(Ack(jid=job.jid, wid=job.wid, attempt=job.attempt), job)
        if connections["default"].vendor != "sqlite":  # SQLite locks the whole file for a writer
            threads.append(threading.Thread(target=give_back))
            threads[0].start()
    if not threads:
        give_back()
    else:
        threads[0].join(30)
    assert results == [[False]]
    assert (row(job).state, row(job).interruptions) == ("succeeded", 0)


def test_a_transactional_ack_after_an_interruption_is_rejected(node):
    node.push("a", result_ttl=600)
    job = node.fetch_one()
    node.interrupt(job)
    node.fetch_one("w2")
    has_ended = []
    with suppress(ReservationLost), node.broker.atomic():
        has_ended.append(node.broker.ack_last(Ack(jid=job.jid, wid=job.wid, attempt=job.attempt), job))
    assert has_ended in ([], [False])
    assert row(job).state == "working"
