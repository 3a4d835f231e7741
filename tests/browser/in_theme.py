"""Tests that `test_themes` runs in a separate process, in which django-unfold or django-jazzmin renders the admin."""

import os

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone

from django_faktory.models import Batch, Job, Limit
from django_faktory.models.cron import CronEntry, CronRun
from example_project.shop.tasks import send_invoice
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
from tests.factories import JobFactory

GO = {"unfold": "Run", "jazzmin": "Go"}[os.environ["FAKTORY_TEST_ADMIN"]]
"""The button of the theme that executes a list action."""


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
    page.locator(":is(#changelist-actions, .actions) input[name=why]").fill("the card is good now")
    seen.keep(f"chosen-{width}")
    page.get_by_role("button", name=GO).click()
    seen.sees("Retried 1 job.")
    assert not Job.objects.dead().filter(errtype="shop.Declined").exists()
    assert LogEntry.objects.get().get_change_message() == "Retried: the card is good now"
    assert seen.complaints == []


def address_of(row):
    return f"{PATH}{row._meta.model_name}/{row.pk}/change/"


def plant_entry():
    return CronEntry.objects.create(
        name="nightly", schedule="0 3 * * *", zone="UTC", jobtype=send_invoice.jobtype, args="[1]", origin="admin"
    )


def plant_batch():
    JobFactory(dead=True, bid="b-1", has_run=True, counts_failed=True)
    callback = '{"jid":"job-callback","jobtype":"noop","queue":"default","args":[]}'
    fields = {"total": 1, "pending": 1, "failed": 1, "committed_at": timezone.now()}
    return Batch.objects.create(bid="b-1", complete=callback, success=callback, **fields)


def plant_limit(**fields):
    return Limit.objects.create(scope="task", name=send_invoice.jobtype, concurrency=3, **fields)


BUTTONS = {
    "Run now": (plant_entry, lambda: CronRun.objects.get().jid == Job.objects.get().jid),
    "Pause": (plant_entry, lambda: CronEntry.objects.get().paused_at is not None),
    "Pause ": (plant_limit, lambda: Limit.objects.get().paused_at is not None),
    "Reset to code": (
        lambda: plant_limit(origin="edited"), lambda: not Limit.objects.filter(origin="edited").exists(),
    ),
    "Retry failed jobs": (plant_batch, lambda: Job.objects.get().state == "enqueued"),
}  # fmt: skip


@pytest.mark.parametrize("label", BUTTONS)
@pytest.mark.parametrize("width", [1280, 390])
def test_each_button_of_a_row_can_be_seen_and_pressed(screen, label, width):
    plant, is_done = BUTTONS[label]
    row = plant()
    seen = screen(width=width)
    seen.go(address_of(row))
    seen.page.locator("form.faktory-buttons input[name=why]").fill("ticket 77")
    seen.page.get_by_role("button", name=label.strip(), exact=True).click()
    seen.page.wait_for_load_state()
    assert is_done()
    assert "ticket 77" in LogEntry.objects.latest("pk").change_message
    assert seen.complaints == []


def test_fields_that_can_be_edited_have_a_border(screen):
    seen = screen()
    for row, fields in ((plant_limit(), ("concurrency", "rate", "burst")), (plant_entry(), ("name", "schedule"))):
        seen.go(address_of(row))
        for name in fields:
            field = seen.page.locator(f"#id_{name}")
            assert field.is_editable()
            border, background = (
                field.evaluate(f"(one) => getComputedStyle(one).{style}")
                for style in ("borderTopWidth", "borderTopColor")
            )
            assert border == "1px", (name, border)
            assert background != "rgba(0, 0, 0, 0)", name


def test_runs_of_a_cron_entry_are_lines_of_a_table(screen):
    entry = plant_entry()
    CronRun.objects.create(
        entry=entry, tick=timezone.now(), jid="0123456789abcdef", outcome="refused",
        note="TypeError: send_invoice() got an unexpected keyword argument",
    )  # fmt: skip
    seen = screen()
    seen.go(address_of(entry))
    if (tab := seen.page.get_by_role("tab", name="History")).count():
        tab.click()
    cells = seen.page.get_by_role("table", name="Latest runs").locator("tbody td")
    cells.get_by_text("0123456789abcdef").wait_for()
    seen.keep("runs")
    assert cells.get_by_text("0123456789abcdef").bounding_box()["height"] < 40
    assert min(cell.bounding_box()["width"] for cell in cells.all()) > 40


def test_pages_have_a_title_tiles_and_breadcrumbs_that_do_not_overlap(screen):
    order = fill()
    seen = screen()
    for name, path in pages(order).items():
        if name in ("app", "object"):  # of Django or the project
            continue
        seen.go(f"{PATH}{path}")
        titles = seen.page.locator("h1:visible, .faktory-title:visible")
        assert titles.count() >= 1, name
        if (crumbs := seen.page.locator(".breadcrumb, .breadcrumbs").first).is_visible():
            assert not do_overlap(titles.first.bounding_box(), crumbs.bounding_box()), name
    seen.go(f"{PATH}overview/")
    tile = seen.page.locator(".faktory-tiles a").first
    assert tile.evaluate("(one) => getComputedStyle(one).backgroundColor") != "rgba(0, 0, 0, 0)"


def do_overlap(one, other):
    is_beside = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
    return not (is_beside or one["y"] + one["height"] <= other["y"] or other["y"] + other["height"] <= one["y"])
