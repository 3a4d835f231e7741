"""Losses, failures and interruptions of a job count from its latest run on that committed a step (ADR 0051)."""

import pytest
from django.db import transaction

from django_faktory import task
from django_faktory.brokers import get_broker
from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.lifecycle import MAX_LOSSES
from django_faktory.core.payloads import Interruption, failure_of
from django_faktory.core.steps import StepRecord
from django_faktory.errors import ConnectionLost
from django_faktory.models import Job, WorkerProcess
from django_faktory.store.jobs import failures
from django_faktory.tasks.compat import TaskResult
from django_faktory.tasks.results import result_of
from django_faktory.worker.execution import prepare
from django_faktory.worker.suspects import has_often_met, is_suspect
from tests.factories import payload
from tests.project.tasks import noop
from tests.tasks.work import fetched, work

pytestmark = pytest.mark.django_db(transaction=True)
seen = []


def note_attempts(_: BaseException, result: TaskResult) -> float:
    seen.append(result.attempts)
    return 0


@task(takes_context=True, max_attempts=3, backoff=note_attempts)
def fails_after_steps(context, steps):
    for number in range(steps):
        with context.step("a", key=(context.task_result.id, number)):
            seen.append("step")
    raise ValueError


@pytest.fixture(autouse=True)
def _forget():
    seen.clear()


class Run:
    """A claim of the one job."""

    names = iter(range(1_000_000))

    def __init__(self, *, progresses=False, broker=None):
        self.broker = broker or get_broker()
        Job.objects.filter(state="retries").retry()
        self.job = fetched("w1")
        if progresses:
            with transaction.atomic():
                self.broker.record_step(self.job, StepRecord(name=f"step {next(self.names)}"))

    def lose(self):
        self.broker.lost(["w1"])

    def fail(self, **details):
        assert self.broker.fail([failure_of(self.job, errtype="E", message="no", retry_in_s=0, **details)]) == [True]

    def interrupt(self, errtype="WorkerShutdown"):
        job = self.job
        report = Interruption(
            jid=job.jid, wid=job.wid, attempt=job.attempt, queue=job.queue, message="stopped", errtype=errtype
        )
        assert self.broker.interrupt([report]) == [True]

    def expire(self):
        Job.live.update(reserved_until="2026-01-01T00:00Z")
        assert failures.reap(self.broker) == 1


@pytest.fixture
def job():
    """Push a job; return a function that reads its row."""
    get_broker().push([payload("a", noop.jobtype, retry=2, result_ttl=60)])
    return Job.objects.get


def test_any_number_of_losses_after_progress_does_not_kill_a_job(job):
    for _ in range(2 * MAX_LOSSES):
        Run(progresses=True).lose()
        assert (job().state, job().losses, job().attempts) == ("enqueued", 1, 1)


def test_losses_at_one_place_kill_a_job_after_its_progress_too(job):
    for _ in range(MAX_LOSSES):
        Run(progresses=True).lose()
    for losses in range(2, MAX_LOSSES):
        assert not is_suspect(fetched_again())
        Run().lose()
        assert (job().state, job().losses) == ("enqueued", losses)
    assert is_suspect(fetched_again())
    Run().lose()
    assert job().state == "dead"


def fetched_again():
    """Claim the job and release it."""
    found = fetched("w2")
    get_broker().release([found])
    return found


@pytest.mark.parametrize("way", ["a failure", "an interruption", "an expired reservation"])
def test_progress_forgets_earlier_losses_and_failures_however_its_run_ends(job, way):
    Run().lose()
    Run().fail()
    Run().lose()
    assert (job().losses, job().failures) == (2, 1)
    run = Run(progresses=True)
    {
        "a failure": lambda: run.fail(has_progressed=True),
        "an interruption": run.interrupt,
        "an expired reservation": run.expire,
    }[way]()
    now = 0 if way == "an interruption" else 1
    assert (job().losses, job().failures, job().attempts) == (0, now, now)
    again = prepare(Run().job)
    assert again.result.attempts == now + 1
    assert result_of(job(), again.task, backend="default").attempts == now + 1
    assert len(again.result.errors) == {"an interruption": 3}.get(way, 4), "all of them remain readable"


def test_retries_and_backoff_count_since_the_progress():
    fails_after_steps.enqueue(0)
    for _ in range(2):
        work()
        Job.objects.all().retry()
    assert seen == [1, 2]
    Job.objects.update(payload=Job.objects.get().payload.replace("[0]", "[1]"))
    work()
    job = Job.objects.get()
    assert (job.state, job.failures, job.attempts) == ("retries", 1, 1), "it was the last attempt"
    assert seen == [1, 2, "step", 1]
    for state in ("retries", "dead"):
        Job.objects.all().retry()
        work()
        assert Job.objects.get().state == state
    assert seen == [1, 2, "step", 1, 2]


def test_interruptions_count_since_the_progress(job):
    broker = OrmBroker("default", max_interruptions=2)
    for _ in range(4):
        Run(progresses=True, broker=broker).interrupt()
        assert job().interruptions == 1
    Run(broker=broker).interrupt()
    Run(broker=broker).interrupt()
    assert (job().state, job().interruptions) == ("retries", 2)


def test_lost_connections_count_since_the_progress(job):
    for _ in range(12):
        Run(progresses=True).interrupt("ConnectionLost")
    assert not has_often_met(fetched_again(), ConnectionLost)
    for _ in range(9):
        Run().interrupt("ConnectionLost")
    assert has_often_met(fetched_again(), ConnectionLost)


def test_a_worker_that_unregisters_with_a_job_keeps_its_progress(job):
    WorkerProcess.objects.create(wid="w1", hostname="h", pid=1)
    Run().lose()
    WorkerProcess.objects.create(wid="w1", hostname="h", pid=1)
    Run(progresses=True)
    get_broker().bye(["w1"])
    assert (job().state, job().losses) == ("enqueued", 0)
