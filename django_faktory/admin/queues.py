"""Admin of queues: size, latency and limit; pause, resume, clear."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, gettext_noop, ngettext, pgettext
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..core.lifecycle import State
from ..core.limits import Scope
from ..models import Limit, Queue
from ..models.permissions import may, may_see
from ..models.queue import QueueQuerySet
from ..operations import bulk, timings, waiting
from ..store.statistics import counts
from .base import ReadOnlyAdmin, requires_permission
from .formats import StrOrPromise, column, format_age, format_number
from .history import get_reason, log_action
from .links import jobs_link, page_url
from .overview.data import build_queue_lines
from .overview.tasks import build_charts, build_line, build_period_tabs, read_period, task_link


def _render_depth(queue: Any) -> SafeString:
    return format_html('<a href="{}">{}</a>', jobs_link(queue=queue.name, state="enqueued"), queue.line.depth)


class QueueAdmin(ReadOnlyAdmin):
    """Admin of queues that have been used at least once."""

    change_form_template = "admin/django_faktory/queue.html"
    # A limit has a permission of its own (ADR 0034).
    restricted_fields: ClassVar = {"limit": "limit"}
    list_display = ("name", "depth", "latency", "limit", "state")
    search_fields = ("name",)
    ordering = ("name",)
    list_per_page = 50
    sortable_by = ("name",)
    actions = ("pause", "resume", "clear")

    has_pause_permission = requires_permission("queue.pause")
    has_resume_permission = requires_permission("queue.resume")
    has_clear_permission = requires_permission("queue.clear")

    def attach(self, request: HttpRequest, rows: list[Any]) -> None:  # noqa: ARG002
        """Add its sizes and its limit to each queue."""
        found = Limit.objects.filter(scope=Scope.QUEUE, name__in=[row.name for row in rows])
        limits = {limit.name: limit for limit in found}
        using = conf.get("DATABASE")
        all_counts = counts.read(using=using)
        lines = build_queue_lines([row.name for row in rows], all_counts, using=using)
        for row, line in zip(rows, lines, strict=True):
            row.line, row.limit = line, limits.get(row.name)
            row.running = all_counts.in_queue(row.name, State.WORKING)

    # Blocked jobs included.
    depth = column(_render_depth, _("waiting"))
    latency = column(attrgetter("line.latency"), _("latency"))
    limit = column(lambda queue: queue.limit.localized_allowance if queue.limit else "–", _("limit"))

    @admin.display(description=_("state"))
    def state(self, queue: Queue) -> str:
        """Return whether the queue is active or paused, and for how long it has been paused."""
        if queue.paused_at is None:
            return pgettext("state of a queue", "active")
        text = gettext("paused for %(age)s") % {"age": format_age(queue.paused_at)}
        return format_html('<span class="faktory-warn">{}</span>', text)

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Render the queue's page: numbers, a chart and the actions."""
        queue = kwargs.get("obj")
        if queue is not None:
            self.attach(request, [queue])
            context |= {
                "line": queue.line,
                "limit": queue.limit,
                "running": format_number(queue.running),
                "service": waiting.read_service(queue.name, using=conf.get("DATABASE")),
                "sees_workers": may_see(request.user, "workerprocess"),
                "may_see_limits": may_see(request.user, "queue", "limit"),
                "may_set_limits": may(request.user, "limit.add"),
                **self._build_timings(request, queue),
                "jobs": jobs_link(queue=queue.name),
                "queue_actions": self._possible_actions(request, queue),
            }
        return super().render_change_form(request, context, *args, **kwargs)

    def _build_timings(self, request: HttpRequest, queue: Queue) -> dict[str, Any]:
        """Return charts of the queue's jobs, and their timings by task."""
        using, period = conf.get("DATABASE"), read_period(request)
        history = timings.read_history(queue.name, timings.QUEUE, period, using=using)
        sees_tasks = may_see(request.user, "job")
        by_task = timings.read_tasks_of_queue(queue.name, period, using=using) if sees_tasks else []
        return {
            "period": period,
            "periods": build_period_tabs(period),
            "charts": build_charts(
                history, period, using=using, may_see_workers=may_see(request.user, "workerprocess")
            ),
            "total": build_line(timings.build_total(queue.name, history, period), ""),
            "tasks": [build_line(one, task_link(one.name, period.name)) for one in by_task],
        }

    def _possible_actions(self, request: HttpRequest, queue: Queue) -> list[tuple[str, StrOrPromise, bool]]:
        buttons: list[tuple[str, StrOrPromise, bool]] = []
        if queue.paused_at is None and self.has_pause_permission(request):
            buttons.append(("pause", _("Pause"), False))
        if queue.paused_at is not None and self.has_resume_permission(request):
            buttons.append(("resume", _("Resume"), False))
        if self.has_clear_permission(request):
            buttons.append(("clear", _("Clear"), True))
        return buttons

    @admin.action(description=_("Pause queues"), permissions=["pause"])
    def pause(self, request: HttpRequest, queryset: QuerySet[Queue]) -> None:
        """Pause the queues; running jobs continue, pushed jobs wait."""
        pause = partial(bulk.pause, by=request.user.get_username(), reason=get_reason(request))
        self._apply(request, queryset, pause, gettext_noop("Paused"), is_pause=True)

    @admin.action(description=_("Resume queues"), permissions=["resume"])
    def resume(self, request: HttpRequest, queryset: QuerySet[Queue]) -> None:
        """Resume the queues; workers are notified at once."""
        self._apply(request, queryset, bulk.resume, gettext_noop("Resumed"), is_pause=False)

    @admin.action(description=_("Clear: discard all waiting jobs"), permissions=["clear"])
    def clear(self, request: HttpRequest, queryset: QuerySet[Queue]) -> HttpResponse | None:
        """Redirect to the page that asks for confirmation and discards the waiting jobs of one queue in steps.

        The queue and its pause stay.
        """
        # Two names suffice to notice that several queues are selected.
        names = list(queryset.values_list("name", flat=True)[:2])
        if len(names) != 1:
            self.message_user(request, gettext("Clear one queue at a time."), messages.WARNING)
            return None
        # In steps, because one request could not discard a queue of millions.
        return HttpResponseRedirect(page_url("job_all", queue=names[0], verb="clear"))

    def _apply(
        self,
        request: HttpRequest,
        queryset: QuerySet[Queue],
        change: Callable[[QueueQuerySet], int],
        summary: str,
        *,
        is_pause: bool,
    ) -> None:
        rows = list(queryset)
        # Exactly the rows that are logged: a second evaluation of `queryset` could match others.
        queues = Queue.objects.filter(pk__in=[row.pk for row in rows])
        changed = change(queues)
        if changed:  # else another user was faster
            log_action(request, [row for row in rows if (row.paused_at is None) == is_pause], summary)
        message = ngettext("%(done)s: %(number)s queue.", "%(done)s: %(number)s queues.", changed)
        message %= {"done": gettext(summary), "number": format_number(changed)}
        skipped = gettext("%(number)s skipped: already active.")
        if is_pause:
            skipped = gettext("%(number)s skipped: already paused.")
        self.report(request, message, len(rows) - changed, skipped)
