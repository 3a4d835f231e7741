"""Build every request of the matrix from the routes of the admin and the API and from the permissions each needs."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from django.urls import reverse

from django_faktory.contrib.api import urls as api_urls
from django_faktory.models import Queue
from django_faktory.operations.job_actions import CLEAR, JOB_ACTIONS, Verb
from tests.factories import T0
from tests.project.tasks import add
from tests.security.matrix.rows import ROW

APP = "django_faktory"
NO_USER = frozenset({"no user has this"})


@dataclass(frozen=True, eq=False)
class Request:
    """A request, the permissions that it needs, and whether it changes rows if they are granted."""

    name: str
    method: str
    path: str
    needs: frozenset[str]
    sent: dict[str, Any] = field(default_factory=dict)
    is_act: bool = False
    prepare: Callable[[], object] | None = None
    is_variant: bool = False
    """True for a second way to request a route: few sets of permissions suffice."""
    is_a_list_of_pages: bool = False
    """True if any permission of this app opens the page."""
    form: dict[str, Any] = field(default_factory=dict)
    """What the form of a change list sends."""

    @property
    def must_be_refused(self):
        """True if users without the permissions get an error; a change list shows itself and ignores an action."""
        if self.is_a_list_of_pages:
            return False
        return self.method == "GET" or self.path.startswith("/api/")


# --- the API

_DEAD, _SCHEDULED, _READY = ({"jid": f"job-{name}"} for name in ("dead", "scheduled", "ready"))
_CRON = {"name": "new", "schedule": "* * * * *", "zone": "UTC", "jobtype": add.jobtype, "args": [1, 2]}
_KEYS = {
    "jobs": _DEAD,
    "queues": {"name": "default"},
    "workers": {"wid": "w1"},
    "batches": {"bid": "b-1"},
    "cron": {"name": "nightly"},
    "limits": {"id": ROW},
    "locks": {"token": ROW},
}
_VIEWS = {
    "jobs": "view_job",
    "queues": "view_queue",
    "workers": "view_workerprocess",
    "batches": "view_batch",
    "cron": "view_cronentry",
    "limits": "view_limit",
    "locks": "view_joblock",
    "statistics": "view_statistics",
    "alarms": "view_statistics",
}
_ACTIONS = {
    "jobs create": ("add_job", {"task": add.jobtype, "args": [1, 2]}),
    "jobs partial_update": ("change_job", {"queue": "low"}),
    "jobs retry": ("retry_job", {}),
    "jobs requeue": ("requeue_job", {}),
    "jobs restart": ("restart_job", {}),
    "jobs kill": ("kill_job", {}),
    "jobs discard": ("discard_job", {}),
    "jobs prune": ("prune_job", {}),
    "jobs cancel": ("cancel_job", {}),
    "jobs signal": ("signal_job", {"name": "approved"}),
    "jobs bulk_retry": ("retry_job", {"query": "dead"}),
    "jobs bulk_requeue": ("requeue_job", {"query": "scheduled"}),
    "jobs bulk_restart": ("restart_job", {"query": "scheduled"}),
    "jobs bulk_cancel": ("cancel_job", {"query": "enqueued"}),
    "jobs bulk_kill": ("kill_job", {"query": "enqueued"}),
    "jobs bulk_discard": ("discard_job", {"query": "enqueued"}),
    "jobs bulk_prune": ("prune_job", {"query": "dead"}),
    "queues pause": ("pause_queue", {}),
    "queues resume": ("resume_queue", {}),
    "queues clear": ("clear_queue", {}),
    "workers quiet": ("quiet_workerprocess", {}),
    "workers terminate": ("terminate_workerprocess", {}),
    "batches members": ("view_job", None),
    "batches children": ("view_batch", None),
    "batches tree": ("view_batch", None),
    "batches retry": ("retry_batch", {}),
    "cron create": ("add_cronentry", _CRON),
    "cron partial_update": ("change_cronentry", {"schedule": "1 2 * * *"}),
    "cron destroy": ("delete_cronentry", None),
    "cron pause": ("pause_cronentry", {}),
    "cron resume": ("resume_cronentry", {}),
    "cron run": ("run_cronentry", {}),
    "limits create": ("add_limit", {"scope": "task", "name": "other", "concurrency": 2}),
    "limits update": ("change_limit", {"concurrency": 3}),
    "limits destroy": ("delete_limit", None),
    "limits pause": ("pause_limit", {"tasks": ["other"]}),
    "limits resume": ("resume_limit", {"tasks": ["paused"]}),
    "locks release": ("release_joblock", {}),
}
"""Permissions of each viewset action, and a body that changes something. Lists and rows need the view permission."""

_OTHER_KEYS = {
    "jobs kill": _READY,
    "jobs requeue": _SCHEDULED,
    "jobs restart": _SCHEDULED,
    "jobs discard": _READY,
    "jobs cancel": _READY,
    "cron resume": {"name": "paused"},
}
_FILTERS = {
    "query": "text:seen-job-args",
    "state": "dead",
    "queue": "default",
    "task": "seen-job-task",
    "error": "Seen",
    "about": "shop.order/seen-job-about",
    "batch": "b-1",
    "older": "1s",
    "newer": "9999d",
    "failed_after": "9999d",
    "failed_before": "1s",
    "name": "nightly",
    "is_paused": "true",
    "hostname": "seen-host",
    "stage": "failing",
    "parent": "b-1",
    "origin": "admin",
    "jobtype": "elsewhere",
    "scope": "task",
    "key": "seen-lock-key",
    "worker": "w1",
}


RESOURCES = sorted(basename for _, _, basename in api_urls.router.registry)


def operations():
    """Return one request for each method of each route of the API."""
    return [_operation(*one) for resource in RESOURCES for one in _routes(resource)]


def api_requests():
    """Yield every request to the API."""
    yield Request("api root", "GET", reverse("faktory-api:api-root"), frozenset())
    yield Request("api schema", "GET", reverse("faktory-api:schema") + "?format=json", frozenset())
    for resource in RESOURCES:
        yield from api_requests_of(resource)


def _routes(resource):
    """Yield pattern, method and action of each route of a resource."""
    for pattern in api_urls.router.urls:
        actions = getattr(pattern.callback, "actions", None)
        if actions is None:
            assert pattern.name == "api-root"
        elif pattern.callback.initkwargs["basename"] == resource:
            for method, action in list(actions.items()):
                if method != "head":  # the framework adds HEAD with the first request
                    yield pattern, method.upper(), action


def api_requests_of(resource):
    """Yield each method of each route of a resource, and each filter of its list."""
    for route in _routes(resource):
        yield from _of_action(*route)
    if resource == "jobs":
        yield from _bulk_requests()


def _bulk_requests():
    """Yield bulk actions with an answer that would reveal something about the jobs."""
    for verb in ("retry", "requeue", "restart", "cancel", "kill", "discard", "prune"):
        path = reverse(f"faktory-api:jobs-bulk-{verb}")
        for body in ({"query": "dead", "dry_run": True}, *({"query": query} for query in _HIDDEN_QUERIES)):
            needs = frozenset({"view_job", f"{verb}_job"})
            yield Request(f"api jobs bulk_{verb} {body}", "POST", path, needs, _json(body))


_HIDDEN_QUERIES = (
    'dead args:["seen-job-args"]', "dead text:seen-job-args", "dead message:seen", "dead error:Seen",
    "dead about:shop.order/seen-job-about",
)  # fmt: skip


def _operation(pattern, method, action):
    basename = pattern.callback.initkwargs["basename"]
    name = f"{basename} {action}"
    is_row = pattern.callback.initkwargs["detail"]
    keys = _OTHER_KEYS.get(name, _KEYS.get(basename)) if is_row else {}
    path = reverse(f"faktory-api:{pattern.name}", kwargs=keys)
    needed, body = (_VIEWS[basename], None) if action in ("list", "retrieve") else _ACTIONS[name]
    sent = {} if body is None else _json(body)
    prepare = (lambda: Queue.objects.update(paused_at=T0)) if name == "queues resume" else None
    return Request(f"api {name}", method, path, frozenset({needed}), sent, method != "GET", prepare)


def _of_action(pattern, method, action):
    plain = _operation(pattern, method, action)
    yield plain
    html = {**plain.sent, "headers": {"accept": "text/html"}}
    yield replace(plain, name=f"{plain.name} html", sent=html, is_variant=True)
    if action in ("list", "retrieve"):
        yield replace(plain, name=f"{plain.name} options", method="OPTIONS", is_variant=True)
    if action == "list":
        for parameter in getattr(getattr(pattern.callback.cls, "filterset_class", None), "base_filters", ()):
            value = "running" if plain.name == "api workers list" and parameter == "state" else _FILTERS[parameter]
            asked = f"{plain.path}?{urlencode({parameter: value})}"
            yield replace(plain, name=f"{plain.name} {parameter}", path=asked, is_variant=True)


def _json(body):
    return {"data": json.dumps(body), "content_type": "application/json"}


# --- the admin

ROWS = {
    "overview": "default", "job": ROW, "queue": "default", "workerprocess": "w1", "batch": ROW, "cronentry": ROW,
    "joblock": ROW, "limit": ROW, "outboxentry": ROW, "gearmonkeyfunction": "default",
}  # fmt: skip
MODELS = sorted(ROWS)
_CRON_FORM = {
    "name": "another", "schedule": "0 2 * * *", "zone": "UTC", "jobtype": "elsewhere", "queue": "", "args": "[]",
    "kwargs": "{}", "job": "{}", "missed": "once", "window_s": "60", "overlap": "allow",
}  # fmt: skip
_KIND = "error=Seen&task=seen-job-task&at=seen-job-message"
_STAYS = {"post": "yes", "confirmed": "yes"}
_FORMS = {
    "cronentry add": ("add_cronentry", _CRON_FORM),
    "cronentry change": ("view_cronentry change_cronentry", _CRON_FORM),
    "cronentry delete": ("view_cronentry delete_cronentry", _STAYS),
    "limit add": ("add_limit", {"scope": "queue", "name": "mail", "concurrency": "3"}),
    "limit change": ("view_limit change_limit", {"concurrency": "4"}),
    "limit delete": ("view_limit delete_limit", _STAYS),
    "outboxentry delete": ("view_outboxentry delete_outboxentry", _STAYS),
}
"""Django's pages with a form that changes something; other models have none, or their pages are read-only."""

_JOB_OF = {"retry": ROW, "requeue": ROW + 1, "restart": ROW, "prune": ROW}
_PAGES = {
    "overview_part": ("view_statistics", {}, ""),
    "tasks": ("view_statistics view_job", {}, ""),
    "task": ("view_statistics view_job", {}, "?task=seen-job-task&period=30d"),
    "job_errors": ("view_job", {}, ""),
    "job_error": ("view_job", {}, f"?{_KIND}"),
    "job_tried": ("view_job", {}, f"?{_KIND}&tried={ROW}"),
}
_ADMIN_ACTIONS = {
    "queue": {"pause": "pause_queue", "resume": "resume_queue", "clear": "clear_queue"},
    "workerprocess": {"quiet": "quiet_workerprocess", "terminate": "terminate_workerprocess"},
    "batch": {"retry_failed": "retry_batch"},
    "cronentry": {"pause": "pause_cronentry", "resume": "resume_cronentry", "run_now": "run_cronentry"},
    "joblock": {"release": "release_joblock"},
    "limit": {
        "pause": "pause_limit", "resume": "resume_limit", "as_in_code": "change_limit",
        "delete_selected": "delete_limit",
    },
    "outboxentry": {"try_again": "retry_outboxentry", "delete_selected": "delete_outboxentry"},
    "job": {name: f"{name}_job" for name in Verb},
}  # fmt: skip
_NEEDED = {name: "clear_queue" if name == CLEAR else f"{name}_job" for name in JOB_ACTIONS}


def registered():
    """Return the admin classes of this app, by the name of their model."""
    found = {model._meta.model_name: one for model, one in admin.site._registry.items() if model._meta.app_label == APP}
    assert set(found) == set(ROWS)
    return found


def admin_requests():
    """Yield every request to the admin."""
    for model in MODELS:
        yield from admin_requests_of(model)
    yield from pages_of_the_site()


def pages_of_the_site():
    """Yield the two pages that list the app's models, and the page of a second row that contains another text."""
    yield Request("admin index", "GET", reverse("admin:index"), frozenset())
    another = _at("cronentry", "change", ROW + 1)
    yield Request("cronentry change of another", "GET", another, frozenset({"view_cronentry"}))
    yield Request("admin app_list", "GET", reverse("admin:app_list", args=[APP]), NO_USER, is_a_list_of_pages=True)


def admin_requests_of(model):
    """Yield each page, each form and each action of each page."""
    site = registered()[model]
    for pattern in site.get_urls():
        if pattern.name:
            yield from _of_page(model, site, pattern.name.removeprefix(f"{APP}_"))
    yield from _actions(model, site)


def _of_page(model, site, name):
    page = name.removeprefix(f"{model}_")
    view = frozenset({"view_statistics" if model == "overview" else f"view_{model}"})
    if page in ("changelist", "change", "history", "add", "delete"):
        args = [] if page in ("changelist", "add") else [ROWS[model]]
        yield from _of_django(model, page, _at(model, page, *args), view)
    elif page == "download":
        for column, one in site.long_texts.items():
            needs = view | ({"view_job"} if one.field else set())
            yield Request(f"{model} download {column}", "GET", _at(model, page, ROWS[model], column), needs)
    elif name in _PAGES:
        needed, _, query = _PAGES[name]
        path = reverse(f"admin:{APP}_{name}") + query
        yield Request(name, "GET", path, frozenset(needed.split()))
        yield Request(f"{name} POST", "POST", path, NO_USER, _form({}))
    elif page == "act":
        yield from _buttons(model, site)
    else:
        yield from {"try": _try, "edit": _edit, "run": _run, "part": _part, "all": _all, "all_step": _step,
            "task_pause": _task_pause, "signal": _signal}[page]()  # fmt: skip


def _part():
    path = _at("job", "part", ROW)
    yield Request("job part", "GET", path, frozenset({"view_job"}))
    yield Request("job part POST", "POST", path, NO_USER, _form({}))


def _task_pause():
    path = reverse(f"admin:{APP}_task_pause")
    yield Request("task pause GET", "GET", path, frozenset())
    for verb, task in (("pause", "other"), ("resume", "paused")):
        form = _form({"task": task, "verb": verb, "why": "because"})
        yield Request(f"task {verb}", "POST", path, frozenset({f"{verb}_limit"}), form, is_act=True)


def _of_django(model, page, path, view):
    name = f"{model} {page}"
    needed, form = _FORMS.get(name, (None, None))
    if page in ("add", "delete"):
        yield Request(name, "GET", path, frozenset(needed.split()) if needed else NO_USER)
    else:
        yield Request(name, "GET", path, view)
    if needed:
        yield Request(f"{name} POST", "POST", path, frozenset(needed.split()), _form(form), is_act=True)
    else:
        yield Request(f"{name} POST", "POST", path, NO_USER, _form(_CRON_FORM | _STAYS))


def _buttons(model, site):
    acts = [*Verb] if model == "job" else list(site.object_actions)
    for name in acts:
        needs = frozenset({f"view_{model}", _ADMIN_ACTIONS[model][name]})
        path = _at(model, "act", _pk(model, name), name)
        yield Request(f"{model} act {name} GET", "GET", path, frozenset())  # leads back to the row
        yield Request(f"{model} act {name}", "POST", path, needs, _form({"confirmed": "yes", "why": "because"}), True)
        if model == "job" and JOB_ACTIONS[name].warning:
            yield Request(f"{model} act {name} unconfirmed", "POST", path, needs, _form({}))


def _actions(model, site):
    names = [one for one in site.actions if isinstance(one, str)]
    if site.has_delete_permission is not None and "delete_selected" in _ADMIN_ACTIONS.get(model, {}):
        names.append("delete_selected")
    for name in names:
        view = f"view_{model}"
        needs = frozenset({view, _ADMIN_ACTIONS[model][name]})
        form = {"action": name, "_selected_action": [_pk(model, name)], **_STAYS}
        is_act = (model, name) != ("queue", "clear")  # it leads to the bulk page for all matching jobs
        prepare = (lambda: Queue.objects.update(paused_at=T0)) if (model, name) == ("queue", "resume") else None
        path = _at(model, "changelist")
        yield Request(f"{model}: {name}", "POST", path, needs, _form(form), is_act, prepare, form=form)


def _try():
    path = _at("job", "try", ROW)
    yield Request("job try GET", "GET", path, frozenset())
    yield Request("job try", "POST", path, frozenset({"view_job", "retry_job"}), _form({}), is_act=True)


def _signal():
    path, needs = _at("job", "signal", ROW), frozenset({"view_job", "signal_job"})
    yield Request("job signal form", "GET", path, needs)
    yield Request("job signal", "POST", path, needs, _form({"name": "approved"}), is_act=True)


def _edit():
    path, needs = _at("job", "edit", ROW), frozenset({"view_job", "change_job"})
    yield Request("job edit GET", "GET", path, needs)
    yield Request("job edit", "POST", path, needs, _form({"args": "[1]", "kwargs": "{}"}), is_act=True)

    # A job of a known task has a form with a field for each parameter.
    path = _at("job", "edit", ROW + 4)
    yield Request("job edit of a known task GET", "GET", path, needs)
    form = _form({"arg-args": "[1]", "arg-kwargs": "{}"})
    yield Request("job edit of a known task", "POST", path, needs, form, is_act=True)


def _run():
    needs = frozenset({"add_job"})
    yield Request("job run without a task GET", "GET", _at("job", "run"), needs)
    path = f"{_at('job', 'run')}?task={add.jobtype}"
    yield Request("job run GET", "GET", path, needs)
    yield Request("job run", "POST", path, needs, _form({"arg-a": "1", "arg-b": "2"}), is_act=True)


def _all():
    for name in JOB_ACTIONS:
        path = f"{_at('job', 'all')}?verb={name}&state={min(JOB_ACTIONS[name].states)}"
        needs = frozenset({"view_job", _NEEDED[name]})
        yield Request(f"job all {name} GET", "GET", path, needs)
        yield Request(f"job all {name}", "POST", path, needs, _form({}))


def _step():
    yield Request("job all step GET", "GET", _at("job", "all_step"), frozenset())
    yield Request("job all step", "POST", _at("job", "all_step"), NO_USER, _form({"run": "forged"}))


def _pk(model, act):
    if model == "job":
        return _JOB_OF.get(act, ROW + 2)
    if act == "resume" and model in ("cronentry", "limit"):
        return ROW + 1
    return ROWS[model]


def _at(model, page, *args):
    return reverse(f"admin:{APP}_{model}_{page}", args=args)


def _form(data):
    return {"data": encode_multipart(BOUNDARY, data), "content_type": MULTIPART_CONTENT}


def filters_of(context, model):
    """Yield a request for the first choice of each filter of a change list that a user received."""
    shown = context["cl"]
    for one in shown.filter_specs:
        choices = [choice for choice in one.choices(shown) if not choice["selected"]]
        for choice in choices[:1]:
            path = list_of(model).path + choice["query_string"]
            yield Request(f"{model} filter {choice['query_string']}", "GET", path, frozenset({f"view_{model}"}))


def codenames():
    """Return every permission of this app."""
    from django.contrib.auth.models import Permission  # not used before tables exist

    return frozenset(Permission.objects.filter(content_type__app_label=APP).values_list("codename", flat=True))


def lists():
    """Return the pages that list rows, by the name of their model."""
    return {model: one for model, one in registered().items() if model not in ("overview", "gearmonkeyfunction")}


def list_of(model):
    """Return the request for a list."""
    return Request(f"{model} changelist", "GET", _at(model, "changelist"), frozenset({f"view_{model}"}))
