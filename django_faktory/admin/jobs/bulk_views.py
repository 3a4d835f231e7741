"""Admin views for an action on all jobs that match a filter: confirmation and progress."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.core.signing import BadSignature
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.urls import URLPattern, path
from django.utils.translation import gettext, ngettext

from ... import conf
from ...errors import InvalidQuery
from ...models import Job
from ...operations.error_groups import FailureKind
from ..base import LowerBound, ReadOnlyAdmin, format_capped
from ..formats import error_text, format_duration, format_number
from ..history import describe_action, get_reason, in_english
from ..links import page_url
from . import actions, bulk
from .bulk import BulkRun

PACES = (10, 60, 600, 6000)
"""Retries per minute that the page offers."""


class BulkViews(ReadOnlyAdmin):
    """Mixin for the admin of jobs that adds the pages of a bulk run."""

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs, those of the bulk run first."""
        wrap = self.admin_site.admin_view
        return [
            path("all/", wrap(self._confirm), name="django_faktory_job_all"),
            path("all/step/", wrap(self._step), name="django_faktory_job_all_step"),
            *super().get_urls(),
        ]

    def _confirm(self, request: HttpRequest) -> HttpResponse:
        """Show the number of matching jobs on GET; begin the run on POST."""
        verb = request.GET.get("verb", "")
        action = actions.ACTIONS.get(verb)
        if action is None and request.method == "GET":
            return self.answer_get(request, self._list_url(request.GET))
        if action is None or not action.is_allowed(request) or not self.has_view_permission(request):
            raise PermissionDenied
        using = conf.get("DATABASE")
        try:
            scope = bulk.parse_scope(request.GET)
            total = scope.count_jobs(verb, using=using)
        except InvalidQuery as error:
            self.message_user(request, error_text(error), messages.ERROR)
            return HttpResponseRedirect(self._list_url())
        count = format_capped(total, bulk.COUNTED)
        if request.method == "POST":
            # Only retries can be spread over time.
            pace = _read_pace_s(request) if verb == "retry" else 0.0
            run = bulk.begin(
                verb, scope, total=total, user=request.user.pk, reason=get_reason(request), every_s=pace, using=using
            )
            _log_run(request, run, f"{in_english(action.label)}: begun for all matching jobs ({count})")
            return self._render_progress(request, run)
        return self.page(
            request,
            "all",
            title=ngettext("%(action)s: %(number)s job?", "%(action)s: %(number)s jobs?", total)
            % {"action": action.label, "number": count},
            action=action,
            scope=scope,
            total=total,
            # A bound of 0 means that no recent job matches; older ones may.
            may_begin=total > 0 or isinstance(total, LowerBound),
            count=count,
            paces=_list_paces(total) if verb == "retry" else None,
            back_url=self._list_url(request.GET),
        )

    def _step(self, request: HttpRequest, *, max_work_s: float = bulk.MAX_WORK_S) -> HttpResponse:
        """Continue the run of the form for about `max_work_s` seconds and show its progress. POST only."""
        if request.method != "POST":
            return self.answer_get(request, self._list_url())
        try:
            run = bulk.load_signed(request.POST.get("run", ""), user=request.user.pk)
        except BadSignature:
            text = gettext(
                "This bulk action has expired or was started by another user. Start it again for the remaining jobs."
            )
            self.message_user(request, text, messages.ERROR)
            return HttpResponseRedirect(self._list_url())
        action = actions.ACTIONS[run.verb]
        # The permission may have been withdrawn since the run began.
        if not action.is_allowed(request):
            raise PermissionDenied
        run = bulk.run_steps(run, using=conf.get("DATABASE"), max_work_s=max_work_s)
        if run.is_over:
            _log_run(request, run, f"{in_english(action.done_label)} {run.changed:,} of all matching jobs")
        return self._render_progress(request, run)

    def _render_progress(self, request: HttpRequest, run: BulkRun) -> HttpResponse:
        action = actions.ACTIONS[run.verb]
        return self.page(
            request,
            "bulk_run",
            title=gettext("%(action)s: all matching jobs") % {"action": action.label},
            action=action,
            run=run,
            signed_run=bulk.dump_signed(run),
            step_url=page_url("job_all_step"),
            back_url=self._list_url(),
            last_retry_at=datetime.fromtimestamp(run.first_at + run.every_s * max(run.placed - 1, 0), UTC),
            error_url=f"{page_url('job_error')}?{FailureKind(*run.kind).query}" if run.kind else "",
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


def _log_run(request: HttpRequest, run: BulkRun, summary: str) -> None:
    """Write one admin log entry for all jobs of the run."""
    # The form of a later step has no field for the reason: use the one given at the beginning.
    message: Any = f"{summary}: {run.why}" if run.why else describe_action(request, summary)
    user_id: Any = request.user.pk
    LogEntry.objects.create(
        user_id=user_id,
        # Of the model, not of a row: a run may change millions.
        content_type=ContentType.objects.get_for_model(Job),
        object_id=None,
        object_repr=str(run.scope)[:200],
        action_flag=CHANGE,
        change_message=message,
    )
