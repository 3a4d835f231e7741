"""All that match a filter: the page that asks, and the page that tells how far it is."""

from __future__ import annotations

import math
from typing import Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.core.signing import BadSignature
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.urls import URLPattern, path, reverse

from .. import conf
from ..errors import InvalidQuery
from ..look_only import AtLeast, LookOnly, told, why
from ..models import Job
from . import sweeps, verbs
from .overview import capped
from .sweeps import Sweep


class SweepViews(LookOnly):
    """Two pages of the admin of jobs."""

    def get_urls(self) -> list[URLPattern]:
        """With theirs."""
        wrap = self.admin_site.admin_view
        return [
            path("all/", wrap(self._ask), name="django_faktory_job_all"),
            path("all/step/", wrap(self._step), name="django_faktory_job_all_step"),
            *super().get_urls(),
        ]

    def _ask(self, request: HttpRequest) -> HttpResponse:
        """GET tells how many it would be; POST begins."""
        verb = request.GET.get("verb", "")
        act = verbs.ACTS.get(verb)
        if act is None or not act.is_allowed(request) or not self.has_view_permission(request):
            raise PermissionDenied
        using = conf.get("DATABASE")
        try:
            scope = sweeps.scope_of(request.GET)
            total = scope.counted(verb, using=using)
        except InvalidQuery as error:
            self.message_user(request, str(error), messages.ERROR)
            return HttpResponseRedirect(self._list())
        count = capped(total, sweeps.COUNTED)
        if request.method == "POST":
            pace = _every_s(request) if verb == "retry" else 0.0
            begun = sweeps.begin(
                verb, scope, total=total, user=request.user.pk, why=why(request), every_s=pace, using=using
            )
            _record(request, begun, f"{act.label}: begun for all that match ({count})")
            return self._tell(request, begun)
        return self.page(
            request,
            "all",
            title=f"{act.label}: {count} job{'' if total == 1 else 's'}?",
            act=act,
            scope=scope,
            total=total,
            may_begin=total > 0 or isinstance(total, AtLeast),
            count=count,
            is_paced=verb == "retry",
            back=self._list(request.GET),
        )

    def _step(self, request: HttpRequest) -> HttpResponse:
        """A POST that goes on."""
        if request.method != "POST":
            return HttpResponseRedirect(self._list())
        try:
            sweep = sweeps.opened(request.POST.get("sweep", ""), user=request.user.pk)
        except BadSignature:
            self.message_user(
                request, "This began too long ago, or elsewhere: begin again for the rest.", messages.ERROR
            )
            return HttpResponseRedirect(self._list())
        act = verbs.ACTS[sweep.verb]
        if not act.is_allowed(request):
            raise PermissionDenied
        sweep = sweeps.go_on(sweep, using=conf.get("DATABASE"))
        if sweep.is_over:
            _record(request, sweep, f"{act.done} {sweep.changed:,} of all that match")
        return self._tell(request, sweep)

    def _tell(self, request: HttpRequest, sweep: Sweep) -> HttpResponse:
        act = verbs.ACTS[sweep.verb]
        return self.page(
            request,
            "sweep",
            title=f"{act.label}: all that match",
            act=act,
            sweep=sweep,
            sealed=sweeps.sealed(sweep),
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
    """The pace somebody chose, as seconds between two; 0 for all now."""
    try:
        per_minute = float(request.POST.get("per_minute") or 0)
    except ValueError:
        return 0.0
    return 60 / per_minute if per_minute > 0 and math.isfinite(per_minute) and per_minute >= 1 / 60 else 0.0


def _record(request: HttpRequest, sweep: Sweep, done: str) -> None:
    """One entry for all of them."""
    said: Any = f"{done}: {sweep.why}" if sweep.why else told(request, done)
    user_id: Any = request.user.pk
    LogEntry.objects.create(
        user_id=user_id,
        content_type=ContentType.objects.get_for_model(Job),
        object_id=None,
        object_repr=str(sweep.scope)[:200],
        action_flag=CHANGE,
        change_message=said,
    )
