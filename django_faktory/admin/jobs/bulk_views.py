"""Admin views for an action on all jobs that match a filter: confirmation and progress.

Each request does a part. The state of a run is stored in the page's form, signed, and nowhere on the server: the run
stops when the page is closed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.core.signing import BadSignature
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils.translation import gettext, ngettext
from msgspec import structs

from ... import conf
from ...core.lifecycle import State
from ...core.payloads import is_storable
from ...core.queries import Pattern, Query
from ...errors import InvalidQuery
from ...models import Job
from ...models.job import RECENT
from ...operations import bulk, error_groups, searches
from ...operations.bulk import Run
from ...operations.error_groups import FailureKind
from ...operations.job_actions import JOB_ACTIONS, Verb
from ..base import ReadOnlyAdmin
from ..formats import error_text, format_duration, format_number
from ..history import get_reason, in_english, log_action
from ..links import page_url
from ..lists import LowerBound, format_capped

MAX_WORK_S = 1.0
"""Seconds of work per request; after that the page is rendered, and its next request continues."""
COUNTED = 10_000
PACES = (10, 60, 600, 6000)
"""Retries per minute that the page offers."""


class BulkViews(ReadOnlyAdmin):
    """Mixin for the admin of jobs that adds the pages of a bulk run."""

    views: ClassVar = {"all/": ("_confirm", "job_all"), "all/step/": ("_step", "job_all_step")}

    def _confirm(self, request: HttpRequest) -> HttpResponse:
        """Show the number of matching jobs on GET; begin the run on POST."""
        verb = request.GET.get("verb", "")
        action = JOB_ACTIONS.get(verb)
        if action is None and request.method == "GET":
            return self.answer_get(request, self._list_url(request.GET))
        if action is None or not action.is_allowed(request.user) or not self.has_view_permission(request):
            raise PermissionDenied
        using = conf.get("DATABASE")
        try:
            # Only retries can be spread over time.
            pace = _read_pace_s(request) if verb == Verb.RETRY and request.method == "POST" else 0.0
            run = bulk.begin(verb, **_parse_scope(request.GET), every_s=pace, using=using)
            total = count_jobs(run, using=using)
        except InvalidQuery as error:
            self.message_user(request, error_text(error), messages.ERROR)
            return HttpResponseRedirect(self._list_url())
        count = format_capped(total, COUNTED)
        if request.method == "POST":
            exact = None if isinstance(total, LowerBound) else total
            run = replace(run, user=str(request.user.pk), why=get_reason(request), total=exact)
            # Of the model, not of a row: a run may change millions.
            summary = f"{in_english(action.label)}: begun for all matching jobs ({count})"
            log_action(request, [Job], summary, name=run.scope, reason=run.why)
            return self._render_progress(request, run)
        return self.page(
            request,
            "all",
            title=ngettext("%(action)s: %(number)s job?", "%(action)s: %(number)s jobs?", total)
            % {"action": action.label, "number": count},
            action=action,
            scope=run.scope,
            total=total,
            # A bound of 0 means that no recent job matches; older ones may.
            may_begin=total > 0 or isinstance(total, LowerBound),
            count=count,
            paces=_list_paces(total) if verb == Verb.RETRY else None,
            back_url=self._list_url(request.GET),
        )

    def _step(self, request: HttpRequest, *, max_work_s: float = MAX_WORK_S) -> HttpResponse:
        """Continue the run of the form for about `max_work_s` seconds and show its progress. POST only."""
        if request.method != "POST":
            return self.answer_get(request, self._list_url())
        try:
            run = bulk.load_signed(request.POST.get("run", ""), user=str(request.user.pk))
        except BadSignature:
            text = gettext(
                "This bulk action has expired or was started by another user. Start it again for the remaining jobs."
            )
            self.message_user(request, text, messages.ERROR)
            return HttpResponseRedirect(self._list_url())
        action = JOB_ACTIONS[run.verb]
        # The permission may have been withdrawn since the run began.
        if not action.is_allowed(request.user):
            raise PermissionDenied
        ends_at = time.monotonic() + max_work_s
        while not run.is_over:
            run = run.step(using=conf.get("DATABASE"))
            if time.monotonic() > ends_at:
                break
        if run.is_over:
            summary = f"{in_english(action.done_label)} {run.changed:,} of all matching jobs"
            log_action(request, [Job], summary, name=run.scope, reason=run.why)
        return self._render_progress(request, run)

    def _render_progress(self, request: HttpRequest, run: Run) -> HttpResponse:
        action = JOB_ACTIONS[run.verb]
        return self.page(
            request,
            "bulk_run",
            title=gettext("%(action)s: all matching jobs") % {"action": action.label},
            action=action,
            run=run,
            signed_run=run.sign(),
            step_url=page_url("job_all_step"),
            back_url=self._list_url(),
            error_url=f"{page_url('job_error')}?{run.kind.query}" if run.kind else "",
        )

    def _list_url(self, params: QueryDict | None = None) -> str:
        address = page_url("job_changelist")
        if params is None:
            return address
        if "error" in params:
            return page_url("job_errors")
        filters = params.copy()
        filters.pop("verb", None)
        return f"{address}?{filters.urlencode()}"


def _list_paces(total: int) -> list[tuple[int, str]]:
    """Return the paces to choose from, each with the duration of this number of retries."""
    text = gettext("%(pace)s per minute, takes %(duration)s")
    if isinstance(total, LowerBound):
        text = gettext("%(pace)s per minute, takes more than %(duration)s")
    return [
        (pace, text % {"pace": format_number(pace), "duration": format_duration(60 * total / pace)}) for pace in PACES
    ]


def _read_pace_s(request: HttpRequest) -> float:
    """Return the chosen pace as seconds between two retries; 0 for all at once."""
    try:
        per_minute = float(request.POST.get("per_minute") or 0)
    except ValueError:
        return 0.0
    # Slower than one retry in 60 minutes, and NaN, count as no pace; so does infinity, as 60 / inf is 0.
    return 60 / per_minute if per_minute >= 1 / 60 else 0.0


def _parse_scope(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scope that URL parameters ask for. Raises InvalidQuery."""
    if "error" in params and "task" in params:
        return {"kind": FailureKind(params["error"], params["task"], params.get("at", ""))}
    return {"query": build_query(params)}


def build_query(params: Mapping[str, Any], search: Query | None = None) -> Query:
    """Return the query of a list's URL: `search` combined with the filters. Raises InvalidQuery."""
    for name in ("q", "queue", "about", "bid"):
        # PostgreSQL rejects NUL in a parameter: without this the answer would be a 500.
        if not is_storable(params.get(name, "")):
            raise InvalidQuery("%(name)s: expected text without NUL, which no job has; leave it out", name=name)
    query = parse_search(params.get("q", "")) if search is None else search
    changes: dict[str, Any] = {}
    if params.get("state") in set(State):
        changes["states"] = (State(params["state"]),)
    if params.get("queue"):
        changes["queues"] = (Pattern(params["queue"]),)
    for name, field in (("about", "about"), ("bid", "batches")):
        if params.get(name):
            changes[field] = (params[name],)
    return structs.replace(query, **changes)


def parse_search(text: str) -> Query:
    """Parse the text of the search box. Raises InvalidQuery."""
    return searches.parse_search(text, using=conf.get("DATABASE"))


def count_jobs(run: Run, *, using: str, max_count: int = COUNTED) -> int:
    """Return the number of jobs in scope, or `LowerBound` if there may be more: it counts at most `max_count`.

    A query without an index counts recent jobs only.
    """
    rows = run.rows(using=using)
    if run.kind is not None:
        count = len(error_groups.ids_of_kind(rows.order_by("-pk")[: max_count + 1], run.kind))
    elif run.query.has_index:
        count = rows.count_up_to(max_count + 1)
    else:
        count = rows.recent().count_up_to(max_count + 1)
        oldest = Job.objects.order_by("pk").values_list("pk", flat=True).first() or 0
        if run.upto - oldest >= RECENT:
            return LowerBound(min(count, max_count))
    return LowerBound(max_count) if count > max_count else count
