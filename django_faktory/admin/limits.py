"""Admin page of limits: shows allowance and usage, and edits, removes or pauses limits while jobs run."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.widgets import AdminTextInputWidget
from django.core.exceptions import ValidationError
from django.db.models import Min, QuerySet, Sum
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..core.limits import Allowance, InvalidLimit, Scope, rate_text
from ..errors import FaktoryError
from ..models import Limit
from ..store.limits import definitions
from ..tasks import limits as task_limits
from .formats import column, error_text, format_number, render_time
from .history import get_reason
from .lists import CappedPaginator
from .object_actions import AnyModelForm, ObjectAction, ObjectActionsMixin

_NUMBERS = ("concurrency", "rate", "burst")


class LimitForm(AnyModelForm):
    """Form of a limit, with the rate as settings write it; an error is shown at its field."""

    rate = forms.CharField(
        label=_("Starts per period"),
        required=False,
        max_length=40,
        widget=AdminTextInputWidget,
        help_text=_('For example "100/s", "10/m", "5/30s".'),
    )

    class Meta:
        model = Limit
        fields = ("scope", "name", "concurrency", "burst")
        help_texts: ClassVar = {
            "name": _("Queue, task or key name. For all keys such as customer:42, enter customer."),
            "concurrency": _("Maximum number of running jobs, on all workers."),
            "burst": _("Largest number of starts at once after an idle period."),
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.rate is not None:
            self.initial["rate"] = rate_text(self.instance.rate, self.instance.per)
        # Set by `clean`: the parsed numbers, for the store. A limit that is only a pause has none.
        self.allowance = Allowance()

    def clean(self) -> dict[str, Any]:
        """Validate with the rules that apply to settings."""
        cleaned: dict[str, Any] = super().clean() or {}
        values = {field: cleaned[field] for field in _NUMBERS if cleaned.get(field) not in (None, "")}
        try:
            # A paused limit without numbers is valid: the pause itself is a limit of zero.
            if values or self.instance.paused_at is None:
                self.allowance = Allowance.of(values)
            if "name" in cleaned:
                cleaned["name"] = task_limits.check_name(cleaned.get("scope", ""), cleaned["name"])
        except InvalidLimit as error:
            # The message begins with the field's name, so it is shown next to that field.
            field = str(error).partition(":")[0]
            self.add_error(field if field in self.fields else None, ValidationError(error_text(error)))
        return cleaned

    def _post_clean(self) -> None:
        """Check uniqueness only. The model instance stays unchanged, because the store writes the row."""
        # Django's own check of uniqueness needs a filled instance, which this form does not have.
        if not self.instance.pk and not self.errors:
            key = {"scope": self.cleaned_data["scope"], "name": self.cleaned_data["name"]}
            if Limit.objects.filter(**key).exists():
                self.add_error("name", ValidationError(gettext("a limit with this name exists; edit it instead")))


def _require_task_name(limit: Limit) -> str:
    if limit.scope != Scope.TASK:
        raise FaktoryError(gettext("only tasks are paused here; queues on their own page"))
    return str(limit.name)


def _pause(limit: Limit, request: HttpRequest) -> str:
    by, reason = request.user.get_username(), get_reason(request)
    is_changed = definitions.pause([_require_task_name(limit)], using=conf.get("DATABASE"), by=by, reason=reason)
    return gettext("paused.") if is_changed else gettext("was paused already.")


def _resume(limit: Limit, _: HttpRequest) -> str:
    is_changed = definitions.resume([_require_task_name(limit)], using=conf.get("DATABASE"))
    return gettext("resumed.") if is_changed else gettext("was not paused.")


def _revert_edit(limit: Limit, _: HttpRequest) -> str:
    is_changed = task_limits.revert_to_code(limit, using=conf.get("DATABASE"))
    return gettext("reset to the value in code.") if is_changed else gettext("was not edited.")


class PausedFilter(admin.EmptyFieldListFilter):
    """Filter limits by whether they are paused."""

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Return the choices with words of their own in place of "Empty" and "Not empty"."""
        words = (_("All"), _("No"), _("Yes"))
        return iter([{**one, "display": word} for one, word in zip(super().choices(changelist), words, strict=True)])


@admin.register(Limit)
class LimitAdmin(ObjectActionsMixin):
    """Admin of limits. A change takes effect at once on all nodes; an edited limit of code keeps the edit."""

    form = LimitForm
    list_display = ("name", "scope", "allows", "in_use", "waiting", "opens_at", "origin")
    list_filter = ("scope", "origin", ("paused_at", PausedFilter))
    search_fields = ("name",)
    ordering = ("scope", "name")
    list_per_page = 50
    paginator = CappedPaginator
    object_actions: ClassVar = {
        "pause": ObjectAction(_pause, _("Pause"), _("Paused"), "limit.pause", _("Pause tasks")),
        "resume": ObjectAction(_resume, _("Resume"), _("Resumed"), "limit.resume", _("Resume tasks")),
        "as_in_code": ObjectAction(_revert_edit, _("Reset to code"), _("Reset to code"), "limit.change"),
    }
    readonly_fields = ("allows", "in_use", "waiting", "opens_at", "origin", "paused")
    fieldsets = (
        (None, {"fields": ("scope", "name", "concurrency", "rate", "burst")}),
        (_("In use"), {"fields": ("allows", "in_use", "waiting", "opens_at", "origin", "paused")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Limit]:
        """Annotate each limit with its usage, summed over its limiters."""
        # A limit of a family of keys has a limiter for each key in use (ADR 0016).
        limits: Any = super().get_queryset(request)
        return limits.annotate(used=Sum("limiters__in_use"), opens=Min("limiters__opens_at"))  # type: ignore[no-any-return]

    def get_readonly_fields(self, request: HttpRequest, obj: Limit | None = None) -> tuple[str, ...]:  # noqa: ARG002
        """Make scope and name read-only once the limit exists."""
        read_only = tuple(map(str, self.readonly_fields))
        # The scope and the name identify the limit to its limiters and to the jobs that wait.
        return ("scope", "name", *read_only) if obj is not None else read_only

    def get_fieldsets(self, request: HttpRequest, obj: Limit | None = None) -> Any:
        """Omit the usage section for a new limit."""
        return super().get_fieldsets(request, obj)[: None if obj else 1]

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """Leave `rate` and `per` out of the model fields: the form edits both as one text."""
        return super().get_form(request, obj, change=change, **{**kwargs, "fields": LimitForm.Meta.fields})

    def save_model(self, request: HttpRequest, obj: Limit, form: Any, change: bool) -> None:  # noqa: ARG002
        """Let the store write the limit, which updates its limiters and unblocks waiting jobs."""
        values = form.cleaned_data
        key = (obj.scope, obj.name) if change else (values["scope"], values["name"])
        written = definitions.save_limit(*key, form.allowance, using=conf.get("DATABASE"))
        obj.__dict__.update(written.__dict__)  # the log entry shows the written values

    def delete_model(self, request: HttpRequest, obj: Limit) -> None:
        """Remove the limit and unblock all jobs that wait for it."""
        definitions.remove(obj, using=conf.get("DATABASE"))
        if obj.removal_warning:
            self.message_user(request, f"{obj.name}: {gettext(obj.removal_warning)}", messages.WARNING)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Limit]) -> None:
        """Remove the limits one by one, because each removal unblocks jobs."""
        for limit in queryset:
            self.delete_model(request, limit)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:  # noqa: ARG002
        """Add what a removal does to a limit of the code."""
        names = [
            f"{limit}. {gettext(limit.removal_warning)}" if limit.removal_warning else str(limit) for limit in objs
        ]
        return names, {self.opts.verbose_name_plural: len(names)}, set(), []

    def buttons(self, row: Limit) -> list[str]:
        """Offer pause or resume for tasks, and the reset of an edit."""
        # An edit overrides code until it is reverted (ADR 0016).
        possible = ["as_in_code"] if row.origin == Limit.Origin.EDITED else []
        if row.scope == Scope.TASK:
            possible.append("resume" if row.paused_at else "pause")
        return possible

    allows = column(attrgetter("localized_allowance"), _("allows"))
    # A limit with a rate only has no permits.
    in_use = column(lambda limit: "–" if limit.concurrency is None else limit.used or 0, _("in use"))
    opens_at = column(lambda limit: render_time(limit.opens), _("next start at"))

    @admin.display(description=_("waiting"))
    def waiting(self, limit: Limit) -> str:
        """Return the number of jobs that wait for it; those of a queue limit stay in their queue."""
        if limit.scope == Scope.QUEUE:
            # None of them is blocked: the claim skips a queue whose limiter is full (ADR 0016).
            return gettext("in the queue")
        count = definitions.count_blocked_jobs(limit, using=conf.get("DATABASE"))
        return format_number(count, is_more=count == definitions.MAX_COUNTED)

    @admin.display(description=_("paused since"))
    def paused(self, limit: Limit) -> SafeString | str:
        """Return since when it is paused, by which user or program, and why."""
        return format_html("{} {}", render_time(limit.paused_at), limit.pause_note) if limit.paused_at else "–"
