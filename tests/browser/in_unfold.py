"""Tests that `test_unfold` runs in a separate process, in which django-unfold renders the admin."""

import pytest
from django.contrib.admin.models import LogEntry

from django_faktory.models import Job
from tests.browser.test_pages import (  # noqa: F401  (fixtures)
    LABELLED,
    PATH,
    STICKS_OUT,
    fill,
    monkeys,
    own_server,
    pages,
    redis,
    server,
)


def test_every_page_has_labels_and_no_overflow(screen, monkeys):  # noqa: F811
    order = fill()
    seen = screen()
    for name, path in pages(order).items():
        seen.page.set_viewport_size({"width": 1280, "height": 900})
        seen.go(f"{PATH}{path}")
        assert seen.complaints == [], name
        assert seen.page.evaluate(LABELLED) == [], name
        for width in (1280, 390):
            seen.page.set_viewport_size({"width": width, "height": 900})
            seen.keep(f"{name}-{width}")
            assert seen.page.evaluate(STICKS_OUT) <= 0, (name, width)


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
