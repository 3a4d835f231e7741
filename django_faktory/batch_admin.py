"""Batches in the admin: how far each is, its tree, its members and callbacks, and a way to retry what failed."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import Count, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from .batching import Kind, Progress
from .jsontext import decode
from .lifecycle import State
from .look_only import CappedPaginator, LookOnly
from .models import Batch, Job
from .store import operations

_SAID = {Progress.NOT_YET: "not yet", Progress.ENQUEUED: "enqueued", Progress.FINISHED: "done"}
MOST_SHOWN = 200
"""Batches of a tree that a page shows."""


class StageFilter(admin.SimpleListFilter):
    """By how far a batch is."""

    title = "stage"
    parameter_name = "stage"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """The stages."""
        return [("open", "not committed"), ("running", "running"), ("broken", "cannot succeed"), ("over", "over")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Batch]) -> QuerySet[Batch]:  # noqa: ARG002
        """Batches of the chosen stage."""
        match self.value():
            case "open":
                return queryset.filter(expires_at__isnull=False)
            case "running":
                return queryset.filter(committed_at__isnull=False, finished_at=None)
            case "broken":
                return queryset.filter(is_broken=True)
            case "over":
                return queryset.filter(finished_at__isnull=False)
        return queryset


@admin.register(Batch)
class BatchAdmin(LookOnly):
    """Batches: found by id or description; their failed members retried together."""

    list_display = ("name", "bar", "pending", "failed", "complete_", "success_", "created_at", "bid")
    list_filter = (StageFilter,)
    search_fields = ("bid__exact", "description__startswith")
    search_help_text = "A whole bid, or the beginning of a description."
    ordering = ("-id",)
    paginator = CappedPaginator
    show_full_result_count = False
    list_per_page = 50
    actions = ("retry_failed",)
    extra_fields = ("name", "bar", "tree", "members", "complete_", "success_")
    fieldsets = (
        (None, {"fields": ("name", "bid", "bar", "tree", "members")}),
        ("Callbacks", {"fields": ("complete_", "success_")}),
        ("Counters", {"fields": ("total", "pending", "unrun", "failed", "is_broken", "children", "open_children")}),
        ("Times", {"fields": ("created_at", "committed_at", "expires_at", "expired_at", "finished_at", "purge_at")}),
    )

    @admin.display(description="batch", ordering="description")
    def name(self, batch: Batch) -> str:
        """Its description, else its id."""
        return str(batch.description or batch.bid)

    @admin.display(description="settled")
    def bar(self, batch: Batch) -> SafeString:
        """How many members are settled, as a bar and in numbers."""
        done = batch.total - batch.pending
        return format_html(
            '<progress max="{}" value="{}" aria-label="settled members"></progress> {} of {}{}',
            batch.total or 1,
            done if batch.total else 1,
            done,
            batch.total,
            ", cannot succeed any more" if batch.is_broken else "",
        )

    @admin.display(description="complete")
    def complete_(self, batch: Batch) -> SafeString | str:
        """What runs when all were executed, and how far that is."""
        return _callback(batch, Kind.COMPLETE)

    @admin.display(description="success")
    def success_(self, batch: Batch) -> SafeString | str:
        """What runs when all have succeeded, and how far that is."""
        return _callback(batch, Kind.SUCCESS)

    @admin.display(description="members by state")
    def members(self, batch: Batch) -> SafeString | str:
        """Those whose rows are there; who succeeded without a result to keep has none."""
        jobs = Job.objects.using(batch._state.db).filter(bid=batch.bid)  # noqa: SLF001  (documented)
        counts = jobs.order_by("state").values_list("state").annotate(count=Count("pk"))
        link = reverse("admin:django_faktory_job_changelist")
        lines = [(link, batch.bid, state, count, state) for state, count in counts]
        return format_html_join(", ", '<a href="{}?bid={}&state={}">{} {}</a>', lines) or "–"

    @admin.display(description="tree")
    def tree(self, batch: Batch) -> SafeString:
        """The whole tree it is part of, with how far each is; this one in bold."""
        found = _family(batch)
        lines = [
            (
                depth * 2,
                reverse("admin:django_faktory_batch_change", args=[one.pk]),
                SafeString("bold") if one.pk == batch.pk else "normal",
                one.description or one.bid,
                one.total - one.pending,
                one.total,
            )
            for depth, one in found
        ]
        row = '<div style="padding-left: {}em"><a href="{}" style="font-weight: {}">{}</a> {} of {}</div>'
        more = format_html("<div>… more than {} batches</div>", MOST_SHOWN) if len(found) == MOST_SHOWN else ""
        return format_html("{}{}", format_html_join("", row, lines), more)

    @admin.action(description="Retry the failed members", permissions=["change"])
    def retry_failed(self, request: HttpRequest, queryset: QuerySet[Batch]) -> None:
        """Members that are dead or wait for their retry run now."""
        jobs = Job.objects.using(queryset.db).filter(bid__in=queryset.values("bid"))
        ids = list(jobs.in_state(State.DEAD, State.RETRIES).values_list("pk", flat=True))
        count = operations.requeue(ids, using=queryset.db)
        for batch in queryset:
            self.log_change(request, batch, "Retried the failed members.")
        self.message_user(request, f"Retried {count} jobs.", messages.SUCCESS if count else messages.WARNING)


def _family(batch: Batch) -> list[tuple[int, Batch]]:
    """The tree from its root, depth first, with each one's depth; no more than MOST_SHOWN."""
    batches = Batch.objects.using(batch._state.db)  # noqa: SLF001
    root = batch
    while root.parent_bid and (parent := batches.filter(bid=root.parent_bid).first()):
        root = parent
    found: list[tuple[int, Batch]] = []
    stack = [root]
    while stack and len(found) < MOST_SHOWN:
        one = stack.pop()
        found.append((one.depth, one))
        if one.children:
            stack += batches.filter(parent_bid=one.bid).order_by("-id")[:MOST_SHOWN]
    return found


def _callback(batch: Batch, kind: Kind) -> SafeString | str:
    text = getattr(batch, kind)
    if not text:
        return "–"
    has_failed = getattr(batch, f"{kind}_failed")
    said = "failed" if has_failed else _SAID[Progress(getattr(batch, f"{kind}_st"))]
    link = f"{reverse('admin:django_faktory_job_changelist')}?q={getattr(batch, f'{kind}_jid')}"
    return format_html('{}: <a href="{}">{}</a>', decode(text)["jobtype"], link, said)
