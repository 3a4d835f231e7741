"""The admin in another language: every text of the package is translated, and numbers follow the language.

`pseudo` is a German catalogue whose translations are the English texts between marks. A word outside of marks that is
on the English page too is a text that the code does not translate, unless it is data.
"""

import inspect
import re
from collections import defaultdict
from datetime import timedelta
from html.parser import HTMLParser
from urllib.parse import urljoin

import django
import pytest
from babel.messages import Catalog
from django.db import transaction
from django.utils import timezone, translation

from django_faktory.core.lifecycle import State
from django_faktory.models import Batch, Job, JobLock, Limit, OutboxEntry
from django_faktory.models.cron import CronEntry, CronRun
from django_faktory.operations import alarms
from tests.browser.test_pages import fill, pages, refund
from tests.factories import JobFactory, QueueFactory, WorkerFactory
from tests.test_translations import translations

pytestmark = [pytest.mark.once, pytest.mark.django_db]

BEGIN, END = "⟦", "⟧"
SHOWN_ATTRIBUTES = (
    "aria-label", "placeholder", "title", "alt", "data-pause", "data-resume", "data-logged-out", "data-gone",
    "data-offline", "data-busy", "data-stopped", "data-copied", "data-failed",
)  # fmt: skip
WORD = re.compile(r"[A-Za-z]{2,}(?:'[a-z]+)?")
DATA = re.compile(r"\S*[\d@/_=…\\-]\S*|\S+\.\S+|\S+:\S+")
"""Texts that are no words: numbers, times, addresses, names of tasks."""


DATA_WORDS = {
    # of the test project, and names of rows
    "Shop", "Daily", "reports", "Deliveries", "Invoices", "Orders", "Parcels", "Webhook", "calls", "Customer", "Price",
    "Item", "Analytical", "Engine", "mail", "partners", "critical", "default", "nightly", "Nightly", "yearly", "report",
    "delivery", "parcel", "order", "noop", "Declined", "Timeout",
    # of Django: names, words without a translation, and words that are the same in German
    "Django", "admin", "Search", "Filter", "False", "Details", "ID",
    # of the package: names, units, and words that are the same in German
    "Faktory", "JSON", "min", "ms", "MB", "UTC", "CST", "CDT", "Nov",
}  # fmt: skip
"""Words of the data, and words that are the same in English and German."""

_SIGNATURE = set(WORD.findall(inspect.getsource(refund.func)))
_EXCEPTION = set("FAKTORY GearMonkey URL environment give is its known no or server set the in".split())  # noqa: SIM905
WORDS_OF_PAGES = {
    "edit-typed": _SIGNATURE, "run": _SIGNATURE, "gearmonkey": _EXCEPTION,
    "wrong-edit": set("args Expecting delimiter line column char".split()),  # noqa: SIM905
    "wrong-edit-type": {"args"},
}  # fmt: skip
"""Names, types and values of parameters; texts of exceptions of Python and of the settings."""

VALID_CRON = {
    "name": "weekly", "schedule": "0 2 * * 1", "zone": "UTC", "jobtype": "elsewhere", "queue": "", "args": "[]",
    "kwargs": "{}", "job": "{}", "missed": "once", "window_s": "60", "overlap": "allow",
}  # fmt: skip
WRONG_CRON = {
    "name": "a\x1fb", "schedule": "61 * * * *", "zone": "Mars", "queue": "a b", "args": "{}", "kwargs": '{"a": 1}',
    "job": '{"jid": "1"}', "window_s": "0",
}  # fmt: skip
WRONG_QUERIES = (
    "state:tired", "older:soon", "queue:a*b", 'queue:"a', "queue:", "about:order", "args:1", "older:1d,2d",
    "among:0", 'queue:"a"b',
)  # fmt: skip
"""Queries with an error, each with another message."""


HIDING = ("script", "style", "pre", "textarea", "bdi")
"""Elements with contents of jobs, and names that clients chose."""


class Page(HTMLParser):
    """The texts of a page outside of marks, and those of its attributes."""

    def __init__(self, html):
        super().__init__()
        self.texts, self._depth, self._hidden, self._task_tag = [], 0, 0, None
        self.feed(html)
        assert self._depth == 0, "a mark is not closed"

    def handle_starttag(self, tag, attrs):
        names = dict(attrs)
        is_task = tag == "option" and "." in (names.get("value") or "")
        # The select has all tasks of the process, among them those of other tests.
        is_task |= tag == "select" and names.get("name") == "task"
        if is_task and self._task_tag is None:
            self._task_tag = tag
            self._hidden += 1
        self._hidden += tag in HIDING
        shown = [names.get(name) or "" for name in SHOWN_ATTRIBUTES]
        if tag == "input" and names.get("type") == "submit":
            shown.append(names.get("value") or "")
        self.texts += [without_marks(text) for text in shown]

    def handle_endtag(self, tag):
        self._hidden -= tag in HIDING
        if tag == self._task_tag:
            self._task_tag = None
            self._hidden -= 1

    def handle_data(self, data):
        for part in re.split(f"([{BEGIN}{END}])", data):
            self._depth += (part == BEGIN) - (part == END)
            if self._depth == 0 and not self._hidden and part != END:
                self.texts.append(part)

    @property
    def words(self):
        return {word for text in self.texts for word in WORD.findall(DATA.sub(" ", text))}


def without_marks(text):
    while (shorter := re.sub(f"{BEGIN}[^{BEGIN}{END}]*{END}", " ", text)) != text:
        text = shorter
    return text


@pytest.fixture
def pseudo(tmp_path, settings):
    """Return a function that activates the marked catalogue."""
    catalogue = Catalog(locale="de")
    for message in translations.extract_texts():
        if message.id:
            ids = message.id if isinstance(message.id, tuple) else (message.id,)
            marked = tuple(f"{BEGIN}{text}{END}" for text in ids)
            catalogue.add(message.id, marked if len(ids) > 1 else marked[0], context=message.context)
    path = tmp_path / "de" / "LC_MESSAGES" / "django.mo"
    path.parent.mkdir(parents=True)
    path.write_bytes(translations.compile_mo(catalogue))

    def activate():
        settings.LOCALE_PATHS = [tmp_path]
        settings.LANGUAGE_CODE = "de"

    return activate


def fill_more():
    """Add rows in states that the shared pages do not have."""
    now = timezone.now()
    for state in State:
        JobFactory(**({} if state is State.ENQUEUED else {str(state): True}), jobtype="shop.tasks.send_invoice")
    JobFactory(blocked=True, queue="critical", lock_key="order 7")
    WorkerFactory(wid="app-7-w1", hostname="app-7", pid=407, state="quiet", beat_at=now)
    entry = CronEntry.objects.get()
    for outcome in ("enqueued", "missed", "overlapped", "refused"):
        CronRun.objects.create(entry=entry, jid="", outcome=outcome, tick=now - timedelta(days=len(outcome)))
    CronEntry.objects.create(name="yearly report", schedule="0 0 31 2 *", zone="UTC", jobtype="shop.tasks.never")
    OutboxEntry.objects.create(jid="outbox-1", queue="mail", job='{"jid":"outbox-1","jobtype":"x"}', error="E42")


def read_pages(client, paths):
    """Return the HTML of each page: those of the browser's tests, histories, confirmations, answers to actions."""
    root = "/admin/django_faktory/"
    lock, worker = JobLock.objects.latest("pk"), "app-1-w1"
    dead = Job.objects.filter(errtype="requests.exceptions.Timeout").latest("pk")
    more = {
        "history": f"job/{dead.pk}/history/", "retry": "job/all/?verb=retry&state=dead", "tabs": "job/",
        "failing": "job/errors/one/?error=shop.Declined&task=shop.tasks.charge_card&at=card+N+is+declined",
        "tried": f"job/errors/tried/?tried={dead.pk}&error=x&task=y", "search": "job/?q=send_invoce",
        "all-batches": "batch/?place=all", "failing-batches": "batch/?stage=failing",
        "cron-states": "cronentry/?state=paused",
        "choose": "job/run/",
        "delete-limit": f"limit/{Limit.objects.earliest('pk').pk}/delete/",
        "one-hour": "overview/tasks/", "30-days": "overview/tasks/?period=30d",
        **{f"job-{state}": f"job/{Job.objects.in_state(state).latest('pk').pk}/change/" for state in State},
    }  # fmt: skip
    found = {name: client.get(urljoin(root, path)) for name, path in (paths | more).items()}
    selected = {"index": "0", "select_across": "0"}
    for name, path, action, row in (
        ("release", "joblock/", "release", lock.pk), ("terminate", "workerprocess/", "terminate", worker),
        ("discard", "job/", "discard", dead.pk), ("kill", "job/", "kill", dead.pk), ("prune", "job/", "prune", dead.pk),
        ("cancel", "job/", "cancel", dead.pk), ("quiet", "workerprocess/", "quiet", worker),
        ("pause", "queue/", "pause", "mail"), ("resume", "queue/", "resume", "mail"),
        ("retry-batch", "batch/", "retry_failed", Batch.objects.get(depth=0).pk),
        ("try", "outboxentry/", "try_again", OutboxEntry.objects.get().pk),
        ("pause-cron", "cronentry/", "pause", CronEntry.objects.earliest("pk").pk),
        ("resume-cron", "cronentry/", "resume", CronEntry.objects.earliest("pk").pk),
    ):  # fmt: skip
        sent = {**selected, "action": action, "_selected_action": row}
        found[f"post-{name}"] = client.post(f"{root}{path}", sent, follow=True)
    begun = client.post(f"{root}job/all/?verb=discard&queue=critical", {"why": ""})
    found["bulk-run"] = begun
    signed = re.search(r'name="run" value="([^"]+)"', begun.content.decode())[1]
    found["bulk-run-step"] = client.post(f"{root}job/all/step/", {"run": signed})
    found["wrong-limit"] = client.post(
        f"{root}limit/add/", {"scope": "task", "name": "shop.tasks.call_webhook", "rate": "1/s"}
    )
    found["wrong-rate"] = client.post(f"{root}limit/add/", {"scope": "queue", "name": "a b", "rate": "fast"})
    found["wrong-cron"] = client.post(f"{root}cronentry/add/", {})
    for name, wrong in WRONG_CRON.items():
        found[f"wrong-cron-{name}"] = client.post(f"{root}cronentry/add/", VALID_CRON | {name: wrong})
    for number, query in enumerate(WRONG_QUERIES):
        found[f"wrong-query-{number}"] = client.get(f"{root}job/", {"q": query}, follow=True)
    found["wrong-edit"] = client.post(f"{root}job/{dead.pk}/edit/", {"args": "[1", "kwargs": "{}"})
    found["wrong-edit-type"] = client.post(f"{root}job/{dead.pk}/edit/", {"args": "{}", "kwargs": "{}"})
    assert {name: page.status_code for name, page in found.items() if page.status_code != 200} == {}
    return {name: page.content.decode() for name, page in found.items()}


@pytest.fixture
def read_all(admin_client):
    """Return a function that reads all pages, and undoes what their actions have done."""
    paths = pages(fill())
    fill_more()

    def read():
        with transaction.atomic():
            found = read_pages(admin_client, paths)
            transaction.set_rollback(True)
        return found

    return read


@pytest.mark.slow
@pytest.mark.skipif(django.VERSION >= (6,), reason="Django's own German lacks texts of its newer pages")
def test_each_page_is_translated_as_a_whole(read_all, pseudo):
    english = read_all()
    pseudo()
    pages_by_word = defaultdict(list)
    for name, html in read_all().items():
        allowed = DATA_WORDS | WORDS_OF_PAGES.get(name, set())
        for word in (Page(html).words & Page(english[name]).words) - allowed:
            pages_by_word[word].append(name)
    assert dict(pages_by_word) == {}


@pytest.mark.slow
def test_german_pages_have_no_placeholder_and_no_english_menu(read_all, settings):
    settings.LANGUAGE_CODE = "de"
    german = read_all()
    assert [name for name, html in german.items() if re.search(r"%\(\w+\)s", html)] == []
    wrong = {name: html for name, html in german.items() if re.match("wrong-(cron|query)-", name)}
    assert [name for name, html in wrong.items() if not re.search("erwartet|ungültiger|nur Tasks", html)] == []
    assert "Erfordert Aufmerksamkeit" in german["overview"]
    assert all("Warteschlangen" in html for html in german.values() if "faktory-nav" in html)


def test_the_language_of_the_browser_selects_the_texts(admin_client, settings):
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    path = "/admin/django_faktory/overview/"
    german = admin_client.get(path, headers={"Accept-Language": "de"}).content.decode()
    english = admin_client.get(path, headers={"Accept-Language": "en"}).content.decode()
    assert ("Übersicht" in german, "Overview" in german, "Overview" in english) == (True, False, True)


@pytest.mark.parametrize(("language", "text"), [("en", "1,234 dead jobs"), ("de", "1.234 tote Jobs")])
def test_large_numbers_have_the_separators_of_the_language(admin_client, settings, language, text):
    settings.LANGUAGE_CODE = language
    Job.objects.bulk_create(JobFactory.many(1234, dead=True, jobtype="shop.tasks.pay", errtype="E", queue="q"))
    page = admin_client.get("/admin/django_faktory/job/errors/one/?error=E&task=shop.tasks.pay&at=")
    assert text in page.content.decode()


def test_alarms_read_in_two_languages_within_a_second_differ(transactional_db):
    QueueFactory(name="mail", paused_at=timezone.now())
    JobFactory(queue="mail")
    with translation.override("de"):
        german = [alarm.text for alarm in alarms.read(using="default")]
    english = [alarm.text for alarm in alarms.read(using="default")]
    assert (german, english) == (
        ["Warteschlange mail ist pausiert; wartend: 1"], ["Queue mail is paused; waiting: 1"],
    )  # fmt: skip
