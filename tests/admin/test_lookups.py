"""Test that each list of the admin accepts the parameters of its own filters and links, and no other lookup.

The names are generated: each field of each model, alone and across relations, with each lookup that Django knows.
"""

import random

import pytest
from django.apps import apps
from django.contrib import admin
from django.db import connection, models
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils.http import urlencode

from django_faktory.models import Batch, Limit, OutboxEntry
from django_faktory.models.cron import CronRun
from tests.examples import examples
from tests.factories import T0, CronFactory, JobFactory, LockFactory, QueueFactory, WorkerFactory

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db, pytest.mark.once]

APP = "django_faktory"
SECRET = "s3cr3t"
LISTS = ("job", "queue", "workerprocess", "batch", "cronentry", "joblock", "limit", "outboxentry")
PAGES = ("overview", "gearmonkeyfunction")
"""`LISTS` are Django's change lists; `PAGES` take no parameter at all."""

OWN = {
    "job": {"state": "dead", "queue": "mail", "about": "shop.order/1", "bid": "b-1"},
    "queue": {},
    "workerprocess": {},
    "batch": {"stage": "open", "place": "root"},
    "cronentry": {"state": "active", "origin__exact": "admin", "origin__isnull": "True"},
    "joblock": {},
    "limit": {
        "scope__exact": "queue", "scope__isnull": "True", "origin__exact": "admin", "origin__isnull": "True",
        "paused_at__isempty": "1",
    },
    "outboxentry": {"error__isempty": "0", "queue": "mail", "queue__isnull": "True"},
}  # fmt: skip
"""Each list's own parameters, with a value that a link of the page sends."""

PAGING = {"q": "a", "p": "1", "o": "1", "e": "1", "all": ""}
"""Parameters of every list that filter by nothing but the search form."""

EXAMPLES = examples(60)
"""Random addresses per list, in addition to the generated ones."""


@pytest.fixture(autouse=True)
def rows(db):
    """Create two rows of each model, so that a filter that accepts only one of them is noticed."""
    for name in ("a", "b"):
        text = f'{{"jobtype":"t","args":["{SECRET if name == "a" else "other"}"]}}'
        job = JobFactory(jid=f"job-{name}-0001", payload=text, queue=f"queue-{name}", about=f"shop.order/{name}")
        QueueFactory(name=f"queue-{name}")
        WorkerFactory(wid=f"wid-{name}", hostname=name, beat_at=T0)
        Batch.objects.create(bid=f"bid-{name}", description=name, success=text, complete=text)
        entry = CronFactory(name=f"cron-{name}", args=f'["{SECRET}{name}"]', next_at=T0)
        CronRun.objects.create(entry=entry, tick=T0, jid=job.jid, outcome="enqueued", note=name)
        LockFactory(key=f"key-{name}", jid=job.jid, wid=f"wid-{name}")
        Limit.objects.create(scope="task", name=f"task-{name}", concurrency=1)
        OutboxEntry.objects.create(jid=f"out-{name}", queue=f"queue-{name}", job=text, error=f"refused {name}")


def model_of(name):
    return apps.get_model(APP, name)


def listed(client, name, params):
    """Return the status, and the keys of the rows that the page lists."""
    answer = client.get(f"{reverse(f'admin:{APP}_{name}_changelist')}?{urlencode(params, doseq=True)}")
    return answer.status_code, [row.pk for row in answer.context["cl"].result_list] if answer.status_code == 200 else []


def paths(model, depth=2):
    """Return the fields, columns and relations of a model and of its related models."""
    found = ["pk"]
    for field in model._meta.get_fields(include_hidden=True):
        names = {field.name, getattr(field, "attname", field.name)}
        found += names
        if field.is_relation and field.related_model and depth:
            found += [f"{name}__{rest}" for name in names for rest in paths(field.related_model, depth - 1)]
    return sorted(set(found))


def lookups():
    """Return each lookup and transform that any field has."""
    kinds = [models.TextField, models.IntegerField, models.DateTimeField, models.JSONField, models.BooleanField]
    return sorted({"", *(name for kind in kinds for name in kind.get_lookups())})


def foreign(name):
    """Return every parameter that is a lookup of this model and not one of the list's own."""
    every = [f"{path}__{lookup}".removesuffix("__") for path in paths(model_of(name)) for lookup in lookups()]
    return [one for one in every if one not in OWN[name]]


def test_every_registered_list_is_covered_by_these_tests():
    registered = {model._meta.model_name for model in admin.site._registry if model._meta.app_label == APP}
    assert registered == {*LISTS, *PAGES}
    assert set(OWN) == set(LISTS)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_accepts_its_own_parameters_and_no_other_lookup(name, rf, admin_user):
    asked = rf.get("/")
    asked.user = admin_user
    page = admin.site._registry[model_of(name)]
    assert {one for one in OWN[name] if not page.lookup_allowed(one, "a", asked)} == set()
    assert {one for one in foreign(name) if page.lookup_allowed(one, "a", asked)} == set()
    assert len(foreign(name)) > 100


@pytest.mark.parametrize("name", LISTS)
def test_requests_with_a_lists_own_parameters_succeed(admin_client, name):
    for parameter, value in OWN[name].items():
        assert listed(admin_client, name, {parameter: value})[0] == 200, parameter


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("job", "payload__contains"), ("job", "payload__startswith"), ("job", "result__contains"),
        ("job", "failure__contains"), ("job", "history__icontains"), ("job", "payload"), ("job", "payload__exact"),
        ("job", "queue__exact"), ("job", "state__in"), ("job", "about__startswith"), ("outboxentry", "job__contains"),
        ("outboxentry", "error__startswith"), ("cronentry", "args__contains"), ("cronentry", "kwargs__contains"),
        ("cronentry", "job__contains"), ("cronentry", "runs__note__contains"), ("cronentry", "origin"),
        ("batch", "success__contains"), ("batch", "complete__regex"), ("joblock", "key__startswith"),
        ("limit", "limiters__name"), ("queue", "name__startswith"), ("workerprocess", "labels__0__startswith"),
    ],
)  # fmt: skip
def test_a_lookup_that_is_not_a_filter_returns_400(admin_client, name, parameter):
    answer = admin_client.get(reverse(f"admin:{APP}_{name}_changelist"), {parameter: SECRET})
    assert answer.status_code == 400
    assert SECRET not in answer.content.decode()
    assert "Traceback" not in answer.content.decode()


@pytest.mark.parametrize("name", LISTS)
def test_a_regular_expression_in_a_url_never_reaches_the_database(admin_client, name):
    texts = [
        field.name for field in model_of(name)._meta.fields if isinstance(field, models.CharField | models.TextField)
    ]
    for field in texts:
        with CaptureQueriesContext(connection) as caught:
            answer = admin_client.get(reverse(f"admin:{APP}_{name}_changelist"), {f"{field}__regex": "(a+)+$"})
        assert answer.status_code == 400
        assert not any("(a+)+" in query["sql"] for query in caught)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("field", ["payload", "jid", "job", "name", "queue", "id__exact"])
def test_rows_can_only_be_addressed_by_primary_key(admin_client, name, field):
    row = model_of(name).objects.first()
    if row._meta.pk.name == field:
        return
    for page in ("changelist", "change"):
        address = reverse(f"admin:{APP}_{name}_{page}", args=[row.pk] if page == "change" else [])
        assert admin_client.get(address, {"_to_field": field}).status_code == 400


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("extra", [{"_facets": "True"}, {"_popup": "1"}, {"_facets": "1", "_popup": "1"}])
def test_facet_and_popup_parameters_do_not_change_a_list(admin_client, name, extra):
    assert listed(admin_client, name, extra) == listed(admin_client, name, {})
    address = reverse(f"admin:{APP}_{name}_changelist")
    assert admin_client.get(address, extra).context["cl"].add_facets is False


@pytest.mark.parametrize("name", LISTS)
def test_a_list_can_only_be_sorted_by_its_sortable_columns(admin_client, name):
    page = admin_client.get(reverse(f"admin:{APP}_{name}_changelist")).context["cl"]
    plain = listed(admin_client, name, {})
    for place, column in enumerate(page.list_display):
        if column not in page.sortable_by:
            for order in (f"{place}", f"-{place}"):
                assert listed(admin_client, name, {"o": order}) == plain, (column, order)
    status, rows = listed(admin_client, name, {"o": ".".join(["1", "-2"] * 2000 + ["99999999999999999999", "x", ""])})
    assert (status, sorted(rows)) == (200, sorted(plain[1]))
    address = reverse(f"admin:{APP}_{name}_changelist")
    shown = admin_client.get(address, {"o": ".".join(["1"] * 2000)}).context["cl"]
    assert len(shown.queryset.query.order_by) <= 4


def test_a_sortable_column_sorts_the_list(admin_client):
    ascending, descending = (listed(admin_client, "outboxentry", {"o": order})[1] for order in ("2", "-2"))
    assert ascending == descending[::-1] != []


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTS)
def test_random_parameters_are_rejected_or_do_not_filter(admin_client, name):
    """Combine random foreign lookups with own parameters: none may return a filtered list."""
    chance = random.Random(f"admin lists: {name}")
    others, own = foreign(name), list(OWN[name].items())
    values = [SECRET, "(a+)+$", "", "1", "True", "%", "_", "\x00", "2026-01-01", "a,b", "queue-a", "🙂"]
    for _ in range(EXAMPLES):
        params = {chance.choice(others): chance.choice(values)}
        params |= dict(chance.sample(own, chance.randint(0, min(2, len(own)))))
        params |= dict(chance.sample([*PAGING.items()], chance.randint(0, 2)))
        status, _rows = listed(admin_client, name, params)
        assert status == 400, params
    for parameter in OWN[name]:
        for value in values:
            assert listed(admin_client, name, {parameter: value})[0] in (200, 302), (parameter, value)
    # These parameters are read by the same code for each list.
    plain = listed(admin_client, name, {})[1]
    for parameter in PAGING:
        for value in values if name == "outboxentry" else chance.sample(values, 2):
            status, rows = listed(admin_client, name, {parameter: value})
            assert status in (200, 302), (parameter, value)
            if parameter in ("p", "e", "all") and status == 200:
                assert rows == plain


@pytest.mark.parametrize("name", PAGES)
def test_pages_without_a_list_ignore_parameters(admin_client, name):
    address = reverse(f"admin:{APP}_{name}_changelist")
    with CaptureQueriesContext(connection) as caught:
        answer = admin_client.get(
            address, {"name__regex": "(a+)+$", "payload__contains": SECRET, "_to_field": "payload"}
        )
    assert answer.status_code == 200
    assert not any("(a+)+" in query["sql"] or SECRET in query["sql"] for query in caught)
