"""Workers in Go and Ruby obey the admin's actions by the replies to their BEATs: every 15 and every 10 seconds."""

import json
import time

import pytest
from django.core.management import call_command

from django_faktory.brokers.orm import OrmBroker
from django_faktory.models import Job, WorkerProcess
from django_faktory.server.tuning import DEFAULT_TUNING
from tests.factories import payload
from tests.interop.test_clients import JOBTYPES
from tests.server.conftest import serve  # noqa: F401  (a fixture)
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.django_db(transaction=True)]


@pytest.mark.parametrize("kind", ["go", "ruby"])
def test_a_quiet_worker_fetches_no_job_and_ends_when_terminated(start_worker, kind):
    add, _ = JOBTYPES.get(kind, ("add", "fails"))
    process = start_worker(kind)
    wid = wait_until(WorkerProcess.objects.first, what="its HELLO").wid
    call_command("faktory", "quiet", wid, "--yes")
    beat_at = WorkerProcess.objects.get(wid=wid).beat_at
    wait_until(lambda: WorkerProcess.objects.get(wid=wid).beat_at != beat_at, what="the reply to its next BEAT")
    heard_at = time.monotonic()
    wait_until(
        lambda: time.monotonic() > heard_at + DEFAULT_TUNING.fetch_wait_s + 1, what="the answer to a FETCH in transit"
    )
    OrmBroker("default").push([payload("late", add, [4, 5])])
    call_command("faktory", "terminate", wid, "--yes")
    process.communicate(timeout=60)
    assert Job.objects.get().state == "enqueued"


@pytest.mark.parametrize("kind", ["ruby"])
def test_a_failure_in_ruby_is_shown_with_its_backtrace(start_worker, kind, admin_client):
    """Go's client sends no backtrace: an error there has none."""
    OrmBroker("default").push([payload("flawed", JOBTYPES[kind][1], ["no luck"], retry=1)])
    start_worker(kind)
    job = wait_until(lambda: Job.objects.filter(state="retries").first(), what="it has failed")
    failure = json.loads(job.failure)
    assert (failure["errtype"], failure["message"]) == ("ArgumentError", "no luck")
    page = admin_client.get(f"/admin/django_faktory/job/{job.pk}/change/").content.decode()
    assert "no luck" in page
    assert "jobs.rb:" in page
