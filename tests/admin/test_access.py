"""Send every address and action of the admin as a superuser, and with Django's own permissions only.

The pages are read from the registered admin classes, so that a new page without an entry here fails. Users with other
sets of permissions are in tests/security/test_permission_matrix.py.
"""

from datetime import timedelta
from functools import cache
from typing import NamedTuple

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.urls import reverse

from django_faktory.admin import cron, limits
from django_faktory.admin.jobs import actions as job_actions
from django_faktory.models import Batch, Job, JobLock, Limit, OutboxEntry
from django_faktory.models.cron import CronEntry
from django_faktory.models.permissions import needs
from tests.factories import T0, JobFactory, QueueFactory, WorkerFactory
from tests.project.tasks import noop

pytestmark = [pytest.mark.django_db, pytest.mark.once]

APP = "django_faktory"
NO_USER = "granted to no user"
ROW = 900_001
"""First primary key of this test's rows, beyond the sequences of any database."""
MODELS = {
    "overview": "default", "job": ROW, "queue": "default", "workerprocess": "w1", "batch": ROW, "cronentry": ROW,
    "joblock": ROW, "limit": ROW, "outboxentry": ROW, "gearmonkeyfunction": "default",
}  # fmt: skip
"""Models, each with the key of the row that addresses name."""


DOWNLOADS = [
    *(("job", column, ("view_job",)) for column in ("payload", "result", "history", "failure")),
    *(("cronentry", column, ("view_cronentry", "view_job")) for column in ("args", "kwargs", "job")),
    *(("batch", column, ("view_batch", "view_job")) for column in ("complete", "success")),
    ("batch", "description", ("view_batch",)),
    *(("outboxentry", column, ("view_outboxentry", "view_job")) for column in ("job", "error")),
]
"""Columns that can be downloaded; `test_every_…` compares them with what is registered."""


class Act(NamedTuple):
    """A request: address, required permissions, and form data."""

    address: str
    needs: tuple[str, ...]
    post: dict[str, object] | None = None
    """None for a GET."""


def page(model, view, *args):
    return reverse(f"admin:{APP}_{model}_{view}", args=args)


def _pages():
    for model, pk in MODELS.items():
        view = {"overview": "view_statistics"}.get(model, f"view_{model}")
        yield f"{model} changelist", Act(page(model, "changelist"), (view,))
        yield f"{model} change", Act(page(model, "change", pk), (view,))
        yield f"{model} history", Act(page(model, "history", pk), (view,))
        yield f"{model} add", Act(page(model, "add"), (NO_USER,))
        yield f"{model} delete", Act(page(model, "delete", pk), (NO_USER,))
    for model, column, needed in DOWNLOADS:
        yield f"{model} download {column}", Act(page(model, "download", MODELS[model], column), needed)


CRON = {
    "name": "another", "schedule": "0 2 * * *", "zone": "UTC", "jobtype": "elsewhere", "queue": "", "args": "[]",
    "kwargs": "{}", "job": "{}", "missed": "once", "window_s": "60", "overlap": "allow",
}  # fmt: skip
LIMIT = {"scope": "queue", "name": "mail", "concurrency": "3"}
KIND = "error=E&task=noop&at="


def _acts():
    """Yield a name and an `Act` for each request; names of actions contain a colon."""
    yield from _pages()
    yield "overview part", Act(reverse(f"admin:{APP}_overview_part"), ("view_statistics",))
    yield "job part", Act(page("job", "part", ROW), ("view_job",))
    yield "job errors", Act(page("job", "errors"), ("view_job",))
    yield "job error", Act(f"{page('job', 'error')}?{KIND}", ("view_job",))
    yield "job tried", Act(f"{page('job', 'tried')}?{KIND}&tried={ROW}", ("view_job",))
    yield "job try", Act(page("job", "try", ROW), ("view_job", "retry_job"), {})
    yield "job edit", Act(page("job", "edit", ROW), ("view_job", "change_job"), {"args": "[1]", "kwargs": "{}"})
    yield "job run", Act(f"{page('job', 'run')}?task={noop.jobtype}", ("add_job",), {})
    for verb, pk, codename in (
        ("retry", ROW, "retry_job"), ("requeue", ROW + 1, "requeue_job"), ("cancel", ROW + 2, "cancel_job"),
        ("kill", ROW + 2, "kill_job"), ("discard", ROW + 2, "discard_job"), ("prune", ROW, "prune_job"),
        ("clear", ROW + 2, "clear_queue"),
    ):  # fmt: skip
        form = {"confirmed": "yes", "why": "because"}
        if verb != "clear":
            yield f"job act {verb}", Act(page("job", "act", pk, verb), ("view_job", codename), form)
            chosen = {"action": verb, "_selected_action": [pk], **form}
            yield f"job: {verb}", Act(page("job", "changelist"), ("view_job", codename), chosen)
        asked = f"{page('job', 'all')}?verb={verb}&state={Job.objects.get(pk=pk).state}"
        yield f"job all {verb}", Act(asked, ("view_job", codename), {})
    one = {
        ("queue", "default"): {"pause": "pause_queue", "resume": "resume_queue", "clear": "clear_queue"},
        ("workerprocess", "w1"): {"quiet": "quiet_workerprocess", "terminate": "terminate_workerprocess"},
        ("batch", ROW): {"retry_failed": "retry_batch"},
        ("cronentry", ROW): {"pause": "pause_cronentry", "resume": "resume_cronentry", "run_now": "run_cronentry"},
        ("joblock", ROW): {"release": "release_joblock"},
        ("limit", ROW): {"pause": "pause_limit", "resume": "resume_limit", "as_in_code": "change_limit"}
        | {"delete_selected": "delete_limit"},
        ("outboxentry", ROW): {"try_again": "retry_outboxentry", "delete_selected": "delete_outboxentry"},
    }
    for (model, pk), actions in one.items():
        for action, codename in actions.items():
            form = {"action": action, "_selected_action": [pk], "confirmed": "yes", "post": "yes"}
            yield f"{model}: {action}", Act(page(model, "changelist"), (f"view_{model}", codename), form)
            if model == "cronentry":
                yield f"cronentry act {action}", Act(page(model, "act", pk, action), (f"view_{model}", codename), {})
            elif model == "limit" and action in limits.LimitAdmin.object_actions:
                yield f"limit act {action}", Act(page(model, "act", pk, action), (codename,), {})
    yield "cronentry add", Act(page("cronentry", "add"), ("add_cronentry",), CRON)
    yield "cronentry save", Act(page("cronentry", "change", ROW), ("change_cronentry",), CRON)
    yield "cronentry delete", Act(page("cronentry", "delete", ROW), ("delete_cronentry",), {"post": "yes"})
    yield "limit add", Act(page("limit", "add"), ("add_limit",), LIMIT)
    yield "limit save", Act(page("limit", "change", ROW), ("change_limit",), {"concurrency": "4"})
    yield "limit delete", Act(page("limit", "delete", ROW), ("delete_limit",), {"post": "yes"})
    yield "outboxentry delete", Act(page("outboxentry", "delete", ROW), ("delete_outboxentry",), {"post": "yes"})


@cache
def _all_acts():
    """Return the requests by name: the same for each test, because the rows have fixed keys and states."""
    return dict(_acts())


NAMES = [
    *(f"{model} {view}" for model in MODELS for view in ("changelist", "change", "history", "add", "delete")),
    *(f"{model} download {column}" for model, column, _ in DOWNLOADS),
    "overview part", "job part", "job errors", "job error", "job tried", "job try", "job edit",
    "job run",
    *(f"job {how} {verb}" for how in ("act", "all") for verb in job_actions.ACTIONS if (how, verb) != ("act", "clear")),
    *(f"cronentry act {verb}" for verb in cron.CronEntryAdmin.object_actions), "cronentry save",
    *(f"limit act {verb}" for verb in limits.LimitAdmin.object_actions), "limit save", "limit: delete_selected",
    *(
        f"{model._meta.model_name}: {action}"
        for model, site in admin.site._registry.items() if model._meta.app_label == APP for action in site.actions
    ),
    "outboxentry: delete_selected",
]  # fmt: skip
"""Listed manually because parametrization happens before there are rows; `test_every_…` compares the two."""

ACTS = [
    name for name in NAMES
    if ":" in name or name.split()[1] in ("act", "all", "try", "edit", "run", "save")
    or name in ("cronentry add", "cronentry delete", "limit add", "limit delete", "outboxentry delete")
]  # fmt: skip
"""Requests that change something; each is a POST."""

NEEDS_CONFIRMATION = {"queue: clear"}
"""Shows a confirmation page; the POST from that page performs the action."""


@pytest.fixture
def rows(db):
    """Create one row of each model, in a state to which each action applies."""
    JobFactory(
        pk=ROW,
        jid="job-dead",
        dead=True,
        errtype="E",
        failure='{"message":""}',
        bid="b-1",
        has_run=True,
        counts_failed=True,
    )
    JobFactory(pk=ROW + 1, jid="job-scheduled", scheduled=True)
    JobFactory(pk=ROW + 2, jid="job-ready")
    QueueFactory(name="default")
    WorkerFactory(wid="w1")
    Batch.objects.create(pk=ROW, bid="b-1", total=1, pending=1, failed=1)
    CronEntry.objects.create(
        pk=ROW, name="nightly", schedule="0 2 * * *", zone="UTC", jobtype="elsewhere", next_at=T0, args="[1]"
    )
    JobLock.objects.create(
        pk=ROW, key="k", jid="job-x", attempt=1, wid="w1", lease=timedelta(0), acquired_at=T0, expires_at=T0
    )
    Limit.objects.create(pk=ROW, scope="task", name="noop", concurrency=5, origin=Limit.Origin.EDITED)
    OutboxEntry.objects.create(pk=ROW, jid="job-out", queue="mail", job="{}", error="no room")
    return _all_acts()


def ready_for(name):
    """Put rows into the state in which this action changes something."""
    if name.endswith("resume") and name.startswith("queue"):
        apps.get_model(APP, "queue").objects.update(paused_at=T0)
    if name.endswith("resume") and name.startswith("cronentry"):
        CronEntry.objects.update(paused_at=T0, next_at=None)
    if name.endswith("resume") and name.startswith("limit"):
        Limit.objects.update(paused_at=T0)


def stored():
    """Return every row of every table of this app, and of the admin log."""
    models = [one for one in apps.get_app_config(APP).get_models() if not one._meta.proxy]
    return {one.__name__: list(one.objects.order_by("pk").values_list()) for one in [*models, LogEntry]}


def staff_user(*codenames, **fields):
    user = User.objects.create_user(f"user{User.objects.count()}", is_staff=True, **fields)
    found = Permission.objects.filter(content_type__app_label=APP, codename__in=codenames)
    assert {one.codename for one in found} == set(codenames)
    user.user_permissions.set(found)
    return user


def codenames():
    return set(Permission.objects.filter(content_type__app_label=APP).values_list("codename", flat=True))


def ask(client, act):
    """Send the request; return whether it was permitted, and whether a row changed."""
    before = stored()
    answer = client.get(act.address) if act.post is None else client.post(act.address, act.post)
    is_in = answer.status_code in (200, 302) and "/login/" not in answer.headers.get("Location", "")
    return is_in, stored() != before


def expect(client, name, act, *, may):
    is_in, is_changed = ask(client, act)
    if act.post is None:
        assert (is_in, is_changed) == (may, False)
    elif name not in NEEDS_CONFIRMATION:
        assert is_changed == may
        assert is_in or not may


def test_every_registered_url_and_action_is_in_the_permission_matrix(rows, rf, admin_user):
    asks = rf.get("/")
    asks.user = admin_user
    addresses, actions = set(), set()
    for model, site in admin.site._registry.items():
        if model._meta.app_label != APP:
            continue
        name = model._meta.model_name
        addresses |= {one.name.removeprefix(f"{APP}_").replace("_", " ", 1) for one in site.urls if one.name}
        actions |= {f"{name}: {action}" for action in site.get_actions(asks)}
    known = (
        set(NAMES)
        | {"job all_step"}
        | {"tasks", "task", "task pause"}  # tests/security/test_permission_matrix.py requests them
        | {"job act", "job all", "cronentry act", "limit act"}
        | {f"{model} download" for model, *_ in DOWNLOADS}
    )  # the first has tests of its own
    assert {one for one in addresses if one not in known} == set()
    assert {one for one in actions if one not in known} == set()
    assert set(rows) == set(NAMES)
    downloads = {
        (model._meta.model_name, column)
        for model, site in admin.site._registry.items()
        if model._meta.app_label == APP
        for column in site.long_texts
    }
    assert downloads == {(model, column) for model, column, _ in DOWNLOADS}
    assert {name for name, act in rows.items() if act.post is not None} == set(ACTS)


@pytest.mark.parametrize("name", NAMES)
def test_standard_django_permissions_do_not_permit_our_custom_actions(client, rows, name):
    ready_for(name)
    usual = {one for one in codenames() if one.split("_")[0] in ("view", "add", "change", "delete")}
    client.force_login(staff_user(*usual))
    expect(client, name, rows[name], may=set(rows[name].needs) <= usual)


@pytest.mark.parametrize("name", NAMES)
def test_a_superuser_can_do_everything_and_actions_are_logged(admin_client, rows, name):
    ready_for(name)
    expect(admin_client, name, rows[name], may=NO_USER not in rows[name].needs)
    is_act = rows[name].post is not None and name not in NEEDS_CONFIRMATION
    assert LogEntry.objects.exists() == is_act


def test_get_and_head_requests_change_nothing(admin_client, rows):
    """The words of an action in the address or query do not perform it."""
    before = stored()
    for name, act in rows.items():
        for address in (act.address, f"{act.address}{'&' if '?' in act.address else '?'}confirmed=yes&post=yes"):
            answer = admin_client.get(address, act.post or {}) if "?" not in address else admin_client.get(address)
            assert answer.status_code in (200, 302, 400, 403, 405), name
            assert admin_client.head(address).status_code in (200, 302, 400, 403, 405), name
        assert stored() == before, name


@pytest.mark.parametrize("verb", list(job_actions.ACTIONS))
def test_each_step_of_a_bulk_action_checks_the_user_and_permission_again(client, rows, verb):
    """Check for a permission that was revoked in between, and for a form that another user received."""
    act, codename = rows[f"job all {verb}"], needs(job_actions.ACTIONS[verb].needs).partition(".")[2]
    user = staff_user("view_job", codename)
    client.force_login(user)
    sealed = client.post(act.address, {}).context["signed_run"]
    step = Act(reverse(f"admin:{APP}_job_all_step"), (), {"run": sealed})
    user.user_permissions.clear()
    assert ask(client, step) == (False, False)
    client.force_login(staff_user("view_job", codename))
    assert ask(client, step)[1] is False
    client.force_login(user)
    user.user_permissions.set(Permission.objects.filter(codename__in=["view_job", codename]))
    assert ask(client, step) == (True, True)
