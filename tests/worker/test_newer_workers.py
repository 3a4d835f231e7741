"""A worker without a task's code defers its jobs to newer workers: no retry is used, no job is lost, nothing spins."""

import json
from datetime import timedelta

import pytest
from django.db.models import F
from django.test import override_settings

from django_faktory import Batch
from django_faktory.core.payloads import Ack, FetchRequest, Reservation, failure
from django_faktory.models import Job, JobLock
from django_faktory.store.jobs import acknowledgements, claims, failures, pushes
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from django_faktory.tasks import base
from django_faktory.worker.unknown_jobs import FIRST_S, LONGEST_S, seconds_until_retry
from tests.factories import T0, JobFactory, payload
from tests.project.tasks import add, echo
from tests.waiting import wait_until

pytestmark = pytest.mark.once_if_quick


def held(*, age_s=0.0, **fields):
    found = {"jid": "jid-jid-1", "queue": "default", "text": "{}", "wid": "w", "attempt": 1, "started_at": T0}
    return Reservation(**found | {"created_at": T0 - timedelta(seconds=age_s)} | fields)


def failed_at(age_s, errtype="ValueError"):
    return json.dumps({"errtype": errtype, "failed_at": (T0 - timedelta(seconds=age_s)).isoformat()})


def ago(age_s):
    return (T0 - timedelta(seconds=age_s)).isoformat()


@pytest.mark.core
@pytest.mark.parametrize(
    ("job", "at", "wait_s"),
    [
        (held(age_s=0), None, FIRST_S),
        (held(age_s=20), None, 10.0),
        (held(age_s=300), None, LONGEST_S),
        (held(age_s=599), None, 1.0),
        (held(age_s=600), None, None),
        (held(age_s=-5), None, FIRST_S),
        (held(age_s=9000), ago(20), 10.0),
        (held(age_s=9000, failure=failed_at(20)), None, 10.0),
        (held(age_s=9000, failure=failed_at(20, "UnknownJobType")), None, None),
        (held(age_s=9000, failure="no JSON"), None, None),
        (held(age_s=0, started_at=None), None, None),
        (held(created_at=None), None, None),
    ],
)
def test_the_retry_delay_grows_with_the_wait_until_the_grace_ends(job, at, wait_s):
    assert seconds_until_retry(job, at, grace_s=600) == wait_s


@pytest.mark.core
def test_without_a_grace_period_a_job_is_not_postponed():
    assert seconds_until_retry(held(), None, grace_s=0) is None


def later(job, **fields):
    return failure(
        jid=job.jid, wid=job.wid, attempt=job.attempt, errtype="UnknownJobType", retry_in_s=5, verdict="later", **fields
    )


def fetch(wid="w", now=T0):
    [found] = claims.fetch(Store(now=now), [FetchRequest(queues=("default",), wid=wid)])
    return found[0] if found else None


@pytest.mark.django_db(transaction=True)
class TestInTheStore:
    def test_a_postponed_job_is_scheduled_and_counts_no_failure(self):
        pushes.push(Store(now=T0), [payload("a")])
        job = fetch()
        assert failures.fail(Store(now=T0), [later(job)]) == [True]
        row = Job.objects.get()
        assert (row.state, row.run_at, row.wid) == ("scheduled", T0 + timedelta(seconds=5), "")
        assert (row.failures, row.losses, row.failure, row.history) == (0, 0, "", "")
        assert row.errtype == "UnknownJobType", "the alarm about unknown tasks finds the job by it"
        assert fetch() is None
        due.enqueue_due(Store(now=T0 + timedelta(seconds=6)))
        assert fetch(now=T0 + timedelta(seconds=6)).jid == job.jid

    def test_a_postponement_by_another_worker_is_ignored(self):
        pushes.push(Store(now=T0), [payload("a")])
        job = fetch()
        stranger = later(Reservation(jid=job.jid, queue="default", text="", wid="other", attempt=job.attempt))
        assert failures.fail(Store(now=T0), [stranger]) == [False]
        assert Job.objects.get().state == "working"

    def test_a_late_report_does_not_change_a_postponed_job(self):
        pushes.push(Store(now=T0), [payload("a")])
        job = fetch()
        failures.fail(Store(now=T0), [later(job)])
        assert acknowledgements.ack(Store(), [Ack(jid=job.jid, wid=job.wid, attempt=job.attempt)]) == [False]
        assert failures.fail(Store(now=T0), [later(job)]) == [False]
        assert Job.objects.get().state == "scheduled"

    def test_postponements_and_failures_in_one_call_are_kept_apart(self):
        pushes.push(Store(now=T0), [payload("a"), payload("b")])
        first, second = fetch(), fetch()
        failed = failure(jid=second.jid, wid=second.wid, attempt=second.attempt, errtype="ValueError")
        assert failures.fail(Store(now=T0), [later(first), failed]) == [True, True]
        assert dict(Job.objects.values_list("jid", "state")) == {first.jid: "scheduled", second.jid: "retries"}

    def test_a_postponed_job_releases_its_lock(self):
        pushes.push(Store(now=T0), [payload(name, custom={"lock": "k"}) for name in "ab"])
        job = fetch()
        failures.fail(Store(now=T0), [later(job)])
        assert not JobLock.objects.filter(jid=job.jid).exists()
        assert fetch(now=T0 + timedelta(seconds=1)).jid != job.jid

    def test_a_cancelled_job_is_discarded_instead_of_postponed(self):
        pushes.push(Store(now=T0), [payload("a", result_ttl=60)])
        job = fetch()
        Job.objects.update(cancel_requested_at=F("enqueued_at"))
        failures.fail(Store(now=T0), [later(job)])
        assert Job.objects.get().state == "discarded"


@pytest.fixture
def forgotten(monkeypatch):
    """Return a function that unregisters a task in this process; its result registers the task again."""

    def forget(task):
        monkeypatch.delitem(base._registry, task.jobtype)
        return lambda: monkeypatch.setitem(base._registry, task.jobtype, task)

    return forget


def put_off(jid):
    return Job.objects.filter(jid=jid, state="scheduled", wid="").first()


def test_jobs_of_a_newer_version_wait_for_a_newer_worker_without_a_retry(
    work, state, forgotten, start_maintenance, caplog
):
    start_maintenance()
    learn = forgotten(add)
    results = [add.enqueue(number, 1) for number in range(3)]
    with Batch(success=echo.callback("all")) as batch:
        member = add.enqueue(40, 2)
    work()
    for result in (*results, member):
        wait_until(lambda result=result: put_off(result.id), what="put off")
    assert batch.status().failed == 0
    learn()
    for result in (*results, member):
        job = state(result, "succeeded", timeout_s=90)
        assert (job.failures, job.history) == (0, "")
    wait_until(lambda: Job.objects.filter(callback_of=batch.bid, state="succeeded").exists(), 60)
    records = [record for record in caplog.records if "left for newer workers" in record.getMessage()]
    assert len(records) <= 1


def test_other_jobs_run_while_a_postponed_job_waits(work, state, forgotten):
    forgotten(add)
    late = add.enqueue(1, 1)
    work()
    wait_until(lambda: put_off(late.id))
    state(echo.enqueue("x"), "succeeded")
    assert Job.objects.get(jid=late.id).claims <= 2


def test_a_job_of_unknown_type_fails_after_the_grace_period(work, state, forgotten):
    forgotten(add)
    with override_settings(FAKTORY={"UNKNOWN_JOBTYPE_GRACE": 60}):
        old = JobFactory(jobtype=add.jobtype)  # created long ago
        work()
        failed = wait_until(lambda: Job.objects.filter(pk=old.pk, state="retries").first())
    assert json.loads(failed.failure)["errtype"] == "UnknownJobType"
    assert "deploy the code" in failed.failure
