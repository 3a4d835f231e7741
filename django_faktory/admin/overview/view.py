"""The overview page, which reloads its data while it is visible."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext

from ... import conf
from ...models.permissions import may, may_see
from ..links import page_url
from . import data
from .tasks import TaskViews

# Numbers are shared by all pages of a process for at least a second, so that open pages do not add up (ADR 0031).
REFRESHED_EVERY_S = 5


class OverviewAdmin(TaskViews):
    """Admin of the overview page, its reloaded part, and the pages of tasks."""

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may see the overview, and with it the entry in the admin index."""
        return self.has_view_permission(request)

    views: ClassVar = {"part/": ("_part", "overview_part")}

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Render the whole page; it is complete without JavaScript."""
        return self._render(request, "overview", **(extra_context or {}))

    def _part(self, request: HttpRequest) -> HttpResponse:
        # Shared, because many users may watch; the page itself shows the results of their own actions at once.
        return self._render(request, "overview_body", is_shared=True, shows_navigation=False)

    def _render(self, request: HttpRequest, template: str, *, is_shared: bool = False, **context: Any) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        user = request.user
        overview = data.read(
            partial(may_see, user, "overview"), partial(may, user), using=conf.get("DATABASE"), is_shared=is_shared
        )
        return self.page(
            request,
            template,
            title=gettext("Overview"),
            overview=overview,
            every_s=REFRESHED_EVERY_S,
            part_url=page_url("overview_part"),
            errors_url=page_url("job_errors"),
            failed_jobs_read=data.FAILED_JOBS_READ,
            **context,
        )
