"""The page of a job in a browser: progress and end appear without a reload, and a selection stays."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from django_faktory.models import Job, Tracking
from tests.factories import JobFactory, end_all
from tests.project.tasks import add

pytestmark = [pytest.mark.slow, pytest.mark.once]


def test_the_page_of_a_running_job_shows_its_progress_and_its_end(screen):
    now = timezone.now()
    job = JobFactory(working=True, jobtype="shop.transcode", created_at=now, started_at=now)
    Tracking.objects.create(jid=job.jid, percent=13, desc="frame 20300", updated_at=now)
    seen = screen(has_fake_clock=True)
    page = seen.page
    seen.go(f"/admin/django_faktory/job/{job.pk}/change/")
    seen.sees("running", "frame 20300")
    assert page.locator("progress").get_attribute("value") == "13"
    Tracking.objects.update(percent=87, desc="frame 90100")
    seen.skip_pause()
    seen.sees("frame 90100")
    assert page.locator("progress").get_attribute("value") == "87"
    purge_at = now.replace(year=now.year + 1)
    end_all(
        [job], state="succeeded", finished_at=now, reserved_until=None, result="42", purge_at=purge_at, result_ttl=60
    )
    seen.skip_pause()
    seen.sees("succeeded")
    assert seen.complaints == []


def test_text_that_is_being_selected_stays_while_nothing_changes(screen):
    job = JobFactory(working=True, started_at=timezone.now())
    seen = screen(has_fake_clock=True)
    page = seen.page
    seen.go(f"/admin/django_faktory/job/{job.pk}/change/")
    for _ in range(2):  # the page shows the first update before it asks for the second one
        seen.skip_pause()
    page.evaluate("window.kept = document.querySelector('#faktory-arguments')")
    for _ in range(2):
        seen.skip_pause()
    assert page.evaluate("window.kept.isConnected"), "an unchanged part is not replaced"


def test_the_page_of_a_deleted_job_says_so(screen):
    job = JobFactory()
    seen = screen(has_fake_clock=True)
    seen.go(f"/admin/django_faktory/job/{job.pk}/change/")
    job.delete()
    seen.skip_pause()
    seen.sees("This row no longer exists")


def test_buttons_copy_the_job_id_and_the_arguments_also_after_an_update(screen):
    now = timezone.now()
    job = JobFactory(working=True, started_at=now, jobtype=add.jobtype, payload='{"args":[1,{"b":"<two>"}]}')
    seen = screen(has_fake_clock=True)
    page = seen.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    seen.go(f"/admin/django_faktory/job/{job.pk}/change/")
    for _ in range(2):  # the first update replaces the buttons, further ones only if something has changed
        seen.skip_pause()
    page.get_by_role("button", name="Copy job ID").click()
    page.get_by_role("button", name="Copy job ID").get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == job.jid
    Tracking.objects.create(jid=job.jid, percent=5, desc="half way", updated_at=now + timedelta(minutes=1))
    seen.skip_pause()
    seen.sees("half way")
    page.get_by_text("As JSON").click()
    page.get_by_role("button", name="Copy arguments", exact=True).click()
    page.get_by_role("button", name="Copy arguments", exact=True).get_by_text("Copied").wait_for()
    assert json.loads(page.evaluate("navigator.clipboard.readText()")) == [1, {"b": "<two>"}]
    assert seen.complaints == []


def test_copy_buttons_are_hidden_without_script(screen):
    job = JobFactory()
    seen = screen(script=False)
    seen.go(f"/admin/django_faktory/job/{job.pk}/change/")
    assert seen.page.locator('button[name="copy"]').count() == 2
    assert not any(button.is_visible() for button in seen.page.locator('button[name="copy"]').all())


def test_a_double_click_on_run_task_enqueues_one_job(screen):
    seen = screen()
    page = seen.page
    seen.go(f"/admin/django_faktory/job/run/?task={add.jobtype}")
    page.get_by_label("a (required)").fill("1")
    page.get_by_label("b (required)").fill('"two"')
    page.get_by_role("button", name="Run task").dblclick()
    page.get_by_text("Enqueued tests.project.tasks.add as").first.wait_for()
    assert [json.loads(job.payload)["args"] for job in Job.objects.all()] == [[1, "two"]]
    assert seen.complaints == []
