"""The page of a job in a browser: progress and end appear without a reload, and a selection stays."""

import pytest
from django.utils import timezone

from django_faktory.admin.jobs import detail_views
from django_faktory.models import Job, Tracking
from tests.factories import JobFactory

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(detail_views, "REFRESHED_EVERY_S", 0.2)


def test_the_page_of_a_running_job_shows_its_progress_and_its_end(screen):
    now = timezone.now()
    job = JobFactory(working=True, jobtype="shop.transcode", created_at=now, started_at=now)
    Tracking.objects.create(jid=job.jid, percent=13, desc="frame 20300", updated_at=now)
    seen = screen()
    page = seen.page
    seen.go(f"/admin/django_faktory/job/{job.pk}/change/")
    seen.sees("running", "frame 20300")
    assert page.locator("progress").get_attribute("value") == "13"
    Tracking.objects.update(percent=87, desc="frame 90100")
    seen.sees("frame 90100")
    assert page.locator("progress").get_attribute("value") == "87"
    purge_at = now.replace(year=now.year + 1)
    Job.objects.filter(pk=job.pk).update(
        state="succeeded", finished_at=now, reserved_until=None, result="42", purge_at=purge_at, result_ttl=60
    )
    seen.sees("succeeded")
    assert seen.complaints == []


def test_text_that_is_being_selected_stays_while_nothing_changes(screen):
    job = JobFactory(working=True, started_at=timezone.now())
    seen = screen()
    page = seen.page
    seen.go(f"/admin/django_faktory/job/{job.pk}/change/")
    with page.expect_response("**/part/"):
        pass
    page.evaluate("window.kept = document.querySelector('#faktory-arguments')")
    for _ in range(2):
        with page.expect_response("**/part/"):
            pass
    assert page.evaluate("window.kept.isConnected"), "an unchanged part is not replaced"


def test_the_page_of_a_deleted_job_says_so(screen):
    job = JobFactory()
    seen = screen()
    seen.go(f"/admin/django_faktory/job/{job.pk}/change/")
    job.delete()
    seen.sees("This row no longer exists")
