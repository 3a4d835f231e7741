"""Admin pages of batches: progress, tree, members, callbacks, and an action that retries failed jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext, gettext_noop, ngettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..core.batch_rules import CallbackProgress, Kind, is_open
from ..core.json.jsontext import decode
from ..core.lifecycle import FAILED, State
from ..core.queries import LATEST_FAILURE
from ..errors import FaktoryError
from ..models import Batch, Job
from ..operations import bulk
from ..store.batches import tree as batch_tree
from ..store.statistics import bounded_counts
from ..tasks import redaction
from .base import ReadOnlyAdmin, requires_permission
from .formats import StrOrPromise, column, format_number, time_column
from .history import log_action
from .labels import STATES
from .links import jobs_link, row_link
from .lists import CappedPaginator, format_capped
from .long_texts import LongText, long_text_column

MAX_NAME_LENGTH = 200
"""Characters of a description that are shown; the protocol sets no limit on its length."""

_TIMES = ("created", "committed", "expires", "expired", "reopened", "finished")

MAX_COUNTED = 10_000
"""Members counted in each state; larger counts are shown as "10,000+"."""

# A callback is a job and may be as long as one, and a page lists 50 batches with two callbacks each.
CALLBACK_CHARACTERS = 4096
"""Characters of a callback's job that the list reads. They include the jobtype unless the job is long."""

MAX_FAILED_SHOWN = 5
"""Failed jobs that the page of a batch shows."""

MAX_BATCHES_SHOWN = 200
"""Batches of a tree that one page shows."""

_PROGRESS_LABELS = {
    CallbackProgress.NOT_YET: pgettext_lazy("callback of a batch", "not yet"),
    CallbackProgress.ENQUEUED: pgettext_lazy("callback of a batch", "enqueued"),
    CallbackProgress.FINISHED: pgettext_lazy("callback of a batch", "done"),
}
_KIND_LABELS = {
    Kind.COMPLETE: pgettext_lazy("callback of a batch", "complete"),
    Kind.SUCCESS: pgettext_lazy("callback of a batch", "success"),
}
_STAGES: dict[str, StrOrPromise] = {
    "open": pgettext_lazy("stage of a batch", "open"),
    "running": pgettext_lazy("stage of a batch", "running"),
    "failing": pgettext_lazy("stage of a batch", "failing"),
    "broken": pgettext_lazy("stage of a batch", "cannot succeed"),
    "over": pgettext_lazy("stage of a batch", "finished"),
}
"""The labels of `tree.STAGES`."""


class StageFilter(admin.SimpleListFilter):
    """Filter batches by how far they are."""

    title = _("stage")
    parameter_name = "stage"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, StrOrPromise]]:  # noqa: ARG002
        """Return the stages; a batch may be in several of them."""
        return list(_STAGES.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Batch]) -> QuerySet[Batch]:  # noqa: ARG002
        stage = self.value()
        return batch_tree.in_stage(queryset, stage) if stage in _STAGES else queryset


class LevelFilter(admin.SimpleListFilter):
    """Show one line for each tree of batches, unless the user chooses nested batches."""

    title = _("level")
    parameter_name = "place"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, StrOrPromise]]:  # noqa: ARG002
        """Return the choices other than the top level."""
        return [("child", pgettext_lazy("batches", "nested")), ("all", pgettext_lazy("batches", "all"))]

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Return the choices with the top level, which needs no parameter, in place of "all"."""
        default, *others = super().choices(changelist)
        return iter([{**default, "display": gettext("top level")}, *others])

    def queryset(self, request: HttpRequest, queryset: QuerySet[Batch]) -> QuerySet[Batch]:
        """Return the batches of the chosen level; a search covers all levels."""
        if self.value() == "all" or (self.value() is None and request.GET.get("q")):
            return queryset
        return queryset.filter(depth__gt=0) if self.value() == "child" else queryset.filter(depth=0)


def _redact_callback(_batch: Batch, text: str) -> str:
    """Return the job of a callback, with redaction applied."""
    return redaction.redact_job(_read_jobtype(text), text)


def _format_name(batch: Batch) -> str:
    return Truncator(batch.description or batch.bid).chars(MAX_NAME_LENGTH)


def _render_bar(batch: Batch) -> SafeString:
    """Return a bar of ended, failed and waiting members, in this order."""
    ended = batch.total - batch.pending
    if not batch.total:
        return format_html('<span class="faktory-quiet">{}</span>', gettext("only nested batches"))
    numbers = {
        "ended": format_number(ended),
        "total": format_number(batch.total),
        "failed": format_number(batch.failed),
    }
    text = gettext("%(ended)s of %(total)s ended") % numbers
    if batch.failed:
        text = gettext("%(ended)s of %(total)s ended, %(failed)s failed") % numbers
    return format_html(
        '<svg class="faktory-bar" aria-hidden="true" viewBox="0 0 100 10" preserveAspectRatio="none">'
        '<rect class="{}" x="0" y="0" height="10" width="{}"/>'
        '<rect class="faktory-badly" x="{}" y="0" height="10" width="{}"/>'
        '</svg> <span class="faktory-together">{}</span>',
        "faktory-spent" if batch.is_broken else "faktory-well",
        f"{100 * ended / batch.total:.1f}",
        f"{100 * ended / batch.total:.1f}",
        f"{100 * batch.failed / batch.total:.1f}",
        text,
    )


@admin.register(Batch)
class BatchAdmin(ReadOnlyAdmin):
    """Search batches by id or description, and retry their failed jobs together."""

    gone_because = _("it was deleted a while after its end")
    list_display = ("name", "stage", "bar", "callbacks", "created")
    list_filter = (StageFilter, LevelFilter)
    change_form_template = "admin/django_faktory/batch.html"
    search_fields = ("bid__exact", "description__startswith")
    search_help_text = _("A whole batch ID, or the beginning of a description.")
    # By id, not by time of creation, which has no index.
    ordering = ("-id",)
    paginator = CappedPaginator
    list_per_page = 50
    actions = ("retry_failed",)
    has_retry_permission = requires_permission("batch.retry")
    extra_fields = (
        "name",
        "stage",
        "bar",
        "tree",
        "members",
        "failed_jobs",
        "complete_",
        "success_",
        "complete_job",
        "success_job",
        *_TIMES,
    )
    long_texts: ClassVar = {
        "complete": LongText("callbacks", _redact_callback),
        "success": LongText("callbacks", _redact_callback),
        "description": LongText(is_json=False),
    }
    beginnings: ClassVar = {
        "complete": CALLBACK_CHARACTERS,
        "success": CALLBACK_CHARACTERS,
        "description": MAX_NAME_LENGTH + 1,
    }
    restricted_fields: ClassVar = dict.fromkeys(
        ("callbacks", "complete_", "success_", "complete_job", "success_job"), "callbacks"
    ) | {"members": "members", "failed_jobs": "members"}
    fieldsets = (
        (
            None,
            {"fields": ("name", "bid", "stage", "bar", "members", "failed_jobs", "complete_", "success_", "tree")},
        ),
        (
            _("Times"),
            {"fields": tuple(_TIMES)},
        ),
        (_("Callbacks"), {"classes": ["collapse"], "fields": ("complete_job", "success_job")}),
        (
            _("Counters"),
            {
                "classes": ["collapse"],
                "fields": (
                    "total", "pending", "unrun", "failed", "is_broken",
                    "children", "open_children", "unsucceeded_children",
                ),
            },
        ),
    )  # fmt: skip

    def attach(self, request: HttpRequest, rows: list[Any]) -> None:  # noqa: ARG002
        _mark_failing_below(rows)

    name = column(_format_name, _("batch"), "description")

    @admin.display(description=_("stage"))
    def stage(self, batch: Any) -> SafeString | str:
        """Return the progress in words."""
        if not hasattr(batch, "is_failing_below"):
            _mark_failing_below([batch])  # the page of one batch
        return _format_stage(batch, is_failing_below=batch.is_failing_below)

    bar = column(_render_bar, _("jobs"))

    @admin.display(description=_("callbacks"))
    def callbacks(self, batch: Batch) -> SafeString:
        """Return both callbacks, for the list."""
        callbacks = [(_KIND_LABELS[kind], _render_callback(batch, kind)) for kind in Kind if getattr(batch, kind)]
        return format_html_join("", "<div>{}: {}</div>", callbacks)

    created = time_column("created_at", _("created"))
    committed = time_column("committed_at", _("committed"))
    expires = time_column("expires_at", _("expires"))
    expired = time_column("expired_at", _("expired"))
    reopened = time_column("reopened_until", _("reopened until"))
    finished = time_column("finished_at", _("finished"))
    complete_job = long_text_column("complete", _("complete callback"))
    success_job = long_text_column("success", _("success callback"))

    complete_ = column(lambda batch: _render_callback(batch, Kind.COMPLETE), _KIND_LABELS[Kind.COMPLETE])
    success_ = column(lambda batch: _render_callback(batch, Kind.SUCCESS), _KIND_LABELS[Kind.SUCCESS])

    @admin.display(description=_("jobs by state"))
    def members(self, batch: Batch) -> SafeString | str:
        """Return links to the members by state.

        Only members with a row: a member that succeeded without a result to keep has none.
        """
        using = conf.get("DATABASE")
        # One statement with a bounded count per state; the index of members serves each of them.
        sets = [Job.objects.in_state(state).filter(bid=batch.bid) for state in State]
        # One more than is shown, to learn whether there are more.
        counts = dict(zip(State, bounded_counts.counts(sets, max_count=MAX_COUNTED + 1, using=using), strict=True))
        lines = [
            (
                jobs_link(bid=batch.bid, state=str(state)),
                "faktory-bad" if state in FAILED else "",
                format_capped(count, MAX_COUNTED),
                STATES[state],
            )
            for state, count in counts.items()
            if count
        ]
        # With a capped count the difference would be wrong, so the number of removed rows is shown only if all were
        # counted.
        missing = batch.total - sum(counts.values()) if max(counts.values()) <= MAX_COUNTED else 0
        missing_text = ""
        if missing > 0:
            text = ngettext("%(number)s without a row", "%(number)s without a row", missing)
            missing_text = text % {"number": format_number(missing)}
        links = format_html_join(SafeString(" &nbsp; "), '<a href="{}" class="{}">{} {}</a>', lines)
        return format_html("{} &nbsp; {}", links, missing_text) if links or missing_text else gettext("none")

    @admin.display(description=_("failed jobs"))
    def failed_jobs(self, batch: Batch) -> SafeString | str:
        """Return the latest failed members of the batch and of the batches below it, with their errors."""
        bids = [one.bid for one in _read_tree(batch) if one.depth >= batch.depth]
        failed = Job.objects.in_state(*FAILED).filter(bid__in=bids)
        jobs = failed.order_by(*LATEST_FAILURE).only("pk", "jobtype", "state", "errtype", "jid")[:MAX_FAILED_SHOWN]
        lines = [(row_link("job", job.pk), job.jobtype, STATES[job.state], job.errtype or "–") for job in jobs]
        row = '<li><a href="{}"><bdi>{}</bdi></a> {}: <bdi>{}</bdi></li>'
        return format_html("<ul>{}</ul>", format_html_join("", row, lines)) if lines else gettext("none")

    @admin.display(description=_("tree"))
    def tree(self, batch: Batch) -> SafeString:
        """Return the whole tree of the batch with the progress of each; this batch in bold."""
        if not batch.parent_bid and not batch.children:
            return format_html("{}", gettext("not part of a tree"))
        # One statement per level; a client can create trees of any size, so their rows are bounded.
        batches = _read_tree(batch)
        lines = [
            (
                # The style sheet has indents up to this depth.
                min(one.depth, 6),
                row_link("batch", one.pk),
                SafeString(' aria-current="page" class="faktory-warn"' if one.pk == batch.pk else ""),
                _format_name(one),
                _format_stage(one),
                _render_bar(one),
            )
            for one in batches
        ]
        row = (
            '<tr><td><div class="faktory-in-{}"><a href="{}"{}><bdi>{}</bdi></a></div></td><td>{}</td><td>{}</td></tr>'
        )
        total, pending = sum(one.total for one in batches), sum(one.pending for one in batches)
        failed = sum(one.failed for one in batches)
        is_cut = len(batches) >= MAX_BATCHES_SHOWN
        sums = gettext("%(ended)s of %(total)s jobs of the tree ended, %(failed)s failed") % {
            "ended": format_number(total - pending),
            "total": format_number(total),
            "failed": format_number(failed),
        }
        note = gettext("Only %(number)s of its batches are shown.") % {"number": len(batches)} if is_cut else ""
        return format_html(
            '<p>{}</p><div class="faktory-wide"><table class="faktory-tree" aria-label="{}">'
            "{}</table></div><div>{}</div>",
            sums,
            gettext("Tree of batches"),
            format_html_join("", row, lines),
            note,
        )

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Add the button that retries failed jobs."""
        batch = kwargs.get("obj")
        may_retry = batch is not None and self.has_retry_permission(request)
        return super().render_change_form(request, context | {"may_retry": may_retry}, *args, **kwargs)

    @admin.action(description=_("Retry failed jobs and callbacks"), permissions=["retry"])
    def retry_failed(self, request: HttpRequest, queryset: QuerySet[Batch]) -> None:
        """Requeue the members and callbacks that are dead or wait for a retry, of nested batches too."""
        count = bulk.retry_batches(queryset.values_list("bid", flat=True), using=conf.get("DATABASE"))
        # The log needs the names only; the texts of callbacks may be long.
        log_action(request, queryset.defer(None).defer("complete", "success"), gettext_noop("Retried failed jobs"))
        message = gettext("Nothing to retry: no job has failed.")
        if count:
            message = ngettext("Retried %(number)s job.", "Retried %(number)s jobs.", count)
            message %= {"number": format_number(count)}
        self.message_user(request, message, messages.SUCCESS if count else messages.WARNING)


def _mark_failing_below(rows: list[Any]) -> None:
    """Mark batches with a failed batch below them."""
    has_parents = any(row.children for row in rows)
    failing = batch_tree.find_failing_ancestors(using=conf.get("DATABASE")) if has_parents else set()
    for row in rows:
        row.is_failing_below = row.bid in failing


def _read_tree(batch: Any) -> list[Batch]:
    """Return the tree of the batch, read once for its page."""
    if not hasattr(batch, "shown_tree"):
        batch.shown_tree = batch_tree.tree_of(batch, max_count=MAX_BATCHES_SHOWN)
    tree: list[Batch] = batch.shown_tree
    return tree


def _format_stage(batch: Batch, *, is_failing_below: bool = False) -> SafeString | str:
    if batch.success_st == CallbackProgress.FINISHED:
        return gettext("succeeded")
    problem = _find_problem(batch, is_failing_below=is_failing_below)
    if is_open(batch) and not (batch.is_expired or batch.is_broken):
        return gettext("reopened") if batch.is_committed else gettext("not committed")
    return _mark_bad(problem) if problem else str(_STAGES["running"])


def _find_problem(batch: Batch, *, is_failing_below: bool) -> str:
    problems = (
        # Before `is_broken`, which an expiry sets too: this text says more.
        (batch.is_expired, gettext("expired: not committed in time")),
        (batch.is_broken, str(_STAGES["broken"])),
        (batch.complete_failed or batch.success_failed, gettext("a callback failed")),
        (batch.failed, str(_STAGES["failing"])),
        (is_failing_below, gettext("a nested batch is failing")),
    )
    return next((text for is_true, text in problems if is_true), "")


def _mark_bad(text: str) -> SafeString:
    return format_html('<span class="faktory-bad faktory-together">{}</span>', text)


def _render_callback(batch: Batch, kind: Kind) -> SafeString | str:
    text = getattr(batch, kind)
    if not text:
        return "–"
    progress = CallbackProgress(getattr(batch, f"{kind}_st"))
    jobtype = _read_jobtype(text).rpartition(".")[2] or gettext("a long job")
    if progress is CallbackProgress.NOT_YET:
        return format_html('{}: <span class="faktory-quiet">{}</span>', jobtype, _PROGRESS_LABELS[progress])
    has_failed = getattr(batch, f"{kind}_failed")
    label = _mark_bad(gettext("failed")) if has_failed else _PROGRESS_LABELS[progress]
    return format_html('{}: <a href="{}">{}</a>', jobtype, jobs_link(q=getattr(batch, f"{kind}_jid")), label)


def _read_jobtype(text: str) -> str:
    """Return the jobtype in a job's text; "" if the text is cut or is no job."""
    try:
        return str(decode(text)["jobtype"])
    except (FaktoryError, KeyError, TypeError):
        return ""
