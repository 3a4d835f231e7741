"""`Job.attempts` counts runs, not claims that were released, and never exceeds `Job.max_attempts`."""

import pytest
from django.db.models import F

from django_faktory import push
from django_faktory.models import Job
from django_faktory.operations.rows import JobSummary
from tests.project import tasks
from tests.tasks.work import work

pytestmark = pytest.mark.django_db(transaction=True)


def counts(jid):
    job = Job.objects.get(jid=jid)
    return job.attempts, job.max_attempts


def make_ready(jid):
    Job.objects.filter(jid=jid).requeue()


def test_a_job_that_waits_for_newer_code_has_no_attempts():
    jid = push("no.such.task", max_attempts=3)
    for _ in range(4):
        work()
        make_ready(jid)
    job = Job.objects.get(jid=jid)
    assert job.claims == 4, "each claim moves the fence"
    assert counts(jid) == (0, 3)
    assert (JobSummary.read(job)["attempt"], JobSummary.read(job)["max_attempts"]) == (0, 3)


def test_a_retry_by_hand_of_a_job_without_attempts_left_raises_the_maximum():
    result = tasks.fails.using(max_attempts=2).enqueue()
    for expected in [(1, 2), (2, 2), (3, 3)]:
        work()
        assert counts(result.id) == expected
        make_ready(result.id)


def test_a_lost_run_is_an_attempt_and_uses_no_retry():
    result = tasks.noop.using(max_attempts=1).enqueue()
    Job.objects.filter(jid=result.id).update(losses=F("losses") + 1)
    work()
    assert counts(result.id) == (2, 2)
