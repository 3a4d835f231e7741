"""Act as a person on call with a real browser and a real worker: find a problem and fix it."""

from threading import Event

import pytest
from django.contrib.admin.models import LogEntry

from django_faktory import Batch, task
from django_faktory.models import Job, Queue, WorkerProcess
from django_faktory.testing.live import LiveFaktory
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once]

partner = Event()


@task(max_attempts=1, queue_name="partners")
def call_partner(order, *, address="http"):
    if not partner.is_set() or address == "http":
        raise ConnectionError(f"order {order}: the partner does not answer")
    return order


@task(queue_name="partners")
def step(number): ...


def states():
    return sorted(Job.objects.filter(jobtype=call_partner.jobtype).values_list("state", flat=True))


def test_an_operator_finds_edits_and_retries_dead_jobs_and_all_is_logged(screen):
    partner.clear()
    with LiveFaktory(queues=["partners"]) as live:
        call_partner.enqueue(7)
        call_partner.enqueue(8, address="https")
        call_partner.enqueue(9, address="https")
        wait_until(lambda: states() == ["dead"] * 3)
        seen = screen()
        page = seen.page
        seen.sees("the partner does not answer")
        page.get_by_role("link", name="ConnectionError").click()
        seen.sees("3 dead jobs")
        edit_and_test(page, seen, Job.objects.get(payload__contains="[7]"))
        page.get_by_role("link", name="Retry 2 jobs").click()
        page.get_by_label("Pace").select_option("All at once")
        page.get_by_label("Reason").fill("the partner is back")
        page.get_by_role("button", name="Yes, retry now 2 jobs").click()
        seen.sees("Done.")
        wait_until(lambda: states() == ["succeeded"] * 3)
        pause_and_quiet(page, seen)
        follow_a_batch(page, seen)
        assert seen.complaints == []
        live.stop()
    reasons = [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")]
    assert reasons == [
        'Edited its arguments from [7] to [7] {"address":"https"}: wrong address',
        "Retried as a test.",
        "Retry now: begun for all matching jobs (2): the partner is back",
        "Retried 2 of all matching jobs: the partner is back",
        "Paused: their upkeep",
        "Sent quiet: we stop it",
    ]


def edit_and_test(page, seen, job):
    page.get_by_role("link", name=f"Edit {job.jid}").click()
    page.get_by_label("address").fill('"https"')
    page.get_by_label("Reason").fill("wrong address")
    page.get_by_role("button", name="Save").click()
    seen.sees("Arguments saved.", "https")
    partner.set()
    page.get_by_role("button", name="Test run").click()
    seen.sees("Succeeded.")  # the page updates without a reload


def pause_and_quiet(page, seen):
    seen.go("/admin/django_faktory/overview/")
    page.get_by_role("link", name="partners").first.click()
    page.get_by_label("Reason").fill("their upkeep")
    page.get_by_role("button", name="Pause").click()
    seen.sees("Paused: 1 queue.")
    assert Queue.objects.get(name="partners").paused_at
    seen.go("/admin/django_faktory/overview/")
    seen.sees("paused")  # in the table of queues: no job waits, so there is no alarm
    worker = WorkerProcess.objects.get()
    page.get_by_role("link", name=f"{worker.hostname}:{worker.pid}").click()
    page.get_by_label("Reason").fill("we stop it")
    page.get_by_role("button", name="Quiet").click()
    seen.sees("quiet requested for 1 worker")
    assert WorkerProcess.objects.get().state == "quiet"


def follow_a_batch(page, seen):
    with Batch(description="album 42", success=step.callback(0)):
        step.enqueue(1)
        with Batch(description="its prints", success=step.callback(0)):
            step.enqueue(2)
    seen.go("/admin/django_faktory/batch/?place=root")
    page.get_by_role("link", name="album 42").click()
    page.get_by_role("link", name="its prints").click()
    seen.sees("album 42", "0 of 1 ended")
    page.get_by_role("link", name="1 enqueued").click()
    seen.sees("step")
