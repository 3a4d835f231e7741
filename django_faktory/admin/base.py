"""Base classes of the admin pages: filter parameters, POST requests, long texts, log entries of actions.

`FaktoryModelAdmin` lists accept the parameters of their own filters only; `ReadOnlyAdmin` pages accept no POST. Each
action requires its own permission and takes a reason; destructive actions need a confirmation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from django import forms
from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.filters import FieldListFilter
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME, ActionForm
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import get_fields_from_path, quote, unquote
from django.contrib.admin.views.main import ORDER_VAR, ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.db.models.functions import Substr
from django.http import (
    FileResponse,
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseNotAllowed,
    HttpResponseRedirect,
)
from django.http.response import HttpResponseBase
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.functional import SimpleLazyObject, cached_property
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import permissions
from ..store import texts
from ..tasks import redaction
from .formats import StrOrPromise, format_number
from .history import get_reason, translate_entry
from .links import page_url, with_site
from .navigation import build_navigation
from .sanitize import with_readable_text

if TYPE_CHECKING:
    AnyAdmin = admin.ModelAdmin[Any]
    CappedBase = Paginator[Any]
    AnyQuerySet = QuerySet[Any]
else:  # Django's own classes take no type parameters at run time
    AnyAdmin = admin.ModelAdmin
    CappedBase = Paginator
    AnyQuerySet = QuerySet


SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

REASON_HINT = _("optional, kept in the history")

MAX_COUNTED = 10_000
"""Maximum number of rows that a list counts."""


class LowerBound(int):
    """A lower bound at which counting stopped; its text ends with a plus sign."""

    def __str__(self) -> str:
        return f"{format_number(int(self))}+"


def format_capped(count: int, limit: int) -> str:
    """Format a count that ends at `limit`: "5,000+" for any larger number, and for `LowerBound` its own text."""
    if isinstance(count, LowerBound):
        return str(count)
    return f"{format_number(limit)}+" if count > limit else format_number(count)


class CappedPaginator(CappedBase):
    """Paginator that counts at most `max_count` rows: a list of millions opens as fast as one of ten thousand."""

    def __init__(self, *args: Any, max_count: int = MAX_COUNTED, **options: Any) -> None:
        super().__init__(*args, **options)
        self._max_count = max_count

    @cached_property
    def count(self) -> int:
        """The number of rows, at most `max_count`."""
        rows: Any = self.object_list
        # One row more than the maximum shows whether there are more.
        # order_by() without arguments removes the order, which the count does not need.
        count = len(rows) if isinstance(rows, list) else rows.order_by()[: self._max_count + 1].count()
        return LowerBound(self._max_count) if count > self._max_count else count


def requires_permission(action: str) -> Callable[..., bool]:
    """Return a method `has_…_permission` of an admin for this action, `resource.verb`."""
    permissions.needs(action)  # an unknown action fails at import

    def has_permission(_self: Any, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG001  (Django's signature)
        return permissions.may(request.user, action)

    return has_permission


def back_to(request: HttpRequest, default: str) -> HttpResponseRedirect:
    """Redirect to the page that the form names in `back`, if it is one of this site."""
    page = request.POST.get("back", "")
    is_own = url_has_allowed_host_and_scheme(page, {request.get_host()}, require_https=request.is_secure())
    return HttpResponseRedirect(page if is_own else default)


def is_in_unfold() -> bool:
    """Return True if django-unfold renders the admin.

    It shows no titles, and its script must be notified of the chosen action.
    """
    return apps.is_installed("unfold")


def get_media() -> forms.Media:
    """Return the style sheet, and before it the one that defines its variables in another theme of the admin."""
    files = ["django_faktory/admin.css"]
    # These themes have none of the CSS variables of Django's admin that admin.css uses.
    files[:0] = [f"django_faktory/{theme}.css" for theme in ("unfold", "jazzmin") if apps.is_installed(theme)]
    return forms.Media(css={"all": files})


class LongText(NamedTuple):
    """A column with long texts: the permission that shows it, its redaction, and its file type."""

    field: str = ""
    """Its name in `permissions.FIELDS`; "" if the permission to view the row suffices."""
    redact: Callable[[Any, str], str] | None = None
    """Return the visible part of a row's text; None if `REDACT` does not apply to the column."""
    is_json: bool = True


class ShownText(NamedTuple):
    """The part of a text that a page shows, and the address of the whole text."""

    text: str
    size: int
    is_cut: bool
    url: str


def build_shown_text(stored: texts.StoredText, url: str, text: str | None = None) -> ShownText:
    """Return the beginning of a stored text, or of `text` if that is given instead."""
    full_text = texts.format_json(stored.text) if text is None else text
    beginning = texts.cut(full_text)
    return ShownText(beginning, stored.size, not stored.is_whole or len(beginning) < len(full_text), url)


def long_text_column(column: str, description: StrOrPromise) -> Callable[[Any, Any], SafeString]:
    """Return a method that shows the visible beginning of this long text of a row, with a link to its download."""

    @admin.display(description=description)
    def show(model_admin: FaktoryModelAdmin, row: Model) -> SafeString:
        text = model_admin.read_shown_texts(row, column)[column]
        return render_to_string("admin/django_faktory/long_text.html", {"text": text})

    return show


class SafeChangeList(ChangeList):
    """A change list that is sorted by the columns its page offers, and reads the beginnings of long texts only."""

    def get_results(self, request: HttpRequest) -> None:
        """Read the columns of `beginnings` up to their length. These rows are for display: nothing saves them."""
        model_admin: Any = self.model_admin
        lengths: Mapping[str, int] = model_admin.beginnings
        annotations = {f"{column}_beginning": Substr(column, 1, length) for column, length in lengths.items()}
        self.queryset = self.queryset.annotate(**annotations)
        super().get_results(request)
        if not self.result_count:
            self.result_list = self.queryset.none()  # a search that found nothing does not run a second time
        # A list: iterating the queryset again would load rows without the attributes.
        rows: list[Any] = list(self.result_list)
        for row in rows:
            # Fills the deferred columns: reading one would load the whole text, with one query for each row.
            row.__dict__.update({column: getattr(row, f"{column}_beginning") for column in lengths})
        if rows:
            model_admin.attach(request, rows)
        self.result_list = rows

    def get_filters(self, request: HttpRequest) -> Any:
        """Reject values with NUL, which PostgreSQL refuses to compare."""
        filters = super().get_filters(request)
        # Django answers this exception with a redirect to the list without filters, and that of the driver with a 500.
        if any("\x00" in value for values in self.get_filters_params().values() for value in values):
            raise IncorrectLookupParameters
        return filters

    def get_ordering(self, request: HttpRequest, queryset: AnyQuerySet) -> Any:
        """Ignore columns that are not in `sortable_by`: Django only omits their links, and still sorts by them."""
        requested: dict[str, str] = {}
        for term in self.params.pop(ORDER_VAR, "").split("."):
            requested.setdefault(self._column(term), term)  # once each: databases limit the terms of ORDER BY
        allowed = [term for column, term in requested.items() if column in (self.sortable_by or ())]
        if allowed:
            self.params[ORDER_VAR] = ".".join(allowed)
        return super().get_ordering(request, queryset)

    def _column(self, term: str) -> str:
        """Return the column that a part of the parameter `o` names, "" for none."""
        try:
            # Django numbers the columns; a minus before the number sorts in descending order.
            return str(self.list_display[int(term.rpartition("-")[2])])
        except (IndexError, ValueError):
            return ""


class ReasonForm(ActionForm):
    """Form of the action bar, extended by a reason."""

    why = forms.CharField(
        label=_("Reason"),
        required=False,
        max_length=500,
        widget=forms.TextInput({"placeholder": REASON_HINT}),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Binds the choice to the variable `action` of Unfold's script.
        if is_in_unfold():
            self.fields["action"].widget.attrs["x-model"] = "action"


class FaktoryModelAdmin(AnyAdmin):
    """Admin with the package's style sheet and script. Its list accepts the parameters of its own filters only."""

    link_parameters: tuple[str, ...] = ()
    """Fields by which links of other pages filter this list, without a filter on the list itself."""

    long_texts: ClassVar[Mapping[str, LongText]] = {}
    """Columns that no list and no page reads whole; they can be downloaded."""

    beginnings: ClassVar[Mapping[str, int]] = {}
    """Columns of `long_texts` that the list shows, and the number of characters it reads of each."""

    gone_because: StrOrPromise = _("perhaps it was deleted")
    """Why a row that a link leads to may be gone."""

    def attach(self, request: HttpRequest, rows: list[Any]) -> None:
        """Add to the rows of a page what its list shows and no column has, read at once for all of them."""

    restricted_fields: ClassVar[Mapping[str, str]] = {}
    """Columns and fields of pages that show a field of `permissions.FIELDS`, and its name there."""

    # By resource, never by object: with millions of jobs lists cannot check each row (ADR 0034).
    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002
        """Return whether the policy shows this resource to the user."""
        return permissions.may_see(request.user, str(self.opts.model_name))

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may edit. A form also shows the data, so both permissions are needed."""
        return self.has_view_permission(request, obj) and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may delete. The confirmation page also shows the data."""
        return self.has_view_permission(request, obj) and super().has_delete_permission(request, obj)

    def may_see_field(self, request: HttpRequest, name: str) -> bool:
        """Return whether the policy shows this column or field of the page to the user."""
        field = self.restricted_fields.get(name)
        return field is None or permissions.may_see(request.user, str(self.opts.model_name), field)

    def get_list_display(self, request: HttpRequest) -> Any:
        """Omit columns that the policy hides from the user."""
        return [column for column in super().get_list_display(request) if self.may_see_field(request, str(column))]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Omit fields that the policy hides from the user."""
        fieldsets = []
        for title, options in super().get_fieldsets(request, obj):
            fields = [name for name in options["fields"] if self.may_see_field(request, str(name))]
            # A title without fields would reveal what is hidden from the user.
            if fields:
                fieldsets.append((title, {**options, "fields": fields}))
        return fieldsets

    def get_queryset(self, request: HttpRequest) -> AnyQuerySet:
        """Defer the columns with long texts, so that they are not read."""
        return super().get_queryset(request).defer(*self.long_texts)

    def get_urls(self) -> list[URLPattern]:
        """Add the downloads of long texts."""
        if not self.long_texts:
            return super().get_urls()
        view = self.admin_site.admin_view(self._download)
        name = f"{self.opts.app_label}_{self.opts.model_name}_download"
        # Before Django's patterns: the last of them, `<path:object_id>/`, matches this address too.
        return [path("<path:object_id>/download/<slug:column>/", view, name=name), *super().get_urls()]

    def download_url(self, row: Model, column: str) -> str:
        """Return the download address of the whole text."""
        return page_url(f"{self.opts.model_name}_download", quote(row.pk), column)

    def read_shown_texts(self, row: Model, *columns: str) -> dict[str, ShownText]:
        """Read these long texts of a row, in one query, as far as a page shows them."""
        return {
            column: build_shown_text(self.redact_stored(row, column, stored), self.download_url(row, column))
            for column, stored in texts.read(row, *columns).items()
        }

    def redact_stored(self, row: Model, column: str, stored: texts.StoredText) -> texts.StoredText:
        """Apply `REDACT` to a text. A text that was not read whole is hidden."""
        redact = self.long_texts[column].redact
        if redact is None or not stored.size:
            return stored
        if stored.is_whole:
            text = redact(row, stored.text)
            # With its own length: the stored one would make a shorter text count as cut off.
            return texts.StoredText(text, len(text))
        # The beginning of a JSON text cannot be parsed, so the project's function cannot be applied to it.
        return texts.StoredText(redaction.HIDDEN, stored.size) if redaction.is_on() else stored

    def _download(self, request: HttpRequest, object_id: str, column: str) -> HttpResponseBase:
        """Send a text as a file: all of it, redacted as on the page."""
        if request.method not in SAFE_METHODS:
            return HttpResponseNotAllowed(SAFE_METHODS)
        long_text = self.long_texts.get(column)
        model = str(self.opts.model_name)
        # Before the row is read: an answer of 404 would reveal to other users which rows and columns exist.
        if not permissions.may_see(request.user, model, long_text.field if long_text else None):
            raise PermissionDenied
        row = self.get_object(request, unquote(object_id))
        if row is None or long_text is None:
            raise Http404
        text = texts.read_whole(row, column)
        if long_text.redact is not None and text:
            text = long_text.redact(row, text)
        is_json = long_text.is_json
        content_type, extension = ("application/json", "json") if is_json else ("text/plain; charset=utf-8", "txt")
        return FileResponse(
            # Lone surrogates, which JSON allows, cannot be encoded.
            BytesIO(text.encode("utf-8", "replace")),
            as_attachment=True,
            filename=f"{model}-{row.pk}-{column}.{extension}",
            content_type=content_type,
        )

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:  # noqa: ARG002
        """Return whether the list may be filtered by this parameter.

        Django admits every look-up of the model's own fields: `?payload__startswith=` would reveal, letter by letter,
        what `REDACT` hides, and `?payload__regex=` may keep the process busy for hours.
        """
        return lookup in self._parameters(request)

    def _parameters(self, request: HttpRequest | None) -> set[str]:
        names = set(self.link_parameters)
        if self.date_hierarchy:
            names |= {f"{self.date_hierarchy}__{part}" for part in ("year", "month", "day")}
        list_filters: Any = self.list_filter if request is None else self.get_list_filter(request)
        # A filter's own expected_parameters() is the source: a second list of names could differ from it.
        for list_filter in list_filters:
            if callable(list_filter):
                names.add(list_filter.parameter_name)
                continue
            # Django's three forms of an entry: a class of a filter, a field, or a field with the class for it.
            pair: Any = list_filter if isinstance(list_filter, tuple | list) else (list_filter, FieldListFilter.create)
            field_path, create = pair
            field = get_fields_from_path(self.model, field_path)[-1]
            names.update(create(field, request, {}, self.model, self, field_path=field_path).expected_parameters())
        return names

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:  # noqa: ARG002
        return self.list_class

    list_class: type[ChangeList] = SafeChangeList

    def changeform_view(
        self, request: HttpRequest, object_id: str | None = None, form_url: str = "", extra_context: Any = None
    ) -> Any:
        """Reject `_saveasnew` unless the page offers it, because Django obeys it in any case."""
        if "_saveasnew" in request.POST and not self.save_as:
            raise PermissionDenied
        return super().changeform_view(request, object_id, form_url, _add_navigation(request, extra_context))

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> Any:
        """Add the navigation bar."""
        return super().delete_view(request, object_id, _add_navigation(request, extra_context))

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:  # noqa: ARG002
        """List the rows only: Django looks for related rows in the database that its router names."""
        # Related rows, such as runs of a cron entry, need no permission of their own.
        names = [str(obj) for obj in objs]
        return names, {self.opts.verbose_name_plural: len(names)}, set(), []

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Show the history in the language of the reader; reject a POST."""
        if request.method not in SAFE_METHODS:
            return HttpResponseNotAllowed(SAFE_METHODS)
        context = {"media": self.media, **(extra_context or {})}
        response = super().history_view(request, object_id, _add_navigation(request, context))
        if isinstance(response, TemplateResponse) and response.context_data:
            for entry in response.context_data["action_list"]:
                entry.change_message = translate_entry(entry.get_change_message())
        return response

    change_list_template = "admin/django_faktory/list.html"
    change_form_template = "admin/django_faktory/form.html"
    object_history_template = "admin/django_faktory/history.html"
    delete_confirmation_template = "admin/django_faktory/delete.html"

    @property
    def media(self) -> forms.Media:
        """Django's files, and the package's."""
        return super().media + get_media() + forms.Media(js=["django_faktory/admin.js"])

    action_form = ReasonForm
    show_facets = admin.ShowFacets.NEVER  # facets count whole tables
    show_full_result_count = False  # so does this, in addition to the filtered count

    @property
    def urls(self) -> list[URLPattern]:
        """Return the URLs of `get_urls`; pages show control characters as symbols."""
        patterns = self.get_urls()
        for pattern in patterns:
            view = with_site(self.admin_site.name, pattern.callback)
            pattern.callback = with_readable_text(view)
        return patterns

    def confirmation_page(
        self, request: HttpRequest, question: str, *, objects: Iterable[object], note: StrOrPromise, button: str
    ) -> HttpResponse | None:
        """Return a confirmation page, or None if the user has confirmed."""
        if "confirmed" in request.POST:
            return None
        selection = [(ACTION_CHECKBOX_NAME, pk) for pk in request.POST.getlist(ACTION_CHECKBOX_NAME)]
        return self.page(
            request,
            "confirm",
            title=question,
            objects=[str(item) for item in objects],
            note=note,
            button=button,
            # Hidden fields repeat the action and the selection, so that the confirmation posts the same request again.
            hidden_fields=[
                ("action", request.POST.get("action", "")),
                ("confirmed", "yes"),
                ("back", request.POST.get("back", "")),
                *selection,
            ],
            reason=get_reason(request),
            back_url=request.get_full_path(),
        )

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Set the title to the plural name: Django's "select … to change" is wrong for a read-only list."""
        title = {"title": capfirst(str(self.opts.verbose_name_plural))}
        return super().changelist_view(request, _add_navigation(request, {**title, **(extra_context or {})}))

    def response_action(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse | None:
        """Return to the page that has the button, not to the list, if the form names it."""
        response = super().response_action(request, *args, **kwargs)
        list_url = request.get_full_path()
        is_done = isinstance(response, HttpResponseRedirect) and response.url == list_url
        return back_to(request, list_url) if is_done else response

    def answer_get(self, request: HttpRequest, back_url: str) -> HttpResponse:
        """Answer a request other than POST to the address of an action: change nothing, redirect to its page.

        A browser sends a GET if the session ended before the action, and the user has logged in again.
        """
        if request.method != "GET":
            return HttpResponseNotAllowed(["POST"])
        text = gettext("Nothing done. If you had to log in again, repeat the action.")
        self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(back_url)

    def answer_missing(self, request: HttpRequest) -> HttpResponse:
        """Answer an action on a row that another user has deleted: redirect to the list."""
        text = gettext("Nothing done: the %(name)s no longer exists.") % {"name": self.opts.verbose_name}
        return self._redirect_to_list(request, text)

    # Django's own method, which leads to the index of the admin.
    def _get_obj_does_not_exist_redirect(self, request: HttpRequest, opts: Any, object_id: str) -> HttpResponse:
        text = gettext("There is no %(name)s %(key)s: %(reason)s.")
        names = {"name": opts.verbose_name, "key": unquote(object_id), "reason": self.gone_because}
        return self._redirect_to_list(request, text % names)

    def _redirect_to_list(self, request: HttpRequest, text: str) -> HttpResponse:
        self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(page_url(f"{self.opts.model_name}_changelist"))

    def page(self, request: HttpRequest, name: str, *, shows_navigation: bool = True, **context: Any) -> HttpResponse:
        """Return a page of the package inside the admin's frame."""
        page_context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "faktory_nav": build_navigation(request) if shows_navigation else None,
            "shows_title": is_in_unfold(),
            **context,
        }
        return TemplateResponse(request, f"admin/django_faktory/{name}.html", page_context)


def _add_navigation(request: HttpRequest, context: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the context of one of Django's pages with the navigation bar."""
    # Lazy: the views also answer with redirects, after an action or a save, and the bar counts jobs.
    return {"faktory_nav": SimpleLazyObject(partial(build_navigation, request)), **(context or {})}


class ReadOnlyAdmin(FaktoryModelAdmin):
    """Read-only admin: rows change by actions, which have addresses of their own, not by Django's forms."""

    def _has_none(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002
        # Django's form would write all columns back as they were when the page was read.
        return False

    has_add_permission = has_change_permission = has_delete_permission = _has_none

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Read a row with the beginnings of its long texts: it is shown, and never saved."""
        row = super().get_object(request, object_id, from_field)
        if row is not None and self.beginnings:
            row.__dict__.update(texts.read_beginnings(row, self.beginnings))
        return row

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the row; reject a POST."""
        if request.method not in SAFE_METHODS:
            return HttpResponseNotAllowed(SAFE_METHODS)
        buttons = dict.fromkeys(("show_save", "show_save_and_continue", "show_save_and_add_another"), False)
        title = {"title": capfirst(str(self.opts.verbose_name))}
        return super().change_view(request, object_id, form_url, {**title, **buttons, **(extra_context or {})})

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:  # noqa: ARG002
        return [*(field.name for field in self.model._meta.fields), *self.extra_fields]  # noqa: SLF001

    extra_fields: tuple[str, ...] = ()
