"""Admin list of jobs: tabs by state, search by query language, bulk actions."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html

from ...core.lifecycle import State
from ...errors import InvalidQuery
from ...models import Job, JobQuerySet, Queue
from ..base import CappedPaginator, log_action, requires_permission
from . import actions as job_actions
from . import bulk
from .bulk_views import BulkViews
from .detail_views import JobViews
from .error_views import ErrorViews

_VIEWS = (
    State.ENQUEUED, State.SCHEDULED, State.WORKING, State.RETRIES, State.DEAD, State.SUCCEEDED, State.BLOCKED,
    State.DISCARDED, State.EXPIRED,
)  # fmt: skip
_MARKS = {State.DEAD: "faktory-bad", State.RETRIES: "faktory-warn", State.SUCCEEDED: "faktory-good"}


class StateFilter(admin.SimpleListFilter):
    """Filter by state; its choices are the tabs above the list."""

    title = "state"
    parameter_name = "state"
    # The tabs replace the entry in the sidebar.
    template = "admin/django_faktory/no_filter.html"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return every state, without a query."""
        return [(str(state), str(state)) for state in State]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:  # noqa: ARG002
        """Return the jobs in the chosen state."""
        chosen = self.value()
        if chosen not in set(State) or not isinstance(queryset, JobQuerySet):
            return queryset
        return queryset.in_state(State(chosen))


class QueueFilter(admin.SimpleListFilter):
    """Filter by queue; its choices come from the small table of queues."""

    title = "queue"
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the first 200 queue names."""
        return [(name, name) for name in Queue.objects.order_by("name").values_list("name", flat=True)[:200]]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:  # noqa: ARG002
        """Return the jobs of the chosen queue."""
        chosen = self.value()
        return queryset.filter(queue=chosen) if chosen and chosen.isprintable() else queryset


class JobAdmin(JobViews, ErrorViews, BulkViews):
    """Admin of jobs: search with the query language; retry, run, cancel, kill, discard, delete."""

    link_parameters = ("about", "bid")
    change_list_template = "admin/django_faktory/jobs.html"
    list_display = ("jobtype", "marked_state", "queue", "when", "attempts", "error", "jid")
    list_filter = (StateFilter, QueueFilter)
    # Django shows a search box only with search_fields; `get_search_results` ignores them.
    search_fields = ("jid",)
    search_help_text = (
        "A query, such as: error:Timeout task:shop.* queue:mail older:2d about:shop.order/42 text:word. "
        "Or one word: a jid, the beginning of a task, or an error."
    )
    ordering = ("-id",)
    # No index serves a sort by the other columns, and the table can be large.
    sortable_by = ()
    paginator = CappedPaginator
    list_per_page = 50
    list_max_show_all = 200
    actions = ("retry", "requeue", "cancel", "kill", "discard", "prune")
    fieldsets = ((None, {"fields": ("jid",)}),)

    has_retry_permission = requires_permission("job.retry")
    has_requeue_permission = requires_permission("job.requeue")
    has_cancel_permission = requires_permission("job.cancel")
    has_kill_permission = requires_permission("job.kill")
    has_discard_permission = requires_permission("job.discard")
    has_prune_permission = requires_permission("job.prune")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Job], search_term: str
    ) -> tuple[QuerySet[Job], bool]:
        """Return the jobs that match the query; without an index, only recent jobs are searched."""
        if not isinstance(queryset, JobQuerySet):
            return queryset, False
        try:
            typed = bulk.parse_search(search_term)
            found = queryset.matching(typed) if search_term else queryset
            asked = bulk.asked(request.GET, typed)
        except InvalidQuery as error:
            self.message_user(request, str(error), messages.ERROR)
            # Not all jobs: a bulk action could follow on a list that the query did not restrict.
            return queryset.none(), False
        return (found if asked.is_empty or asked.has_index else found.recent()), False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Render the list with its tabs and the actions on all matching jobs."""
        kept = request.GET.copy()
        # Page number and state belong to the current tab, not to the links to other tabs.
        for name in ("p", "e", "all", "state"):
            kept.pop(name, None)
        chosen = request.GET.get("state", "")
        rest = f"&{kept.urlencode()}" if kept else ""
        views = [("all", f"?{kept.urlencode()}", not chosen)]
        views += [(str(state), f"?state={state}{rest}", chosen == state) for state in _VIEWS]
        may = [(name, act) for name, act in job_actions.ACTS.items() if name != "clear" and act.is_allowed(request)]
        fitting = [(name, act) for name, act in may if not chosen or chosen in act.states]
        more = {
            "views": views,
            "verbs": fitting,
            "filters": f"{kept.urlencode()}&state={chosen}" if chosen else kept.urlencode(),
        }
        return super().changelist_view(request, {**more, **(extra_context or {})})

    @admin.display(description="state")
    def marked_state(self, job: Job) -> str:
        """Return the state, highlighted if it needs attention."""
        return format_html('<span class="{}">{}</span>', _MARKS.get(State(job.state), ""), job.state)

    @admin.display(description="when")
    def when(self, job: Job) -> str:
        """Return the time that matters in the job's state."""
        moment = job.finished_at or job.run_at or (job.started_at if job.state == State.WORKING else job.enqueued_at)
        if moment is None:
            return ""
        there = timezone.localtime(moment) if timezone.is_aware(moment) else moment
        return format_html('<span class="faktory-together">{}</span>', f"{there:%Y-%m-%d %H:%M:%S}")

    @admin.display(description="error")
    def error(self, job: Job) -> str:
        """Return the latest failure's type without its module path, to save width."""
        return str(job.errtype).rpartition(".")[2]

    @admin.action(description="Retry now", permissions=["retry"])
    def retry(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse | None:
        """Retry the selected jobs that failed."""
        return self._act(request, queryset, "retry")

    @admin.action(description="Run now", permissions=["requeue"])
    def requeue(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse | None:
        """Run the selected jobs now, scheduled ones included."""
        return self._act(request, queryset, "requeue")

    @admin.action(description="Cancel (drop, or stop while it runs)", permissions=["cancel"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse | None:
        """Discard waiting jobs, and stop running ones within seconds if the worker is ours."""
        return self._act(request, queryset, "cancel")

    @admin.action(description="Kill (send to dead)", permissions=["kill"])
    def kill(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse | None:
        """Move waiting jobs to dead."""
        return self._act(request, queryset, "kill")

    @admin.action(description="Discard (drop)", permissions=["discard"])
    def discard(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse | None:
        """Discard waiting and dead jobs."""
        return self._act(request, queryset, "discard")

    @admin.action(description="Delete (what ended)", permissions=["prune"])
    def prune(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse | None:
        """Delete the rows of finished jobs before their retention ends."""
        return self._act(request, queryset, "prune")

    def _act(self, request: HttpRequest, queryset: QuerySet[Job], verb: str) -> HttpResponse | None:
        """Act on the selected jobs at once.

        For all matching jobs, redirect to the page that acts on them in steps.
        """
        act = job_actions.ACTS[verb]
        if request.POST.get("select_across") == "1":
            asked = request.GET.copy()
            asked["verb"] = verb
            return HttpResponseRedirect(f"{reverse('admin:django_faktory_job_all')}?{asked.urlencode()}")
        jobs = list(queryset.only("pk", "jid", "jobtype"))
        if act.warning:
            question = f"{act.label} {len(jobs)} job{'' if len(jobs) == 1 else 's'}?"
            asked_again = self.confirmed(
                request, question, what=jobs, note=act.warning, button=f"Yes, {act.label.lower()}"
            )
            if asked_again is not None:
                return asked_again
        changed = job_actions.execute(verb, [job.pk for job in jobs], using=queryset.db)
        log_action(request, jobs, act.done)
        left = len(jobs) - changed
        note = f" {left} could not be in the state they are in." if left else ""
        self.message_user(request, f"{act.done} {changed} jobs.{note}", messages.WARNING if left else messages.SUCCESS)
        return None
