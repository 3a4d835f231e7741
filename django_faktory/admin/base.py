"""Base classes of the admin pages: filter parameters, POST requests, log entries of actions.

`FaktoryModelAdmin` lists accept the parameters of their own filters only; `ReadOnlyAdmin` pages accept no POST. Each
action requires its own permission and takes a reason; destructive actions need a confirmation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

from django import forms
from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.filters import FieldListFilter
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME, ActionForm
from django.contrib.admin.utils import get_fields_from_path, unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseNotAllowed,
    HttpResponseRedirect,
)
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.functional import SimpleLazyObject
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import permissions
from ..store import texts
from .formats import StrOrPromise, format_number
from .history import get_reason, translate_entry
from .links import page_url, with_site
from .lists import SafeChangeList
from .long_texts import LongTexts
from .navigation import build_navigation
from .sanitize import with_readable_text

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

REASON_HINT = _("optional, kept in the history")


def requires_permission(action: str) -> Callable[..., bool]:
    """Return a method `has_…_permission` of an admin for this action, `resource.verb`."""
    permissions.needs(action)  # an unknown action fails at import

    def has_permission(_self: Any, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG001  (Django's signature)
        return permissions.may(request.user, action)

    return has_permission


def map_fields(fieldsets: Any, change: Callable[[Any], Any]) -> list[Any]:
    """Return the fieldsets with the results of `change` as fields; without those of which it is None."""
    changed = [
        (title, options, [field for field in map(change, options["fields"]) if field is not None])
        for title, options in fieldsets
    ]
    # A title without fields would reveal what is hidden from the user.
    return [(title, {**options, "fields": fields}) for title, options, fields in changed if fields]


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


class FaktoryModelAdmin(LongTexts):
    """Admin with the package's style sheet and script. Its list accepts the parameters of its own filters only."""

    link_parameters: tuple[str, ...] = ()
    """Fields by which links of other pages filter this list, without a filter on the list itself."""

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
        fieldsets = super().get_fieldsets(request, obj)
        return map_fields(fieldsets, lambda name: name if self.may_see_field(request, str(name)) else None)

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

    views: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Pages in addition to Django's, by their route: the method, and the name of the address."""

    def get_urls(self) -> list[URLPattern]:
        """Return the addresses, those of `views` first: the last pattern of Django matches any."""
        views = {route: view for cls in type(self).__mro__ for route, view in vars(cls).get("views", {}).items()}
        wrap = self.admin_site.admin_view
        own = [path(route, wrap(getattr(self, m)), name=f"django_faktory_{name}") for route, (m, name) in views.items()]
        return [*own, *super().get_urls()]

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

    def report(self, request: HttpRequest, text: str, unchanged: int, skipped: str) -> None:
        """Report the result of an action on several rows, and how many of them it has skipped."""
        text += f" {skipped % {'number': format_number(unchanged)}}" if unchanged else ""
        self.message_user(request, text, messages.WARNING if unchanged else messages.SUCCESS)

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
