"""Test each page in light and dark, on a desktop and a phone, enlarged, and for a screen reader.

A page is loaded once for each device: the load takes longer than the checks.
"""

import re
from datetime import timedelta
from decimal import Decimal
from typing import Literal

import pytest
from django.utils import timezone

from django_faktory import Batch, task
from django_faktory.contrib.gearmonkey import Client
from django_faktory.contrib.gearmonkey.redis_worker import RedisWorker
from django_faktory.core.histograms import JobTiming, Recorder
from django_faktory.core.limits import Allowance
from django_faktory.models import Batch as BatchRow
from django_faktory.models import Delta, Job, JobLock, Limit
from django_faktory.models.cron import CronEntry
from django_faktory.store.limits import definitions
from django_faktory.store.statistics import histograms
from example_project.shop.models import Order
from example_project.shop.tasks import send_invoice
from tests.contrib.gearmonkey.conftest import own_server, redis, server  # noqa: F401  (fixtures)
from tests.factories import CronFactory, JobFactory, LockFactory, QueueFactory, WorkerFactory

pytestmark = [pytest.mark.slow, pytest.mark.once]

HISTORY = """[{"attempt":1,"wid":"app-1-w1","errtype":"requests.exceptions.Timeout",
"message":"order 7: no answer in 30 s",
"started_at":"2026-05-01T11:59:00Z","failed_at":"2026-05-01T11:59:30Z",
"log":["2026-05-01T11:59:00.120Z INFO shop.tasks: report order 7 to https://example.org/hook",
"2026-05-01T11:59:29.998Z WARNING urllib3.connectionpool: Retrying after connection broken by 'ReadTimeoutError'"],
"backtrace":["  File \\"shop/tasks.py\\", line 12",
"    answer = session.post(url, timeout=30)"]},{"attempt":2,"wid":"app-2-w1",
"errtype":"requests.exceptions.Timeout","message":"order 7: no answer in 30 s",
"started_at":"2026-05-01T12:00:00Z","failed_at":"2026-05-01T12:00:30Z",
"backtrace":["  File \\"shop/tasks.py\\", line 12"],"release":"2026.11.2"}]"""
LABELLED = """() =>
[...document.querySelectorAll('#content input:not([type=hidden]), #content select, #content textarea')]
.filter((one) => one.offsetParent && !one.labels.length && !one.getAttribute('aria-label') && one.type !== 'submit'
&& !one.closest('#changelist-search') && !one.closest('.actions')).map((one) => one.outerHTML)"""
DJANGOS = [".breadcrumbs", "#changelist-search"]
"""Parts of every page of Django's admin, not ours: links of breadcrumbs differ from the text by colour only, and the
search box is named by a picture.
"""
COLOUR_RULES = ["color-contrast", "link-in-text-block"]
"""The rules whose result depends on the theme."""
RUN_AXE = """async ([excluded, only]) => {
const chosen = only ? {runOnly: only} : {rules: {"target-size": {enabled: true}}};
const found = await axe.run({exclude: excluded.map((one) => [one])}, {resultTypes: ["violations"], ...chosen});
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
BAR = re.compile(r"(.*): (\d+) succeeded (\d+) failed")
"""The text of a bar that a mouse shows, without commas."""
COLOURS_CHANGED = "() => Promise.allSettled(document.getAnimations().map((one) => one.finished))"
"""`finished` of an animation that is cancelled, as by a change of themes, is rejected."""
OPEN_DETAILS = "document.querySelectorAll('#content details').forEach((one) => { one.open = true; })"
STICKS_OUT = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@task(name="shop.tasks.refund", queue_name="partners")
def refund(
    order_id: int,
    amount: Decimal,
    reason: Literal["damaged", "late", "other"] = "other",
    notify: bool = True,
    note: str | None = None,
    lines: list | None = None,
):
    """A task whose arguments have fields of several types."""


NARROW = "shop.tasks.call_webhook"
PATH = "/admin/django_faktory/"


def timings_of_minute(minute):
    """Return timings of a few tasks, of which one fails often."""
    recorder = Recorder()
    for name, queue, seconds, failures in (
        (NARROW, "partners", 0.4, 5), ("shop.tasks.send_invoice", "mail", 0.02, 0),
        ("shop.tasks.check_stock", "default", 4, 1),
    ):  # fmt: skip
        jobs = [JobTiming(queue, name, seconds * (1 + (minute + n) % 7)) for n in range(8 + minute % 5)]
        recorder.started(jobs)
        recorder.ended(jobs[failures:], succeeded=True)
        recorder.ended(jobs[:failures], succeeded=False)
    return recorder.take()


def fill():
    """Fill the database with a project in trouble: dead jobs, a paused queue, a worker without a heartbeat."""
    now = timezone.now()
    for number, name in enumerate(("critical", "default", "mail", "partners")):
        QueueFactory(name=name, paused_at=now - timedelta(hours=1) if name == "partners" else None)
        for place in range(4 * number):
            JobFactory(queue=name, jobtype="shop.tasks.check_stock", enqueued_at=now - timedelta(seconds=9 * place))
    for number in range(3):
        WorkerFactory(
            wid=f"app-{number}-w1", hostname=f"app-{number}", pid=400 + number, rss_kb=91_000, beat_at=now,
            queues=["critical", "default", "mail"], threads=5, labels=["python", "django"],
        )  # fmt: skip
        begun = now - timedelta(minutes=number)
        JobFactory(working=True, wid=f"app-{number}-w1", jobtype="shop.tasks.send_invoice", started_at=begun)
    WorkerFactory(wid="app-9-w1", hostname="app-9", pid=409, beat_at=now - timedelta(hours=1))
    order = Order.objects.create(customer="ada@example.org", item="Analytical Engine", price="1843.00")
    for number in range(25):
        JobFactory(
            dead=True, jobtype="shop.tasks.call_webhook", queue="partners", errtype="requests.exceptions.Timeout",
            failure=f'{{"message":"order {number}: no answer in 30 s"}}', history=HISTORY, attempt=2, finished_at=now,
            about=f"shop.order/{order.pk}", payload='{"jid":"a","args":[7,{"address":"https://example.org/hook"}]}',
        )  # fmt: skip
    JobFactory(
        dead=True,
        jobtype="shop.tasks.charge_card",
        errtype="shop.Declined",
        failure='{"message":"card 4242 is declined"}',
    )
    refund.using(run_after=now + timedelta(days=1)).enqueue(
        7, Decimal("18.43"), reason="late", note="Ada <ada@example.org>", lines=[{"parcel": 1}, {"parcel": 2}]
    )
    for minute in (*range(0, 180, 3), *range(180, 30 * 1440, 300)):
        histograms.add(timings_of_minute(minute), using="default", now=now - timedelta(minutes=minute))
    for day in range(30):
        for kind, amount in {"processed": 9000 - 97 * day, "failed": 11 * day}.items():
            Delta.objects.create(mark=1, kind=kind, name=str(now.date() - timedelta(days=day)), amount=amount)
    with Batch(description="delivery 42", success=send_invoice.callback(1)):
        send_invoice.enqueue(1)
        for parcel in (1, 2):
            with Batch(description=f"parcel {parcel}", complete=send_invoice.callback(1)):
                send_invoice.enqueue(parcel)
    LockFactory(key="order 7", wid="app-1-w1", acquired_at=now, expires_at=now)
    definitions.save_limit("task", NARROW, Allowance(concurrency=3, rate=5, burst=10), using="default")
    definitions.save_limit("queue", "mail", Allowance(concurrency=20), using="default")
    CronFactory(name="nightly report", jobtype="shop.tasks.daily_report", next_at=now)
    return order


def pages(order):
    dead = Job.objects.filter(errtype="requests.exceptions.Timeout").latest("pk")
    error = "error=requests.exceptions.Timeout&task=shop.tasks.call_webhook&at=order+N:+no+answer+in+N+s"
    batch = BatchRow.objects.get(depth=0)
    known = Job.objects.filter(jobtype=refund.jobtype).latest("pk")
    return {
        "overview": "overview/", "jobs": "job/?state=dead", "job": f"job/{dead.pk}/change/",
        "edit": f"job/{dead.pk}/edit/",
        "named": f"job/{known.pk}/change/", "edit-typed": f"job/{known.pk}/edit/",
        "run": f"job/run/?task={refund.jobtype}",
        "errors": "job/errors/", "error": f"job/errors/one/?{error}", "all": "job/all/?verb=discard&state=dead",
        "queues": "queue/", "queue": "queue/partners/change/", "workers": "workerprocess/",
        "worker": "workerprocess/app-1-w1/change/", "batches": "batch/", "batch": f"batch/{batch.pk}/change/",
        "cron": "cronentry/", "entry": f"cronentry/{CronEntry.objects.get().pk}/change/", "locks": "joblock/",
        "lock": f"joblock/{JobLock.objects.get().pk}/change/", "app": "", "outbox": "outboxentry/",
        "limits": "limit/", "limit": f"limit/{Limit.objects.get(name=NARROW).pk}/change/", "new-limit": "limit/add/",
        "new-entry": "cronentry/add/", "gearmonkey": "gearmonkeyfunction/",
        "tasks": "overview/tasks/?period=24h", "task": f"overview/tasks/one/?task={NARROW}&period=30d",
        "object": f"../shop/order/{order.pk}/change/",
    }  # fmt: skip


@pytest.fixture
def monkeys(server, redis, settings):  # noqa: F811
    """Fill a Redis with GearMonkey jobs and a worker."""
    settings.FAKTORY = {**getattr(settings, "FAKTORY", {}), "GEARMONKEY_URL": server.url}
    RedisWorker(redis, ["thumbnail", "translate"], wid="app-1-w1").open()
    with Client(server.url) as client:
        for prio in ("high", "normal", "low", "low"):
            client.run("thumbnail", "image-7.png", prio)
        client.run("ocr", "scan-3.pdf")


class Look:
    """The problems that a person would have with the page that is open."""

    def __init__(self, seen, axe):
        self._seen, self._page, self._axe = seen, seen.page, axe
        self.charts = []

    def problems(self, name, *, enlarged):
        """Return the problems of the page, by kind; it is shown in both themes, then at the widths of `enlarged`."""
        page = self._page
        found = {"console": list(self._seen.complaints), "labels": page.evaluate(LABELLED)}
        found |= {"tables": page.evaluate(NAMELESS), "titles": page.locator("h1").count() != 1}
        self.charts += page.evaluate(CHARTS)
        page.evaluate(self._axe)
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            page.evaluate(COLOURS_CHANGED)
            self._seen.keep(f"{name}-{theme}")
            found[f"axe, {theme}"] = page.evaluate(RUN_AXE, [DJANGOS, None if theme == "light" else COLOUR_RULES])
            found[f"overflow, {theme}"] = max(0, page.evaluate(STICKS_OUT))
        page.evaluate(OPEN_DETAILS)
        for width in enlarged:
            page.set_viewport_size({"width": width, "height": 450})
            found[f"overflow at {width}"] = max(0, page.evaluate(STICKS_OUT))
            found[f"out of reach at {width}"] = page.evaluate(UNREACHABLE)
        self._seen.complaints.clear()  # axe sets styles, which the Content Security Policy forbids
        return {kind: problem for kind, problem in found.items() if problem}


@pytest.mark.parametrize(
    ("device", "width", "enlarged"),
    [("desk", 1440, (1440, 1280, 700, 640)), ("phone", 390, (390, 320))],
    ids=["desk", "phone"],
)
def test_each_page_has_no_problem_in_each_theme_and_width(screen, monkeys, axe_script, device, width, enlarged):
    """Widths of 640 and 320 px are those of a desktop's window at 200 % and 400 %."""
    order = fill()
    seen = screen(width=width)
    look = Look(seen, axe_script.read_text())
    problems = {}
    for name, path in pages(order).items():
        seen.page.set_viewport_size({"width": width, "height": 900})
        seen.page.emulate_media(color_scheme="light")
        seen.go(f"{PATH}{path}")
        if found := look.problems(f"{name}-{device}", enlarged=enlarged):
            problems[name] = found
    assert problems == {}
    check_charts(look.charts)


def check_charts(charts):
    """Check that each bar of a chart is also in the table behind the chart."""
    assert len(charts) >= 8
    for chart in charts:
        assert chart["label"]
        titles = [BAR.sub(r"\1 \2 \3", title.replace(",", "")) for title in chart["titles"]]
        texts = [text.replace(",", "") for text in chart["texts"]]
        assert [title for title in titles if title not in texts and not title.endswith(" 0 0")] == []


def test_pages_of_this_package_show_their_place_as_lists_of_django_do(screen):
    style = "() => { const {backgroundColor, padding} = getComputedStyle(document.querySelector('.breadcrumbs'));"
    seen, styles = screen(), set()
    for path in ("job/", "overview/"):
        seen.go(f"{PATH}{path}")
        styles.add(seen.page.evaluate(f"{style} return backgroundColor + padding; }}"))
    assert len(styles) == 1


def test_dead_jobs_can_be_retried_without_javascript(screen):
    fill()
    seen = screen(script=False)
    seen.go("/admin/django_faktory/job/errors/")
    seen.page.get_by_role("link", name="requests.exceptions.Timeout").click()
    seen.page.get_by_role("link", name="Retry 25 jobs").click()
    seen.page.get_by_role("button", name="Yes, retry now 25 jobs").click()
    seen.page.get_by_role("button", name="Continue").click()
    seen.sees("Done.")
    assert not Job.objects.dead().filter(errtype="requests.exceptions.Timeout").exists()
