"""Admin list of jobs: tabs by state, search by query language, bulk actions."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext, pgettext
from django.utils.translation import gettext_lazy as _
from msgspec import structs

from ... import conf
from ...core import queries
from ...core.lifecycle import FAILED, State
from ...core.queries import Query
from ...errors import InvalidQuery
from ...models import Job, JobQuerySet, Queue
from ...operations import bulk, job_summaries, searches, task_names
from ...operations.job_actions import JOB_ACTIONS, Verb
from ...tasks import redaction
from ..formats import StrOrPromise, column, error_text, event_time_of, format_number, render_time, render_with_detail
from ..history import log_action
from ..labels import STATES
from ..links import jobs_link, page_url
from ..lists import CappedPaginator, SafeChangeList
from ..object_actions import add_list_actions
from .bulk_views import BulkViews, build_query, parse_search
from .detail_views import JobViews
from .error_views import ErrorViews
from .run_views import RunViews, run_link

_TABS = (
    State.ENQUEUED, State.SCHEDULED, State.WORKING, State.RETRIES, State.DEAD, State.SUCCEEDED, State.BLOCKED,
    State.DISCARDED, State.EXPIRED,
)  # fmt: skip
_STATE_CLASSES = {State.DEAD: "faktory-bad", State.RETRIES: "faktory-warn", State.SUCCEEDED: "faktory-good"}


class StateFilter(admin.SimpleListFilter):
    """Filter by state; its choices are the tabs above the list."""

    title = _("state")
    parameter_name = "state"
    # The tabs replace the entry in the sidebar.
    template = "admin/django_faktory/no_filter.html"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, StrOrPromise]]:  # noqa: ARG002
        """Return every state, without a query."""
        return [(str(state), STATES[state]) for state in State]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:  # noqa: ARG002
        state = self.value()
        if state not in set(State) or not isinstance(queryset, JobQuerySet):
            return queryset
        return queryset.in_state(State(state))


class QueueFilter(admin.SimpleListFilter):
    """Filter by queue; its choices come from the small table of queues."""

    title = _("queue")
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the first 200 queue names."""
        # Clients choose names of queues, so their number is not bounded; the search box finds the others.
        return [(name, name) for name in Queue.objects.order_by("name").values_list("name", flat=True)[:200]]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:  # noqa: ARG002
        name = self.value()
        # An edited URL may contain NUL, which no name of a queue has and PostgreSQL rejects.
        return queryset.filter(queue=name) if name and name.isprintable() else queryset


class JobList(SafeChangeList):
    """The list, with the beginnings of arguments and failures: the rows of a page are too many for whole texts."""

    def get_results(self, request: HttpRequest) -> None:
        """Read the beginnings with the rows of the page."""
        self.queryset = job_summaries.with_texts(self.queryset, job_summaries.ON_PAGES)
        super().get_results(request)


class JobAdmin(JobViews, RunViews, ErrorViews, BulkViews):
    """Admin of jobs: search with the query language; retry, run, cancel, kill, discard, delete."""

    link_parameters = ("about", "bid")
    change_list_template = "admin/django_faktory/jobs.html"
    list_class = JobList
    list_display = ("task", "marked_state", "queue", "error", "event_time", "attempts", "job_id")
    list_filter = (StateFilter, QueueFilter)
    # Django shows a search box only with search_fields; `get_search_results` ignores them.
    search_fields = ("jid",)
    search_help_text = _(
        "A query, such as: error:Timeout task:shop.* queue:mail failed_after:2h about:shop.order/42. "
        "Or a job ID or its beginning, a task, a queue, an error, or words of arguments and error messages."
    )
    ordering = ("-id",)
    # No index serves a sort by a column of the list, and the table can be large.
    sortable_by = ()
    paginator = CappedPaginator
    list_per_page = 50
    list_max_show_all = 200
    fieldsets = ((None, {"fields": ("jid",)}),)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Job], search_term: str
    ) -> tuple[QuerySet[Job], bool]:
        """Return the jobs that match the query; without an index, only recent jobs are searched."""
        if not isinstance(queryset, JobQuerySet):
            return queryset, False
        try:
            query = build_query(request.GET, parse_search(search_term))
        except InvalidQuery as error:
            self.message_user(request, error_text(error), messages.ERROR)
            # Not all jobs: a bulk action could follow on a list that the query did not restrict.
            return queryset.none(), False
        request.faktory_query = query  # type: ignore[attr-defined]  # for `changelist_view`, which renders the list
        return queryset.shown(query).order_by(*query.order), False

    def _suggest(self, request: HttpRequest, search_term: str) -> None:
        """Offer searches for tasks with a similar name, or for single words, after a search that found nothing."""
        word = search_term.strip().removeprefix("task:").strip('"')
        if not word or ":" in word:
            return
        if " " in word:
            offer = gettext("No jobs with all of these words. Search for one of them: {words}")
            links = [(jobs_link(q=part), part) for part in word.split()]
        else:
            offer = gettext("No matching jobs. Did you mean the task {tasks}?")
            similar = task_names.find_similar(word, using=conf.get("DATABASE"))
            links = [(jobs_link(q=f'task:"{name}"'), name) for name in similar if name != word]
        if links:
            words = format_html_join(", ", '<a href="{}">{}</a>', links)
            self.message_user(request, format_html(offer, words=words, tasks=words), messages.INFO)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Render the list with its tabs and the actions on all matching jobs."""
        filters = request.GET.copy()
        # Page number and state belong to the current tab, not to the links to other tabs.
        for name in ("p", "e", "all", "state"):
            filters.pop(name, None)
        state = request.GET.get("state", "")
        suffix = f"&{filters.urlencode()}" if filters else ""
        tabs: list[tuple[StrOrPromise, str, bool]] = [(pgettext("jobs", "all"), f"?{filters.urlencode()}", not state)]
        tabs += [(STATES[tab_state], f"?state={tab_state}{suffix}", state == tab_state) for tab_state in _TABS]
        actions = [(verb, JOB_ACTIONS[verb]) for verb in Verb]
        offered = [
            (verb, action)
            for verb, action in actions
            if action.is_allowed(request.user) and (not state or state in action.states)
        ]
        page_context = {
            "tabs": tabs,
            "bulk_actions": offered,
            "run_url": run_link() if self.has_run_permission(request) else "",
            "filters": f"{filters.urlencode()}&state={state}" if state else filters.urlencode(),
        }
        response = super().changelist_view(request, {**page_context, **(extra_context or {})})
        # The list has counted its rows. Another query could read the whole table: PostgreSQL does not use the primary
        # key for `LIMIT 1` of a search that it expects to match many rows.
        context: dict[str, Any] = getattr(response, "context_data", None) or {}  # none: Django has redirected
        change_list = context.get("cl")
        query = getattr(request, "faktory_query", None)
        if change_list is not None and query is not None:
            context.update(self._describe_search(request, query, change_list.query))
            if change_list.query and not change_list.result_count:
                self._suggest(request, change_list.query)
        return response

    def _describe_search(self, request: HttpRequest, query: Query, text: str) -> dict[str, Any]:
        """Return how the search was read and how far it looked, with links to wider searches."""
        words = tuple(word for word, _ in queries.parse_words(text)[1])
        context: dict[str, Any] = {"read_as": str(query) if words else ""}
        if words and not redaction.is_on() and not query.words:
            context["words_url"] = jobs_link(q=str(Query(words=words)))
        coverage = searches.read_coverage(query, using=conf.get("DATABASE"))
        # That a list without a search looked at every job goes without saying.
        if coverage is None or (coverage.is_complete and not query.searches):
            return context
        context |= {"coverage": coverage, "hides_arguments": bool(words) and redaction.is_on()}
        context["searched"] = format_number(coverage.searched)
        context["total"] = format_number(coverage.total, is_more=coverage.is_more)
        context["wider"] = format_number(coverage.wider.among)
        if not coverage.is_complete:
            # The state is a tab, which the link keeps.
            tab = {"state": request.GET["state"]} if request.GET.get("state") else {}
            wider = structs.replace(coverage.wider, states=()) if tab else coverage.wider
            context["wider_url"] = jobs_link(q=str(wider), **tab)
            if not query.in_states:
                context["failed_url"] = jobs_link(q=str(structs.replace(query, states=FAILED)))
        return context

    marked_state = column(
        lambda job: format_html(
            '<span class="{}">{}</span>', _STATE_CLASSES.get(State(job.state), ""), STATES[job.state]
        ),
        _("state"),
    )
    job_id = column(attrgetter("jid"), _("job ID"))
    attempts = column(attrgetter("attempts"), _("attempts"))

    @admin.display(description=_("task"))
    def task(self, job: Job) -> SafeString | str:
        """Return the name of the task, and the beginning of the arguments."""
        call = job_summaries.describe_call(job, job_summaries.ON_PAGES)
        return render_with_detail(job.jobtype, "" if call == "[]" else call)

    @admin.display(description=_("time"))
    def event_time(self, job: Job) -> str:
        """Return the time that matters in the job's state, with that of the latest failure if it is retried."""
        time = render_time(event_time_of(job))
        if job.state != State.RETRIES or job.failed_at is None:
            return time
        return format_html("{}<br>{}", render_time(job.failed_at), format_html(gettext("next {time}"), time=time))

    @admin.display(description=_("error"))
    def error(self, job: Job) -> SafeString | str:
        """Return the latest failure's type without its module path, to save width, and its message."""
        errtype = str(job.errtype).rpartition(".")[2]
        return render_with_detail(errtype, job_summaries.read_message(job) if errtype else "")

    def execute(self, request: HttpRequest, queryset: QuerySet[Job], verb: str) -> HttpResponse | None:
        """Act on the selected jobs at once.

        For all matching jobs, redirect to the page that acts on them in steps.
        """
        action = JOB_ACTIONS[verb]
        # All that match can be millions of jobs, too many for one request.
        if request.POST.get("select_across") == "1":
            params = request.GET.copy()
            params["verb"] = verb
            return HttpResponseRedirect(f"{page_url('job_all')}?{params.urlencode()}")
        # Without the long texts: a page of the list may have 200 of them.
        jobs = list(queryset.only("pk", "jid", "jobtype", "state"))
        if action.warning:
            question = ngettext("%(action)s %(number)s job?", "%(action)s %(number)s jobs?", len(jobs))
            confirmation = self.confirmation_page(
                request,
                question % {"action": action.label, "number": format_number(len(jobs))},
                objects=jobs,
                note=action.warning,
                button=gettext("Yes, %(action)s") % {"action": str(action.label).lower()},
            )
            if confirmation is not None:
                return confirmation
        # The selection may be older than the states of its jobs: jobs in another state are not changed.
        changed = bulk.execute(verb, Job.objects.filter(pk__in=[job.pk for job in jobs]))
        if changed:  # else another user was faster
            log_action(request, [job for job in jobs if job.state in action.states], action.done_label)
        unchanged = len(jobs) - changed
        text = ngettext("%(done)s %(number)s job.", "%(done)s %(number)s jobs.", changed)
        text %= {"done": action.done_label, "number": format_number(changed)}
        self.report(request, text, unchanged, gettext("%(number)s skipped: already in another state."))
        return None


add_list_actions(
    JobAdmin,
    {verb: (JOB_ACTIONS[verb].list_label or JOB_ACTIONS[verb].label, JOB_ACTIONS[verb].needs) for verb in Verb},
)
