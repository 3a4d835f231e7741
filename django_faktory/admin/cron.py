"""Admin pages of cron entries: next times, history, pause, resume, run now, and editing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import get_language, gettext
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..core.cron import Schedule, zone_of
from ..core.json import jsontext
from ..errors import InvalidCron
from ..models.cron import CronEntry, CronRun
from ..operations.serializers import cron_call_of
from ..store import texts
from ..store.cron import entries as cron_entries
from ..store.cron import runs as cron_runs
from ..tasks import base, cron, redaction
from .base import map_fields
from .formats import StrOrPromise, column, error_text, render_time, time_column
from .labels import CRON_STATES, OUTCOMES
from .links import jobs_link
from .long_texts import LongText, long_text_column
from .object_actions import AnyModelForm, ObjectAction, ObjectActionsMixin

NEXT_TIMES = 5
# The database keeps the last 100 runs of an entry (ADR 0014).
RUNS_SHOWN = 50
DEFINITION_FIELDS = cron_entries.CronDefinition._fields
_TEXTS = ("args", "kwargs", "job")
_SHOWN_FIELDS = {field: f"shown_{field}" for field in _TEXTS}
_FORM_FIELD_OF = {"window": "window_s", "task": "jobtype"}
"""Form fields by the names that settings and their errors use."""


class CronEntryForm(AnyModelForm):
    """Form for entries of the admin; errors are shown at their field."""

    class Meta:
        model = CronEntry
        fields = DEFINITION_FIELDS
        widgets: ClassVar = {field: forms.Textarea({"rows": 3}) for field in ("args", "kwargs", "job")}
        help_texts: ClassVar = {
            "schedule": _("Cron expression with 5 fields (or 6, seconds first), or @daily, @hourly …"),
            "zone": _('The time zone of the schedule, such as "Europe/Berlin".'),
            "jobtype": _("A task of this project, or the jobtype of a worker in another language."),
            "queue": _("Leave empty to use the task's queue."),
            "args": _("JSON array."),
            "kwargs": _("JSON object; for tasks of this project."),
            "job": _("JSON object: retry, reserve_for, priority, backtrace, custom; for jobtypes without a task here."),
            "missed": _("If no node enqueued a run within a minute: skip it, run the latest once, or run all."),
            "window_s": _("How far back to look for missed runs, in seconds."),
            "overlap": _("While an earlier job of this entry waits or runs: allow another, or skip it."),
        }

    def clean(self) -> dict[str, Any]:
        """Validate like entries of the settings, so that no node finds an entry that it cannot run."""
        cleaned: dict[str, Any] = super().clean() or {}
        base.import_tasks()  # a web process may not have imported all tasks
        # Each field by itself first, so that the page shows all errors at once; then the fields together.
        if "schedule" in cleaned:
            self._report(lambda: Schedule.of(cleaned["schedule"], "UTC"))
        if "zone" in cleaned:
            self._report(lambda: zone_of(cleaned["zone"]))
        for field in _TEXTS:
            if field in cleaned:
                self._report(lambda field=field: cron.decode_member(field, cleaned[field]))  # type: ignore[misc]
        if not self.errors:
            self._report(lambda: self._check(cleaned))
        return cleaned

    def _report(self, check: Callable[[], object]) -> None:
        """Run the check; add its error to its field."""
        try:
            check()
        except InvalidCron as error:
            field = error.field.partition(".")[0]
            field = _FORM_FIELD_OF.get(field, field)
            self.add_error(field if field in self.fields else None, ValidationError(error_text(error)))

    def _check(self, cleaned: dict[str, Any]) -> None:
        if self.instance.origin == CronEntry.EntryOrigin.CODE:  # its fields are not in the form
            return
        edited = CronEntry(**{field: cleaned.get(field, getattr(self.instance, field)) for field in DEFINITION_FIELDS})
        definition = cron.build_definition(cron.members_of(edited), is_json=True)
        cleaned.update(args=definition.args, kwargs=definition.kwargs, job=definition.job)


def _build_redactor(field: str) -> Callable[[CronEntry, str], str]:
    def redact(entry: CronEntry, text: str) -> str:
        return jsontext.encode(cron_call_of(CronEntry(jobtype=entry.jobtype, **{field: text}))[field])

    return redact


_STATE_OF = {"active": "active", "paused": "paused", "removed from code": "removed", "never runs": "never"}
"""The states of entries by the values of the filter, which are in addresses."""


class CronStateFilter(admin.SimpleListFilter):
    """Filter entries by whether they are due at some time."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, StrOrPromise]]:  # noqa: ARG002
        """Return the states, with the names that the list shows."""
        return [(value, CRON_STATES[state]) for value, state in _STATE_OF.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[CronEntry]) -> QuerySet[CronEntry]:  # noqa: ARG002
        """Return the entries in the chosen state."""
        # The conditions are those of `CronEntry.state`, as filters of columns.
        match self.value():
            case "active":
                return queryset.filter(next_at__isnull=False)
            case "paused":
                return queryset.filter(paused_at__isnull=False, removed_at=None)
            case "removed from code":
                return queryset.filter(removed_at__isnull=False)
            case "never runs":
                return queryset.filter(next_at=None, paused_at=None, removed_at=None)
        return queryset


def _pause(entry: CronEntry, _: HttpRequest) -> str:
    is_changed = cron_entries.pause([entry.pk], using=conf.get("DATABASE"))
    return gettext("paused.") if is_changed else gettext("was paused already.")


def _resume(entry: CronEntry, _: HttpRequest) -> str:
    is_changed = cron_entries.resume([entry.pk], using=conf.get("DATABASE"))
    return gettext("resumed.") if is_changed else gettext("was not paused.")


def _run_now(entry: CronEntry, _: HttpRequest) -> str:
    return gettext("enqueued as %(job)s.") % {"job": cron.run_now(entry, using=conf.get("DATABASE")).jid}


def _format_time(entry: CronEntry, moment: Any) -> SafeString:
    # An entry with an invalid zone must still have a page on which it can be corrected.
    try:
        local = moment.astimezone(Schedule.of(entry.schedule, entry.zone).zone)
    except InvalidCron:
        local = moment
    text = f"{local:%Y-%m-%d %H:%M:%S %Z}"
    return format_html('<time class="faktory-together" datetime="{}">{}</time>', local.isoformat(), text)


def _render_history(entry: CronEntry, *, has_notes: bool = False) -> SafeString | str:
    using = conf.get("DATABASE")
    runs = list(CronRun.objects.filter(entry=entry).order_by("-id")[:RUNS_SHOWN])
    # ACK does not update runs (ADR 0014), so the current outcomes are read from the jobs.
    outcomes = cron_runs.read_outcomes([run.jid for run in runs if run.jid], using=using)
    lines = [
        (
            _format_time(entry, run.tick) if run.tick else gettext("manually"),
            render_time(run.at),
            OUTCOMES[outcomes.get(run.jid) or run.outcome],
            format_html('<a href="{}">{}</a>', jobs_link(q=run.jid), run.jid) if run.jid else "–",
            *([run.note] if has_notes else []),
        )
        for run in runs
    ]
    if not lines:
        return gettext("no runs yet")
    names = [gettext("scheduled for"), gettext("enqueued at"), gettext("result"), gettext("job")]
    if has_notes:
        names.append(gettext("note"))
    head = format_html_join("", '<th scope="col">{}</th>', [(name,) for name in names])
    row = SafeString(f"<tr>{'<td>{}</td>' * len(names)}</tr>")
    return format_html(
        '<div class="faktory-wide"><table aria-label="{}"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>',
        gettext("Latest runs"),
        head,
        format_html_join("", row, lines),
    )


@admin.register(CronEntry)
class CronEntryAdmin(ObjectActionsMixin):
    """Show, pause and run all entries; edit entries created in the admin."""

    form = CronEntryForm
    list_display = ("name", "state", "next_time", "latest_run", "schedule", "jobtype")
    list_filter = (CronStateFilter, "origin")
    search_fields = ("name", "jobtype")
    ordering = ("name",)
    object_actions: ClassVar = {
        "pause": ObjectAction(_pause, _("Pause"), _("Paused"), "cronentry.pause"),
        "resume": ObjectAction(_resume, _("Resume"), _("Resumed"), "cronentry.resume"),
        "run_now": ObjectAction(_run_now, _("Run now"), _("Run manually"), "cronentry.run"),
    }
    long_texts: ClassVar = {field: LongText(field, _build_redactor(field)) for field in _TEXTS}
    restricted_fields: ClassVar = {
        **{name: field for field in _TEXTS for name in (field, f"shown_{field}")},
        "noted_history": "note",
    }
    readonly_fields = (
        "origin", "state", "in_words", "next_times", "history", "noted_history", "created", *_SHOWN_FIELDS.values(),
    )  # fmt: skip
    fieldsets = (
        (None, {"fields": ("name", "schedule", "zone", "in_words", "state", "next_times")}),
        (_("History"), {"fields": ("history", "noted_history")}),
        (_("Job"), {"fields": ("jobtype", "queue", "args", "kwargs", "job")}),
        (_("Policies"), {"fields": ("missed", "window_s", "overlap", "origin", "created")}),
    )

    def attach(self, request: HttpRequest, rows: list[Any]) -> None:  # noqa: ARG002
        """Add its latest run to each entry."""
        latest = cron_runs.read_latest([entry.pk for entry in rows], using=conf.get("DATABASE"))
        for entry in rows:
            entry.latest = latest.get(entry.pk)

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        """Preset the project's time zone."""
        return {"zone": settings.TIME_ZONE, **super().get_changeform_initial_data(request)}

    def get_readonly_fields(self, request: HttpRequest, obj: CronEntry | None = None) -> tuple[str, ...]:
        """Return the fields that are not editable.

        These are all fields of an entry from code, and arguments that the user sees only in part. With the arguments
        the jobtype is fixed too: for another jobtype `REDACT` might show everything.
        """
        read_only = tuple(map(str, self.readonly_fields))
        if obj is None:
            return read_only
        if obj.origin == CronEntry.EntryOrigin.CODE:
            # Code wins at the next start of a node, so that an edit would be lost without a notice.
            return (*read_only, *DEFINITION_FIELDS)
        return (*read_only, "jobtype", *_TEXTS) if self._hides_arguments(request, obj) else read_only

    def get_fieldsets(self, request: HttpRequest, obj: CronEntry | None = None) -> Any:
        """Return the sections; a new entry has no history and no next times."""
        if obj is None:
            return [(None, {"fields": DEFINITION_FIELDS})]
        fieldsets = super().get_fieldsets(request, obj)
        if self.may_see_field(request, "noted_history"):
            fieldsets = map_fields(fieldsets, lambda name: None if name == "history" else name)
        if self.has_change_permission(request, obj) and not self._hides_arguments(request, obj):
            return fieldsets
        # The read-only visible parts of the arguments in place of their fields.
        return map_fields(fieldsets, lambda name: _SHOWN_FIELDS.get(name, name))

    def _hides_arguments(self, request: HttpRequest, entry: CronEntry) -> bool:
        """Return whether the user sees only part of the arguments; then they are not editable either."""
        if not all(self.may_see_field(request, field) for field in _TEXTS):
            return True
        # Compared with the stored text: saving a redacted or truncated text would overwrite the original.
        stored = texts.read(entry, *_TEXTS)
        return any(
            not text.is_whole
            or (redaction.is_on() and self.redact_stored(entry, field, text).text != jsontext.compact(text.text))
            for field, text in stored.items()
        )

    def has_change_permission(self, request: HttpRequest, obj: CronEntry | None = None) -> bool:
        """Return whether the user may edit the entry; an entry from code is edited in code."""
        is_here = obj is None or obj.origin != CronEntry.EntryOrigin.CODE
        return is_here and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: CronEntry | None = None) -> bool:
        """Return whether the user may delete the entry; the list's action is not available.

        An entry that the code still defines would be created again at the next start. Only the page of a single entry
        can check that.
        """
        if obj is None or (obj.origin == CronEntry.EntryOrigin.CODE and obj.removed_at is None):
            return False
        return super().has_delete_permission(request, obj)

    def save_model(self, request: HttpRequest, obj: CronEntry, form: Any, change: bool) -> None:  # noqa: ARG002
        """Store the definition only, so that ticks taken by nodes since the form was loaded stay taken."""
        cron_entries.save(obj, using=conf.get("DATABASE"))
        # A misspelled name looks like a task in another language, so this is a warning, not an error.
        if base.find_registered(obj.jobtype) is None:
            text = gettext("No task of this project is called %(task)s: a worker in another language must know it.")
            self.message_user(request, text % {"task": obj.jobtype}, messages.WARNING)

    def buttons(self, row: CronEntry) -> list[str]:
        """Return the possible operations; an entry removed from code has none."""
        # The row is kept for its history only (ADR 0014).
        return [] if row.removed_at else ["run_now", "resume" if row.paused_at else "pause"]

    created = time_column("created_at", _("created"))
    shown_args = long_text_column("args", _("arguments"))
    shown_kwargs = long_text_column("kwargs", _("keyword arguments"))
    shown_job = long_text_column("job", _("job options"))

    @admin.display(description=_("state"))
    def state(self, entry: CronEntry) -> str:
        """Return the state, with the reason if the entry is never due."""
        if entry.state == "never":
            # The stored reason is English.
            try:
                Schedule.of(entry.schedule, entry.zone)
            except InvalidCron as error:
                return error_text(error)
        return str(CRON_STATES[entry.state])

    next_time = column(lambda entry: _format_time(entry, entry.next_at) if entry.next_at else "–", _("next"), "next_at")

    @admin.display(description=_("in words"))
    def in_words(self, entry: CronEntry) -> str:
        """Describe the schedule in English words; in other languages the next times describe it."""
        if not (get_language() or "en").startswith("en"):
            return "–"
        try:
            return Schedule.of(entry.schedule, entry.zone).explain()
        except InvalidCron as error:
            return error_text(error)

    @admin.display(description=_("next times"))
    def next_times(self, entry: CronEntry) -> SafeString | str:
        """Return the next five ticks in the entry's time zone and in UTC.

        For a paused entry: the ticks it would have.
        """
        try:
            ticks = list(islice(Schedule.of(entry.schedule, entry.zone).ticks(timezone.now()), NEXT_TIMES))
        except InvalidCron:
            return "–"
        if entry.zone == "UTC":
            return format_html_join("", "<div>{}</div>", [(_format_time(entry, tick),) for tick in ticks])
        times = [(_format_time(entry, tick), f"{tick:%Y-%m-%d %H:%M:%S} UTC") for tick in ticks]
        return format_html_join("", "<div>{} = {}</div>", times)

    @admin.display(description=_("latest run"))
    def latest_run(self, entry: Any) -> SafeString | str:
        """Return the time and the outcome of the latest run."""
        if (run := entry.latest) is None:
            return "–"
        return format_html("{} {}", _format_time(entry, run.tick or run.at), OUTCOMES[run.outcome])

    history = column(_render_history, _("runs"))
    # The note of a refused run may quote arguments.
    noted_history = column(lambda entry: _render_history(entry, has_notes=True), _("runs"))
