"""The overview in a browser: a button ends an alarm, and the page says when its numbers are old."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.once]


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
