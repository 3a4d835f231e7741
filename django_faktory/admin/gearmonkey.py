"""Admin page of GearMonkey: functions, workers, queues, lost jobs and errors."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext, ngettext

from ..contrib.gearmonkey.settings import is_configured, url_of, without_password
from ..errors import FaktoryError
from ..models.proxies import GearMonkeyFunction
from .base import ReadOnlyAdmin, requires_permission
from .formats import error_text


@admin.register(GearMonkeyFunction)
class GearMonkeyAdmin(ReadOnlyAdmin):
    """A single page, shown only if a GearMonkey server is configured."""

    has_audit_permission = requires_permission("gearmonkeyfunction.audit")

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Hide the page if GearMonkey is not configured."""
        return is_configured() and super().has_module_permission(request)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the state of all functions; a POST searches for lost jobs and queues them again."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            if not self.has_audit_permission(request):
                raise PermissionDenied
            self._audit(request)
            # Otherwise a reload of the page would search again.
            return HttpResponseRedirect(request.path)
        report, problem, server = None, "", ""
        try:
            url = url_of()
            server = without_password(url)
            from ..contrib.gearmonkey.address import connect  # needs redis-py
            from ..contrib.gearmonkey.inspection import health

            report = health(connect(url))
        except (FaktoryError, ImportError) as error:
            problem = error_text(error)
        return self.page(
            request,
            "gearmonkey",
            title=gettext("GearMonkey functions"),
            server=server,
            report=report,
            problem=problem,
            may_audit=self.has_audit_permission(request),
            **(extra_context or {}),
        )

    def _audit(self, request: HttpRequest) -> None:
        try:
            from ..contrib.gearmonkey.address import connect  # needs redis-py
            from ..contrib.gearmonkey.inspection import read_served_functions
            from ..contrib.gearmonkey.redis_worker import RedisWorker

            redis = connect(url_of())
            names = [function.fn for function in read_served_functions(redis)]
            requeued = RedisWorker(redis, names, wid="admin").audit()
        except (FaktoryError, ImportError) as error:
            self.message_user(request, error_text(error), messages.ERROR)
            return
        message = ngettext(
            "%(number)s lost job is queued again. A job counts as lost after two audits, a minute apart, found it idle "
            "and in no queue.",
            "%(number)s lost jobs are queued again. A job counts as lost after two audits, a minute apart, found it "
            "idle and in no queue.",
            len(requeued),
        )
        self.message_user(request, message % {"number": len(requeued)}, messages.SUCCESS)
