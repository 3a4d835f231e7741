"""Lists and pages of rows in a browser: they update themselves, and leave what the user is doing alone."""

import pytest
from django.contrib.sessions.models import Session
from django.db import connection
from django.utils import timezone

from django_faktory import Batch
from django_faktory.models import Batch as Row
from django_faktory.models import Job
from tests.factories import JobFactory, WorkerFactory
from tests.project.tasks import add

pytestmark = [pytest.mark.slow, pytest.mark.once]

PATH = "/admin/django_faktory/"
LATER_MS = 6000


@pytest.fixture
def opened(screen):
    """`opened(path)` opens a page whose clock the test moves."""

    def open_(path, **options):
        seen = screen(**options)
        seen.page.clock.install()
        seen.go(PATH + path)
        return seen

    return open_


def wait_for_update(page):
    """Move the page's clock until it has fetched itself once more."""
    with page.expect_response(lambda answer: answer.request.headers.get("x-requested-with") == "fetch"):
        page.clock.run_for(LATER_MS)


def test_a_list_shows_new_rows_and_their_checkboxes_work(opened):
    JobFactory(jobtype="shop.first", dead=True)
    seen = opened("job/?state=dead")
    page = seen.page
    JobFactory(jobtype="shop.second", dead=True)
    wait_for_update(page)
    seen.sees("shop.second", "2 jobs")
    page.locator("tr", has_text="shop.second").locator("input.action-select").check()
    seen.sees("1 of 2 selected")
    page.locator("#action-toggle").check()
    seen.sees("2 of 2 selected")
    assert seen.complaints == []


def test_a_list_stays_while_rows_are_selected(opened):
    JobFactory(jobtype="shop.first", dead=True)
    seen = opened("job/?state=dead")
    page = seen.page
    page.locator("input.action-select").check()
    JobFactory(jobtype="shop.second", dead=True)
    wait_for_update(page)
    assert page.get_by_text("shop.second").count() == 0
    assert page.locator("input.action-select").is_checked()
    page.locator("input.action-select").uncheck()
    wait_for_update(page)
    seen.sees("shop.second")


def test_a_bulk_run_says_that_the_session_has_ended_and_keeps_what_is_done(opened):
    JobFactory.create_batch(3, dead=True)
    seen = opened("job/all/?verb=retry&state=dead")
    page = seen.page

    def end_session(route):
        Session.objects.all().delete()
        # Playwright calls this in a context of its own, which has a connection of its own.
        connection.close()
        route.continue_()

    page.route("**/all/step/", end_session)
    page.get_by_role("button", name="Yes, retry now 3 jobs").click()
    seen.sees("You are logged out. Finished changes are kept")
    assert Job.objects.dead().count() == 3
    assert seen.complaints == []


def test_the_page_of_a_batch_shows_its_progress(opened):
    with Batch(description="delivery 42", success=add.callback(3, 4)) as batch:
        add.enqueue(1, 2)
    row = Row.objects.get(bid=batch.bid)
    seen = opened(f"batch/{row.pk}/change/")
    seen.sees("0 of 1 ended")
    Row.objects.update(pending=0, unrun=0)
    wait_for_update(seen.page)
    seen.sees("1 of 1 ended")
    assert seen.complaints == []


def test_a_page_stays_while_a_reason_is_typed_and_the_reason_stays(opened):
    WorkerFactory(wid="w1", beat_at=timezone.now())
    seen = opened("workerprocess/w1/change/")
    page = seen.page
    page.get_by_label("Reason").fill("deploy")
    JobFactory(working=True, wid="w1", jobtype="shop.first", started_at=timezone.now())
    wait_for_update(page)
    seen.sees("shop.first")
    assert page.get_by_label("Reason").input_value() == "deploy"


def test_rows_are_cards_with_labels_on_a_phone(opened):
    JobFactory(jobtype="shop.first", dead=True)
    seen = opened("job/?state=dead", width=390)
    cell = seen.page.locator("td.field-queue")
    assert cell.get_attribute("data-label") == "Queue"
    assert seen.page.locator("td.field-error").bounding_box()["x"] < 390
