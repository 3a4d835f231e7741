"""Base classes of the admin pages: which parameters an address may have, what a POST may write, how acts are recorded.

Lists are filtered by their own filters only, and pages that only show accept no POST. Each act requires its own
permission and asks for a reason; acts that destroy ask for confirmation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from django import forms
from django.apps import apps
from django.contrib import admin
from django.contrib.admin.filters import FieldListFilter
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME, ActionForm
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import get_fields_from_path
from django.contrib.admin.views.main import ORDER_VAR, ChangeList
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.template.response import TemplateResponse
from django.urls import URLPattern
from django.utils.functional import cached_property

from . import permissions
from .readable import with_readable_text

if TYPE_CHECKING:
    AnyAdmin = admin.ModelAdmin[Any]
    CappedBase = Paginator[Any]
    AnyQuerySet = QuerySet[Any]
else:  # Django's own classes take no type parameters at run time
    AnyAdmin = admin.ModelAdmin
    CappedBase = Paginator
    AnyQuerySet = QuerySet


SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class AtLeast(int):
    """A number that counting ended at; there are more. Pages say so, whoever prints it."""

    def __str__(self) -> str:
        return f"{int(self):,}+"


class CappedPaginator(CappedBase):
    """Counts no further than `cap` rows: a list of millions opens as fast as a list of ten thousand."""

    cap = 10_000

    @cached_property
    def count(self) -> int:
        """How many rows there are, at most `cap`."""
        rows: Any = self.object_list
        some = rows[: self.cap + 1] if isinstance(rows, list) else rows.order_by()[: self.cap + 1]
        count = len(some) if isinstance(some, list) else some.count()
        return AtLeast(self.cap) if count > self.cap else count


def asks(act: str) -> Callable[..., bool]:
    """Return a method `has_…_permission` of an admin for this act, `resource.verb`."""
    permissions.needs(act)  # an act without an entry fails at import

    def has_permission(_: Any, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG001  (Django's signature)
        return permissions.may(request.user, act)

    return has_permission


def why(request: HttpRequest) -> str:
    """The reason somebody gave."""
    return request.POST.get("why", "").strip()[:500]


def log(request: HttpRequest, rows: Iterable[Model], done: str) -> None:
    """Put on record who has done this to each, and why."""
    said = told(request, done)
    found = list(rows)
    if not found:
        return
    kind = ContentType.objects.get_for_model(found[0], for_concrete_model=False)
    user_id: Any = request.user.pk
    LogEntry.objects.bulk_create(
        LogEntry(
            user_id=user_id, content_type=kind, object_id=row.pk, object_repr=str(row)[:200], action_flag=CHANGE,
            change_message=said,
        )
        for row in found
    )  # fmt: skip


def told(request: HttpRequest, done: str) -> str:
    """What was done, with the reason where one was given."""
    reason = why(request)
    return f"{done}: {reason}" if reason else f"{done}."


def is_in_unfold() -> bool:
    """Whether django-unfold draws the admin: it shows no titles, and its script must know of an action once chosen."""
    return apps.is_installed("unfold")


def looks() -> forms.Media:
    """Our style sheet; and what it lacks where django-unfold draws the admin."""
    files = ["django_faktory/admin.css"]
    if is_in_unfold():
        files.insert(0, "django_faktory/unfold.css")
    return forms.Media(css={"all": files})


class SafeChangeList(ChangeList):
    """A change list that is sorted by the columns its page offers, and by no others."""

    def get_filters(self, request: HttpRequest) -> Any:
        """Reject values with NUL, which PostgreSQL refuses to compare."""
        found = super().get_filters(request)
        if any("\x00" in value for values in self.get_filters_params().values() for value in values):
            raise IncorrectLookupParameters
        return found

    def get_ordering(self, request: HttpRequest, queryset: AnyQuerySet) -> Any:
        """Ignore columns that are not in `sortable_by`: Django only leaves their links out, and still sorts by them."""
        asked = self.params.pop(ORDER_VAR, "").split(".")
        by_column = {self._column(one): one for one in reversed(asked)}
        offered = [
            one for one in asked if by_column[self._column(one)] is one and self._column(one) in self.sortable_by
        ]
        if offered:
            self.params[ORDER_VAR] = ".".join(offered)
        return super().get_ordering(request, queryset)

    def _column(self, part: str) -> str:
        """Return the column that a part of the parameter `o` names, "" for none."""
        try:
            return str(self.list_display[int(part.rpartition("-")[2])])
        except (IndexError, ValueError):
            return ""


class ReasonForm(ActionForm):
    """Beside the choice of an action: why."""

    why = forms.CharField(
        label="Why", required=False, max_length=500, widget=forms.TextInput({"placeholder": "reason, for the record"})
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if is_in_unfold():
            self.fields["action"].widget.attrs["x-model"] = "action"


class Styled(AnyAdmin):
    """A page with our own style sheet and script. Its list takes the parameters of its own filters only."""

    link_parameters: tuple[str, ...] = ()
    """Fields that links of our pages filter this list by, without a filter on the list itself."""

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:  # noqa: ARG002
        """Return whether the list may be filtered by this parameter.

        Django admits every look-up of the model's own fields: `?payload__startswith=` would find out what `REDACT`
        hides letter by letter, and `?payload__regex=` may keep the process busy for hours.
        """
        return lookup in self._parameters(request)

    def _parameters(self, request: HttpRequest | None) -> set[str]:
        found = set(self.link_parameters)
        if self.date_hierarchy:
            found |= {f"{self.date_hierarchy}__{part}" for part in ("year", "month", "day")}
        chosen: Any = self.list_filter if request is None else self.get_list_filter(request)
        for one in chosen:
            if callable(one):
                found.add(one.parameter_name)
                continue
            path, create = one if isinstance(one, tuple | list) else (one, FieldListFilter.create)
            field = get_fields_from_path(self.model, path)[-1]
            found.update(create(field, request, {}, self.model, self, field_path=path).expected_parameters())
        return found

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:  # noqa: ARG002
        """Return the class of the list."""
        return self.list_class

    list_class: type[ChangeList] = SafeChangeList

    def changeform_view(
        self, request: HttpRequest, object_id: str | None = None, form_url: str = "", extra_context: Any = None
    ) -> Any:
        """Reject `_saveasnew` unless the page offers it: Django obeys it either way."""
        if "_saveasnew" in request.POST and not self.save_as:
            raise PermissionDenied
        return super().changeform_view(request, object_id, form_url, extra_context)

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Reject a POST: there is nothing to write."""
        if request.method not in SAFE_METHODS:
            return HttpResponseNotAllowed(SAFE_METHODS)
        return super().history_view(request, object_id, extra_context)

    @property
    def media(self) -> forms.Media:
        """Django's, and ours."""
        return super().media + looks() + forms.Media(js=["django_faktory/admin.js"])

    action_form = ReasonForm
    show_facets = admin.ShowFacets.NEVER  # they count whole tables
    show_full_result_count = False  # so does that, beside a filtered list's own count

    @property
    def urls(self) -> list[URLPattern]:
        """Those of `get_urls`; what they show of clients' texts is readable."""
        found = self.get_urls()
        for one in found:
            one.callback = with_readable_text(one.callback)
        return found

    def confirmed(
        self, request: HttpRequest, question: str, *, what: Iterable[object], note: str, button: str
    ) -> HttpResponse | None:
        """A page that asks once more, and None where that was answered with yes."""
        if "confirmed" in request.POST:
            return None
        kept = {"action": request.POST.get("action", ""), "why": why(request), "confirmed": "yes"}
        context = {
            **self.admin_site.each_context(request),
            "title": question,
            "opts": self.opts,
            "media": self.media,
            "shows_title": is_in_unfold(),
            "what": [str(one) for one in what],
            "note": note,
            "button": button,
            "kept": [(name, value) for name, value in kept.items() if name != "why"],
            "why": kept["why"],
            "chosen": [(ACTION_CHECKBOX_NAME, pk) for pk in request.POST.getlist(ACTION_CHECKBOX_NAME)],
            "back": request.get_full_path(),
        }
        return TemplateResponse(request, "admin/django_faktory/confirm.html", context)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Named for what it lists: nothing is selected to be changed."""
        title = {"title": str(self.opts.verbose_name_plural).capitalize()}
        return super().changelist_view(request, {**title, **(extra_context or {})})

    def page(self, request: HttpRequest, name: str, **context: Any) -> HttpResponse:
        """A page of our own in the admin's frame."""
        whole: Mapping[str, Any] = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "shows_title": is_in_unfold(),
            **context,
        }
        return TemplateResponse(request, f"admin/django_faktory/{name}.html", dict(whole))


class LookOnly(Styled):
    """No adding, editing or deleting by Django's forms: rows change by acts, which have addresses of their own."""

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002
        """Return False for every user."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002
        """Return False for every user: Django would write all columns back as they were when the page was read."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002
        """Return False for every user."""
        return False

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the row; reject a POST."""
        if request.method not in SAFE_METHODS:
            return HttpResponseNotAllowed(SAFE_METHODS)
        buttons = dict.fromkeys(("show_save", "show_save_and_continue", "show_save_and_add_another"), False)
        title = {"title": f"{self.model._meta.verbose_name}".capitalize()}  # noqa: SLF001
        return super().change_view(request, object_id, form_url, {**title, **buttons, **(extra_context or {})})

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:  # noqa: ARG002
        """All there is."""
        return [*(field.name for field in self.model._meta.fields), *self.extra_fields]  # noqa: SLF001

    extra_fields: tuple[str, ...] = ()
