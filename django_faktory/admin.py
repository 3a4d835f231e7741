"""The models in Django's admin: to look, and to act. Nothing is edited here; actions call the store's verbs.

Lists never count a whole table: what lies beyond `CappedPaginator.cap` is not numbered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.paginator import Paginator
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.functional import cached_property
from django.utils.html import format_html

from . import conf, wakeups
from .jsontext import decode
from .lifecycle import State
from .models import Job, OutboxEntry, Queue, Tracking, WorkerProcess
from .payloads import rfc3339
from .store import cancelling, operations, workers
from .wakeups.postgresql import ANY_QUEUE

if TYPE_CHECKING:
    AnyAdmin = admin.ModelAdmin[Any]
    CappedBase = Paginator[Any]
else:  # Django's own classes take no type parameters at run time
    AnyAdmin = admin.ModelAdmin
    CappedBase = Paginator

_COLOURS = {
    State.DEAD: "var(--error-fg, #ba2121)",
    State.RETRIES: "var(--message-warning-fg, #8a6100)",
    State.WORKING: "var(--link-fg, #417893)",
}


class CappedPaginator(CappedBase):
    """Counts no further than `cap` rows: a list of millions opens as fast as a list of ten thousand."""

    cap = 10_000

    @cached_property
    def count(self) -> int:
        """How many rows there are, at most `cap`."""
        rows: Any = self.object_list
        return len(rows[: self.cap]) if isinstance(rows, list) else rows.order_by()[: self.cap].count()


class StateFilter(admin.SimpleListFilter):
    """By state, in the order of a job's life."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Every state there is: no look into the table."""
        return [(str(state), str(state)) for state in State]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:  # noqa: ARG002
        """Jobs in the chosen state."""
        return queryset.filter(state=self.value()) if self.value() else queryset


class QueueFilter(admin.SimpleListFilter):
    """By queue; the names come from the short table of queues."""

    title = "queue"
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """The queues somebody used."""
        return [(name, name) for name in Queue.objects.order_by("name").values_list("name", flat=True)[:200]]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:  # noqa: ARG002
        """Jobs of the chosen queue."""
        return queryset.filter(queue=self.value()) if self.value() else queryset


class _LookOnly(AnyAdmin):
    """No adding, editing or deleting: rows change by verbs only."""

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002
        return False

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """A page to read: nothing on it can be saved."""
        buttons = dict.fromkeys(("show_save", "show_save_and_continue", "show_save_and_add_another"), False)
        title = {"title": f"{self.model._meta.verbose_name}".capitalize()}  # noqa: SLF001
        return super().change_view(request, object_id, form_url, {**title, **buttons, **(extra_context or {})})

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:  # noqa: ARG002
        return [*(field.name for field in self.model._meta.fields), *self.extra_fields]  # noqa: SLF001

    extra_fields: tuple[str, ...] = ()


@admin.register(Job)
class JobAdmin(_LookOnly):
    """Jobs: found by jid, jobtype or error; retried, killed, discarded."""

    list_display = ("jobtype", "colored_state", "queue", "when", "attempt", "error", "priority", "jid")
    list_filter = (StateFilter, QueueFilter)
    search_fields = ("jid__exact", "jobtype__startswith", "errtype__exact")
    search_help_text = "A whole jid, the beginning of a jobtype, or a whole error type."
    ordering = ("-id",)
    paginator = CappedPaginator
    show_full_result_count = False
    list_per_page = 50
    list_max_show_all = 200
    actions = ("retry", "kill", "discard", "cancel")
    extra_fields = ("job", "latest_failure", "attempts", "priority_", "progress")
    fieldsets = (
        (None, {"fields": ("jid", "jobtype", "queue", "state", "priority_", "wid", "progress")}),
        ("Job", {"fields": ("job", "result")}),
        ("Failures", {"fields": ("failures", "losses", "latest_failure", "attempts")}),
        ("Times", {"fields": ("created_at", "run_at", "enqueued_at", "started_at", "reserved_until", "finished_at")}),
        ("Rules", {"fields": ("retry", "reserve_for", "backtrace", "result_ttl", "purge_at", "attempt")}),
        ("Options", {"fields": ("expires_at", "unique_key", "unique_expires_at", "unique_until_start")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        """Rows without their long texts: a list of fifty must not load fifty payloads."""
        found = super().get_queryset(request)
        long_texts = ("payload", "failure", "history", "result")
        return found.defer(*long_texts) if request.resolver_match and not request.resolver_match.kwargs else found

    @admin.display(description="state", ordering="state")
    def colored_state(self, job: Job) -> str:
        """The state; what needs a look is coloured."""
        return format_html('<span style="color: {}">{}</span>', _COLOURS.get(State(job.state), "inherit"), job.state)

    @admin.display(description="priority")
    def priority_(self, job: Job) -> int:
        """Django's priority, larger first."""
        return job.priority

    @admin.display(description="when")
    def when(self, job: Job) -> str:
        """The time that matters in this state."""
        moment = job.finished_at or job.run_at or (job.started_at if job.state == State.WORKING else job.enqueued_at)
        return rfc3339(moment) if moment else ""

    @admin.display(description="error", ordering="errtype")
    def error(self, job: Job) -> str:
        """The latest failure's type."""
        return str(job.errtype)

    @admin.display(description="job")
    def job(self, job: Job) -> str:
        """The job as its client sent it, laid out."""
        return _laid_out(job.payload)

    @admin.display(description="progress")
    def progress(self, job: Job) -> str:
        """What the job told of itself."""
        said = Tracking.objects.using(job._state.db).filter(jid=job.jid).first()  # noqa: SLF001  (documented)
        if said is None or said.updated_at < job.created_at:
            return "–"
        return " ".join(word for word in (f"{said.percent} %" if said.percent is not None else "", said.desc) if word)

    @admin.display(description="latest failure")
    def latest_failure(self, job: Job) -> str:
        """What FETCH would tell."""
        return _laid_out(job.failure)

    @admin.display(description="failed attempts")
    def attempts(self, job: Job) -> str:
        """Every failed attempt, the oldest first."""
        return _laid_out(job.history)

    @admin.action(description="Retry now", permissions=["change"])
    def retry(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        """Scheduled, retrying and dead jobs run now."""
        self._act(request, queryset, "Retried", operations.requeue)
        alias = queryset.db
        transaction.on_commit(lambda: wakeups.announce(alias, {ANY_QUEUE}), using=alias)

    @admin.action(description="Kill (send to dead)", permissions=["change"])
    def kill(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        """Jobs that wait are given up; they stay in dead."""

        def kill(ids: Sequence[int], *, using: str) -> int:
            return operations.kill(ids, using=using, dead_for_s=conf.get("DEAD_TTL"))

        self._act(request, queryset, "Killed", kill)

    @admin.action(description="Discard (drop)", permissions=["change"])
    def discard(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        """Jobs that wait or are dead are dropped."""
        self._act(request, queryset, "Discarded", operations.discard)

    @admin.action(description="Cancel (drop, or stop while it runs)", permissions=["change"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        """Jobs that wait are dropped; workers of ours stop those that run, within seconds."""

        def cancel(ids: Sequence[int], *, using: str) -> int:
            jids = list(Job.objects.using(using).filter(pk__in=ids).values_list("jid", flat=True))
            return cancelling.cancel(jids, using=using)

        self._act(request, queryset, "Cancelled", cancel)

    def _act(self, request: HttpRequest, queryset: QuerySet[Job], done: str, verb: Callable[..., int]) -> None:
        jobs = list(queryset.only("pk", "jid", "jobtype"))
        changed = verb([job.pk for job in jobs], using=queryset.db)
        for job in jobs:
            self.log_change(request, job, f"{done}.")
        left = len(jobs) - changed
        note = f" {left} could not be in the state they are in." if left else ""
        self.message_user(request, f"{done} {changed} jobs.{note}", messages.WARNING if left else messages.SUCCESS)


@admin.register(Queue)
class QueueAdmin(_LookOnly):
    """Queues and whether they are paused."""

    list_display = ("name", "paused_at")
    search_fields = ("name",)
    ordering = ("name",)


@admin.register(WorkerProcess)
class WorkerProcessAdmin(_LookOnly):
    """Worker processes in any language; quieted and terminated by their next BEAT."""

    list_display = ("wid", "hostname", "pid", "state", "rss_kb", "started_at", "beat_at")
    search_fields = ("wid", "hostname")
    ordering = ("-started_at",)
    actions = ("quiet", "terminate")

    @admin.action(description="Quiet: fetch no more jobs", permissions=["change"])
    def quiet(self, request: HttpRequest, queryset: QuerySet[WorkerProcess]) -> None:
        """They finish what they have; there is no way back."""
        self._move(request, queryset, "quiet")

    @admin.action(description="Terminate: finish and exit", permissions=["change"])
    def terminate(self, request: HttpRequest, queryset: QuerySet[WorkerProcess]) -> None:
        """They exit within 30 seconds."""
        self._move(request, queryset, "terminate")

    def _move(self, request: HttpRequest, queryset: QuerySet[WorkerProcess], state: str) -> None:
        processes = list(queryset)
        moved = workers.advance([process.wid for process in processes], state, using=queryset.db)
        for process in processes:
            self.log_change(request, process, f"Told to {state}.")
        self.message_user(request, f"{moved} workers will be told to {state} at their next beat.", messages.SUCCESS)


@admin.register(OutboxEntry)
class OutboxEntryAdmin(_LookOnly):
    """Jobs on their way elsewhere. Those with an error stay until a person lets them try again, or deletes them."""

    list_display = ("id", "jid", "queue", "created_at", "error")
    list_filter = (("error", admin.EmptyFieldListFilter), "queue")
    search_fields = ("jid", "error")
    ordering = ("id",)
    actions = ("try_again",)

    def has_delete_permission(self, request: HttpRequest, obj: OutboxEntry | None = None) -> bool:
        """As the user's permissions say: a row that will never be taken must go some time."""
        return admin.ModelAdmin.has_delete_permission(self, request, obj)

    @admin.action(description="Try again", permissions=["change"])
    def try_again(self, request: HttpRequest, queryset: QuerySet[OutboxEntry]) -> None:
        """Forget the error: the relay takes it with the next ones."""
        count = queryset.exclude(error="").update(error="")
        self.message_user(request, f"{count} jobs will be handed on again.", messages.SUCCESS)


def _laid_out(text: str) -> str:
    if not text:
        return "–"
    return format_html(
        '<pre style="white-space: pre-wrap; overflow-wrap: anywhere">{}</pre>',
        json.dumps(decode(text), indent=2, ensure_ascii=False),
    )
