"""Test that people can act on jobs and queues without a mouse."""

import pytest

from django_faktory.models import Job
from tests.browser.test_pages import fill, pages

pytestmark = [pytest.mark.slow, pytest.mark.once]

PATH = "/admin/django_faktory/"
FOCUSED = """() => {
const one = document.activeElement;
const label = one.getAttribute('aria-label') || (one.labels && one.labels.length && one.labels[0].textContent)
    || one.textContent || one.value || '';
const box = one.getBoundingClientRect();
const style = getComputedStyle(one);
return {
    name: label.trim(), html: one.outerHTML.slice(0, 200),
    inMain: Boolean(one.closest('main')), isPage: one === document.body,
    hasRing: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1,
    isOnScreen: box.width > 0 && box.height > 0
        && box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
};}"""
MOST_TABS = 150


class Keyboard:
    """A user with a keyboard only, who must always see where the focus is."""

    def __init__(self, seen):
        self.page = seen.page

    def go_to(self, name):
        """Press Tab until the element with this name has the focus."""
        passed = []
        for _ in range(MOST_TABS):
            self.page.keyboard.press("Tab")
            focused = self.page.evaluate(FOCUSED)
            assert focused["isPage"] or focused["hasRing"] or not focused["inMain"], f"no ring: {focused['html']}"
            assert focused["isPage"] or focused["isOnScreen"], f"not on the screen: {focused['html']}"
            if focused["name"].startswith(name):
                return
            passed.append(focused["name"][:30])
        raise AssertionError(f"{name!r} is not among {passed}")

    def press(self, name):
        self.go_to(name)
        with self.page.expect_navigation():
            self.page.keyboard.press("Enter")

    def write(self, name, text):
        self.go_to(name)
        self.page.keyboard.press("ControlOrMeta+A")
        self.page.keyboard.type(text)


def test_the_skip_link_leads_to_the_content(screen):
    fill()
    seen = screen()
    seen.go(f"{PATH}queue/mail/change/")
    Keyboard(seen).press("Skip to main content")
    seen.page.keyboard.press("Tab")
    focused = seen.page.evaluate(FOCUSED)
    assert focused["inMain"]
    assert focused["hasRing"]


def test_a_job_is_retried_edited_and_discarded_by_keyboard(screen):
    fill()
    job = Job.objects.dead().latest("pk")
    seen = screen()
    keyboard = Keyboard(seen)
    seen.go(f"{PATH}job/{job.pk}/change/")
    keyboard.press("Edit arguments")
    keyboard.write("Arguments", "[42]")
    keyboard.press("Save")
    seen.sees("Arguments saved.", "42")
    keyboard.write("Reason", "card is good")
    keyboard.press("Retry now")
    seen.sees("Retried", "enqueued")
    assert Job.objects.get(pk=job.pk).state == "enqueued"
    keyboard.press("Discard")
    seen.sees("Discard this job?")
    keyboard.press("Yes, discard")
    seen.sees("Discarded")
    assert not Job.objects.filter(pk=job.pk, state="enqueued").exists()
    assert seen.complaints == []


def test_an_error_group_is_tested_and_retried_by_keyboard(screen):
    order = fill()
    seen = screen()
    keyboard = Keyboard(seen)
    seen.go(f"{PATH}{pages(order)['errors']}")
    keyboard.press("requests.exceptions.Timeout")
    seen.sees("25 dead jobs")
    keyboard.press("Test one")
    seen.sees("Waiting for a worker")
    keyboard.press("Retry 24 jobs")
    seen.sees("Matching jobs")
    keyboard.go_to("Pace")
    seen.page.keyboard.type("10 per")
    keyboard.press("Yes, retry now 24 jobs")
    seen.sees("Done.")
    assert Job.objects.in_state("retries").filter(errtype="requests.exceptions.Timeout").count() == 24
    assert seen.complaints == []
