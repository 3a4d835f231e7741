"""Rescheduling of failed jobs, and a trial run of one of them."""

from datetime import UTC, datetime, timedelta

import pytest

from django_faktory.models import Job
from django_faktory.operations import bulk
from django_faktory.store.jobs import transitions
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db


def test_failed_jobs_are_rescheduled_at_intervals_in_their_order():
    [JobFactory(dead=True) for _ in range(3)]
    JobFactory(working=True)
    run = bulk.begin("retry", every_s=10, using="default")
    while not run.is_over:
        run = run.step(using="default", size=2)
    assert (run.placed, run.changed) == (3, 3)
    found = list(Job.objects.retries().order_by("pk").values_list("run_at", "finished_at", "purge_at", "wid"))
    began = datetime.fromtimestamp(run.first_at, UTC)
    assert found == [(began + timedelta(seconds=10 * place), None, None, "") for place in range(3)]
    assert transitions.defer({}, using="default") == 0


@pytest.mark.parametrize(("kept", "becomes"), [(None, bulk.TESTED_FOR_S), (60, 60)])
def test_a_trial_run_requeues_a_dead_job_with_a_result_ttl(kept, becomes):
    job = JobFactory(dead=True, result_ttl=kept)
    assert bulk.test_one(job)
    row = Job.objects.get()
    assert (row.state, row.result_ttl) == ("enqueued", becomes)
    assert not bulk.test_one(job)
