"""What pages of the admin share: they only show, each act asks for a permission of its own and for a reason, and what
destroys is asked for once more. Nothing is added, edited or deleted by forms of Django's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from django import forms
from django.apps import apps
from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME, ActionForm
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.paginator import Paginator
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern
from django.utils.functional import cached_property

from . import permissions
from .readable import with_readable_text

if TYPE_CHECKING:
    AnyAdmin = admin.ModelAdmin[Any]
    CappedBase = Paginator[Any]
else:  # Django's own classes take no type parameters at run time
    AnyAdmin = admin.ModelAdmin
    CappedBase = Paginator


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
    """With our own looks, from our own files: nothing inline."""

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
    """No adding, editing or deleting: rows change by verbs only."""

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002
        """Nobody adds."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002
        """Nobody deletes."""
        return False

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """A page to read: nothing on it can be saved."""
        buttons = dict.fromkeys(("show_save", "show_save_and_continue", "show_save_and_add_another"), False)
        title = {"title": f"{self.model._meta.verbose_name}".capitalize()}  # noqa: SLF001
        return super().change_view(request, object_id, form_url, {**title, **buttons, **(extra_context or {})})

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:  # noqa: ARG002
        """All there is."""
        return [*(field.name for field in self.model._meta.fields), *self.extra_fields]  # noqa: SLF001

    extra_fields: tuple[str, ...] = ()
