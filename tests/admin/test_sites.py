"""Open each page of the admin, follow each link and press each button: with a second database, and on a second site."""

import re
from contextlib import ExitStack, contextmanager
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import parse_qs, urljoin, urlsplit

import pytest
from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connections, transaction
from django.test import Client, override_settings

from django_faktory.store import shared_reads
from example_project.shop.models import Order
from tests.project import sites
from tests.security.matrix import routes, rows

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(databases=["default", "other"]), pytest.mark.once]

ALIASES = ("default", "other")
SECOND = {"FAKTORY": {"DATABASE": "other"}}
SETUPS = {
    "one database": ("default", "/admin/", {}),
    "a second database": ("other", "/admin/", SECOND),
    "a second database and a router": (
        "other", "/admin/", SECOND | {"DATABASE_ROUTERS": ["tests.project.sites.JobsElsewhere"]},
    ),
    "a replica": ("default", "/admin/", {"DATABASE_ROUTERS": ["tests.project.sites.Replica"]}),
    "a second site alone": ("default", "/ops/", {"ROOT_URLCONF": sites.Alone}),
    "a second site": ("default", "/ops/", {"ROOT_URLCONF": sites.Both}),
}  # fmt: skip
OF_JOBS = re.compile(r"\bdjango_faktory_(?!outboxentry)\w+")


class Page(HTMLParser):
    """The links of a page, and what each of its buttons sends."""

    def __init__(self, text, path):
        super().__init__()
        self.path, self.links, self.buttons, self._form = path, set(), [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        for name in ("href", "action", "formaction", "data-faktory-refresh"):
            if values.get(name, "#")[:1] not in ("", "#") and tag != "link":
                self.links.add(urljoin(self.path, values[name]))
        if tag == "form":
            is_post = values.get("method", "").lower() == "post"
            self._form = (urljoin(self.path, values.get("action") or self.path), {}) if is_post else None
        elif self._form is None:
            return
        elif tag == "input" and values.get("type") == "hidden":
            self._form[1][values["name"]] = values.get("value", "")
        elif tag == "button" or (tag == "input" and values.get("type") == "submit"):
            action, hidden = self._form
            # The form's hidden fields that follow the button are in the same dict.
            sent = ({values["name"]: values.get("value", "")} if values.get("name") else {}, hidden)
            self.buttons.append((urljoin(self.path, values.get("formaction") or action), sent))

    def handle_endtag(self, tag):
        if tag == "form":
            self._form = None


@pytest.fixture(params=SETUPS)
def setup(request):
    """Plant rows where the jobs are; the other database refuses every statement about them."""
    alias, prefix, changes = SETUPS[request.param]
    requests = list(routes.admin_requests())  # addresses of the default site
    if "ROOT_URLCONF" not in changes:
        requests += [one for one in routes.api_requests() if one.is_act and not one.is_variant]
    foreign = next(one for one in ALIASES if one != alias)

    def refuse(execute, sql, *rest):
        assert not OF_JOBS.search(sql), f"{foreign}: {sql}"
        return execute(sql, *rest)

    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    Order.objects.create(customer="ada", item="engine", price=1)
    faktory = {"API_READS": "", "API_WRITES": "", **changes.get("FAKTORY", {})}
    with override_settings(**changes | {"FAKTORY": faktory}), connections[foreign].execute_wrapper(refuse):
        shared_reads.forget()
        rows.plant()
        yield SimpleNamespace(alias=alias, prefix=prefix, client=client, requests=requests)
    shared_reads.forget()


def stored(alias):
    """Return every row of the jobs' tables in this database, and of the outbox."""
    models = [one for one in apps.get_app_config("django_faktory").get_models() if one._meta.managed]
    found = {one.__name__: list(one.objects.using(alias).order_by("pk").values_list()) for one in models
             if not one._meta.proxy and one.__name__ != "OutboxEntry"}  # fmt: skip
    outbox = apps.get_model("django_faktory", "OutboxEntry")
    return found | {"OutboxEntry": list(outbox.objects.order_by("pk").values_list())}


@contextmanager
def undone():
    with ExitStack() as stack:
        for alias in ALIASES:
            stack.enter_context(transaction.atomic(using=alias))
            stack.callback(transaction.set_rollback, True, using=alias)
        yield


def of_site(links, setup):
    """Return the links to pages, and check that none leaves the site."""
    paths = {link for link in links if not link.startswith(("/static/", "mailto:"))}
    outside = {link for link in paths if not link.startswith(setup.prefix) and link != "/"}
    assert outside == set()
    return {link.partition("#")[0] for link in paths if link != "/"}


def is_followed(link, setup):
    """Return whether the link leads to a page of jobs, or of an object with jobs."""
    return link.startswith((f"{setup.prefix}django_faktory/", f"{setup.prefix}shop/order/"))


def crawl(setup, start):
    """Yield each page that can be reached; of a list with a filter, no links to further filters are followed."""
    waiting, seen = list(start), set()
    while waiting:
        link = waiting.pop()
        parts = urlsplit(link)
        # Django adds the filters of the list to the link of each row.
        key = (parts.path, frozenset(parse_qs(parts.query)) - {"_changelist_filters"})
        if key in seen:
            continue
        seen.add(key)
        answer = setup.client.get(link, follow=True)
        assert answer.status_code == 200, link
        path = answer.request["PATH_INFO"]
        assert path.startswith(setup.prefix), (link, path)
        if not answer.headers["Content-Type"].startswith("text/html") or "Content-Disposition" in answer.headers:
            continue
        page = Page(answer.content.decode(), path)
        links = of_site(page.links, setup)
        yield page
        waiting += [one for one in links if is_followed(one, setup) and not ("?" in link and "?" in one)]


def start_of(setup):
    gets = [
        one.path.replace("/admin/", setup.prefix, 1)
        for one in setup.requests
        if one.method == "GET" and one.needs != routes.NO_USER
    ]
    return [setup.prefix, *gets]


def test_each_act_changes_a_row_of_the_jobs_database(setup):
    acts = [one for one in setup.requests if one.is_act]
    assert len(acts) > 40
    for request in acts:
        with undone():
            if request.prepare is not None:
                request.prepare()
            before, logged = stored(setup.alias), LogEntry.objects.count()
            path = request.path.replace("/admin/", setup.prefix, 1)
            answer = setup.client.generic(request.method, path, **request.sent)
            assert answer.status_code < 400, (request.name, answer.content)
            assert answer.headers.get("Location", setup.prefix).startswith((setup.prefix, ".", "?")), request.name
            assert stored(setup.alias) != before, request.name
            if path.startswith(setup.prefix):
                assert LogEntry.objects.count() > logged, request.name


def test_each_page_opens_each_button_works_and_no_link_leaves_the_site(setup):
    pages = list(crawl(setup, start_of(setup)))
    assert len(pages) > 60
    pressed = {}
    for page in pages:
        for address, (named, hidden) in page.buttons:
            sent = {**hidden, **named, "confirmed": "yes", "csrfmiddlewaretoken": ""}
            if address.startswith(f"{setup.prefix}django_faktory/"):
                pressed[address, tuple(sorted(sent.items()))] = page.path
    assert len(pressed) > 40
    for (address, sent), path in pressed.items():
        with undone():
            answer = setup.client.post(address, dict(sent), follow=True)
            assert answer.status_code == 200, (path, address, sent)
            assert answer.request["PATH_INFO"].startswith(setup.prefix), (path, address, sent)
            of_site(Page(answer.content.decode(), answer.request["PATH_INFO"]).links, setup)
