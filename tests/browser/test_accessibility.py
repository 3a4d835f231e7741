"""Test that people can use each page with a screen reader, without a mouse, and enlarged."""

import re

import pytest

from django_faktory.models import Job, Queue
from tests.browser.test_pages import (  # noqa: F401  (fixtures)
    STICKS_OUT,
    fill,
    monkeys,
    own_server,
    pages,
    redis,
    server,
)

pytestmark = pytest.mark.timeout(300)

PATH = "/admin/django_faktory/"
DJANGOS = [".breadcrumbs", "#changelist-search"]
"""Parts of every page of Django's admin, not ours: links of breadcrumbs differ from the text by colour only, and the
search box is named by a picture.
"""
RUN_AXE = """async (excluded) => {
const found = await axe.run({exclude: excluded.map((one) => [one])},
    {resultTypes: ["violations"], rules: {"target-size": {enabled: true}}});
return found.violations.flatMap((rule) =>
    rule.nodes.map((node) => `${rule.id} (${rule.impact}): ${node.target.join(" ")} ${node.html.slice(0, 150)}`));
}"""
"""All rules, those of good practice too, and the size of targets, which is off by default."""
NAMELESS = """() => [...document.querySelectorAll('.faktory table, .faktory-wide table')].filter((table) =>
!table.caption && !table.getAttribute('aria-label')
&& !document.getElementById(table.getAttribute('aria-labelledby'))).map((table) => table.outerHTML.slice(0, 200))"""
CHARTS = """() => [...document.querySelectorAll('figure.faktory-chart')].map((chart) => ({
label: chart.querySelector('svg').getAttribute('aria-label'),
titles: [...chart.querySelectorAll('svg title')].map((one) => one.textContent),
texts: [...chart.querySelectorAll('details tr, details li, details th')].map((one) =>
    [...(one.cells || [one])].map((cell) => cell.textContent.trim()).join(' '))}))"""
UNREACHABLE = """() => [...document.querySelectorAll('#content *, .faktory-nav ul')].filter((one) => {
const style = getComputedStyle(one);
const scrolls = (axis, inner, outer) => ['auto', 'scroll'].includes(style[`overflow${axis}`]) && inner > outer + 1;
return one.checkVisibility() && one.tabIndex < 0
    && (scrolls('X', one.scrollWidth, one.clientWidth) || scrolls('Y', one.scrollHeight, one.clientHeight))
    && !one.querySelector('a, button, input, select, textarea, summary');
}).map((one) => one.outerHTML.slice(0, 200))"""
"""Areas that scroll, and that the keyboard cannot reach. Firefox and Safari make them no tab stops of their own."""
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
BAR = re.compile(r"(.*): (\d+) succeeded (\d+) failed")
"""The text of a bar that a mouse shows, without commas."""


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_axe_finds_no_problem_on_any_page(screen, monkeys, axe_script, theme, width):  # noqa: F811
    order = fill()
    seen = screen(width=width, theme=theme)
    script = axe_script.read_text()
    problems = {}
    for name, path in pages(order).items():
        seen.go(f"{PATH}{path}")
        seen.page.evaluate(script)
        if found := seen.page.evaluate(RUN_AXE, DJANGOS):
            problems[name] = found
    assert problems == {}


def test_titles_tables_and_charts_say_what_they_are(screen, monkeys):  # noqa: F811
    order = fill()
    seen = screen()
    addresses = pages(order)
    charts = []
    for name, path in addresses.items():
        seen.go(f"{PATH}{path}")
        assert seen.page.locator("h1").count() == 1, name
        assert seen.page.evaluate(NAMELESS) == [], name
        charts += seen.page.evaluate(CHARTS)
    assert len(charts) >= 8
    for chart in charts:
        assert chart["label"]
        titles = [BAR.sub(r"\1 \2 \3", title.replace(",", "")) for title in chart["titles"]]
        texts = [text.replace(",", "") for text in chart["texts"]]
        assert [title for title in titles if title not in texts and not title.endswith(" 0 0")] == []
    seen.go(f"{PATH}{addresses['job']}")
    assert "shop.tasks.call_webhook" in seen.page.locator("h1").inner_text()
    seen.go(f"{PATH}{addresses['worker']}")
    assert "app-1" in seen.page.locator("h1").inner_text()


@pytest.mark.parametrize(("width", "scale"), [(1280, 2), (1280, 4), (700, 1)])
def test_enlarged_pages_do_not_overflow_and_the_keyboard_reaches_all_that_scrolls(screen, monkeys, width, scale):  # noqa: F811
    order = fill()
    seen = screen(width=width, scale=scale)
    too_wide, unreachable = {}, {}
    for name, path in pages(order).items():
        seen.go(f"{PATH}{path}")
        seen.page.evaluate("document.querySelectorAll('#content details').forEach((one) => { one.open = true; })")
        if (excess := seen.page.evaluate(STICKS_OUT)) > 0:
            too_wide[name] = excess
        if found := seen.page.evaluate(UNREACHABLE):
            unreachable[name] = found
    assert too_wide == {}
    assert unreachable == {}


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


def test_a_queue_is_paused_and_resumed_by_keyboard(screen):
    fill()
    seen = screen()
    keyboard = Keyboard(seen)
    seen.go(PATH + "queue/")
    keyboard.press("mail")
    keyboard.write("Reason", "their upkeep")
    keyboard.press("Pause")
    seen.sees("Paused: 1 queue.")
    assert Queue.objects.get(name="mail").paused_at
    seen.go(PATH + "queue/mail/change/")
    keyboard.press("Resume")
    seen.sees("Resumed: 1 queue.")
    assert not Queue.objects.get(name="mail").paused_at
    assert seen.complaints == []
