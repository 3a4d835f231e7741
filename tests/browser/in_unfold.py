"""Tests that `test_unfold` runs in a separate process, in which django-unfold renders the admin."""

import pytest
from django.contrib.admin.models import LogEntry

from django_faktory.models import Job
from tests.browser.test_pages import fill, monkeys, own_server, redis, server  # noqa: F401  (fixtures)
from tests.browser.test_pages import (
    test_every_page_has_labels_and_no_overflow_in_each_theme_and_width as looks_as_it_should,
)

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(("device", "width", "theme"), [("desk", 1280, "light"), ("phone", 390, "dark")])
def test_every_page_has_labels_and_no_overflow(screen, monkeys, device, width, theme):  # noqa: F811
    looks_as_it_should(screen, monkeys, theme, device, width)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_list_action_is_selected_and_executed(screen, width):
    fill()
    seen = screen(width=width)
    page = seen.page
    seen.go("/admin/django_faktory/job/?q=error:Declined")
    page.locator("input.action-select").first.check()
    page.locator("select[name=action]").select_option("retry")
    page.locator("#changelist-actions input[name=why]").fill("the card is good now")
    seen.keep(f"chosen-{width}")
    page.get_by_role("button", name="Run").click()
    seen.sees("Retried 1 job.")
    assert not Job.objects.dead().filter(errtype="shop.Declined").exists()
    assert LogEntry.objects.get().get_change_message() == "Retried: the card is good now"
    assert seen.complaints == []


def test_a_destructive_action_requires_confirmation(screen):
    fill()
    seen = screen()
    page = seen.page
    seen.go("/admin/django_faktory/job/?q=error:Declined")
    page.locator("input.action-select").first.check()
    page.locator("select[name=action]").select_option("discard")
    page.get_by_role("button", name="Run").click()
    seen.sees("Discard 1 job?")
    seen.keep("asked")
    page.get_by_role("button", name="Yes, discard").click()
    seen.sees("Discarded 1 job.")
    assert seen.complaints == []
