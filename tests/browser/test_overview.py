"""The overview in a browser: a button ends an alarm, and the page says when its numbers are old."""

import pytest
from django.utils import timezone

from django_faktory.models import Queue
from tests.factories import JobFactory, QueueFactory

pytestmark = [pytest.mark.slow, pytest.mark.once]


def test_one_click_resumes_a_paused_queue(screen):
    QueueFactory(name="mail", paused_at=timezone.now())
    JobFactory(queue="mail", enqueued_at=timezone.now())
    seen = screen()
    seen.sees("Queue mail is paused; waiting: 1")
    seen.page.get_by_role("button", name="Resume queue").click()
    seen.page.get_by_text("Resumed").first.wait_for()
    assert Queue.objects.get().paused_at is None
    assert seen.complaints == []


def test_the_page_says_that_the_session_has_ended(screen):
    seen = screen(has_fake_clock=True)
    seen.page.context.clear_cookies()
    seen.skip_pause()
    seen.sees("You are logged out: this page is no longer updated.")


def test_the_page_says_that_the_server_does_not_answer_until_it_does(screen):
    seen = screen(has_fake_clock=True)
    seen.page.route("**/overview/part/", lambda route: route.abort())
    seen.skip_pause()
    seen.sees("The server does not answer")
    seen.page.unroute("**/overview/part/")
    seen.skip_pause()
    seen.page.get_by_text("The server does not answer").wait_for(state="hidden")
