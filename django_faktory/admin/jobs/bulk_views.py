"""Admin views for an action on all jobs that match a filter: confirmation and progress."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.core.signing import BadSignature
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.urls import URLPattern, path, reverse

from ... import conf
from ...errors import InvalidQuery
from ...models import Job
from ..base import LowerBound, ReadOnlyAdmin, capped, describe_action, why
from . import actions, bulk
from .bulk import BulkRun


class BulkViews(ReadOnlyAdmin):
    """Mixin for the admin of jobs that adds the pages of a sweep."""

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs, those of the sweep pages first."""
        wrap = self.admin_site.admin_view
        return [
            path("all/", wrap(self._ask), name="django_faktory_job_all"),
            path("all/step/", wrap(self._step), name="django_faktory_job_all_step"),
            *super().get_urls(),
        ]

    def _ask(self, request: HttpRequest) -> HttpResponse:
        """Show the number of matching jobs on GET; begin the sweep on POST."""
        verb = request.GET.get("verb", "")
        act = actions.ACTS.get(verb)
        if act is None or not act.is_allowed(request) or not self.has_view_permission(request):
            raise PermissionDenied
        using = conf.get("DATABASE")
        try:
            scope = bulk.parse_scope(request.GET)
            total = scope.counted(verb, using=using)
        except InvalidQuery as error:
            self.message_user(request, str(error), messages.ERROR)
            return HttpResponseRedirect(self._list())
        count = capped(total, bulk.COUNTED)
        if request.method == "POST":
            # Only retries can be spread over time.
            pace = _every_s(request) if verb == "retry" else 0.0
            begun = bulk.begin(
                verb, scope, total=total, user=request.user.pk, why=why(request), every_s=pace, using=using
            )
            _record(request, begun, f"{act.label}: begun for all that match ({count})")
            return self._render_progress(request, begun)
        return self.page(
            request,
            "all",
            title=f"{act.label}: {count} job{'' if total == 1 else 's'}?",
            act=act,
            scope=scope,
            total=total,
            may_begin=total > 0 or isinstance(total, LowerBound),
            count=count,
            is_paced=verb == "retry",
            back=self._list(request.GET),
        )

    def _step(self, request: HttpRequest) -> HttpResponse:
        """Continue the sweep of the form for about a second and show its progress. POST only."""
        if request.method != "POST":
            # A GET changes nothing; a browser sends one when the address is opened again.
            return HttpResponseRedirect(self._list())
        try:
            sweep = bulk.load_signed(request.POST.get("sweep", ""), user=request.user.pk)
        except BadSignature:
            self.message_user(
                request, "This began too long ago, or elsewhere: begin again for the rest.", messages.ERROR
            )
            return HttpResponseRedirect(self._list())
        act = actions.ACTS[sweep.verb]
        # The permission may have been withdrawn since the sweep began.
        if not act.is_allowed(request):
            raise PermissionDenied
        sweep = bulk.run_steps(sweep, using=conf.get("DATABASE"))
        if sweep.is_over:
            _record(request, sweep, f"{act.done} {sweep.changed:,} of all that match")
        return self._render_progress(request, sweep)

    def _render_progress(self, request: HttpRequest, sweep: BulkRun) -> HttpResponse:
        act = actions.ACTS[sweep.verb]
        return self.page(
            request,
            "sweep",
            title=f"{act.label}: all that match",
            act=act,
            sweep=sweep,
            sealed=bulk.sealed(sweep),
            step=reverse("admin:django_faktory_job_all_step"),
            back=self._list(),
        )

    def _list(self, params: QueryDict | None = None) -> str:
        address = reverse("admin:django_faktory_job_changelist")
        if params is None or "error" in params:
            return reverse("admin:django_faktory_job_errors") if params else address
        kept = params.copy()
        kept.pop("verb", None)
        return f"{address}?{kept.urlencode()}"


def _every_s(request: HttpRequest) -> float:
    """Return the chosen pace as seconds between two retries; 0 for all at once."""
    try:
        per_minute = float(request.POST.get("per_minute") or 0)
    except ValueError:
        return 0.0
    # Slower than one retry in 60 minutes, and NaN, count as no pace; so does infinity, as 60 / inf is 0.
    return 60 / per_minute if per_minute >= 1 / 60 else 0.0


def _record(request: HttpRequest, sweep: BulkRun, done: str) -> None:
    """Write one admin log entry for all jobs of the sweep."""
    # The form of a later step has no field for the reason: use the one given at the beginning.
    text: Any = f"{done}: {sweep.why}" if sweep.why else describe_action(request, done)
    user_id: Any = request.user.pk
    LogEntry.objects.create(
        user_id=user_id,
        content_type=ContentType.objects.get_for_model(Job),
        object_id=None,
        object_repr=str(sweep.scope)[:200],
        action_flag=CHANGE,
        change_message=text,
    )
