"""Admin pages with a button for each operation on a row, and the same operations as list actions.

Each operation requires its own permission, is a POST, and is recorded in the admin log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path

from ..errors import FaktoryError
from ..models import permissions
from .base import FaktoryModelAdmin, requires_permission
from .formats import StrOrPromise, error_text
from .history import log_action
from .links import page_url, row_link

if TYPE_CHECKING:
    AnyModelForm = forms.ModelForm[Any]
else:  # Django's own classes take no type parameters at run time
    AnyModelForm = forms.ModelForm


class ObjectAction(NamedTuple):
    """An operation behind a button: `run(row, request)` returns the outcome as text, or raises FaktoryError."""

    run: Callable[[Any, HttpRequest], str]
    label: StrOrPromise
    done_label: StrOrPromise
    needs: str
    """The permission required, as `resource.verb` (see `permissions`)."""
    list_label: StrOrPromise = ""
    """Label in the menu of the list, if it differs from `label`."""


def add_list_actions(admin_class: type[FaktoryModelAdmin], actions: Mapping[str, tuple[StrOrPromise, str]]) -> None:
    """Add actions to a list by their names, each with its label and the permission that it needs (`resource.verb`).

    Each calls the method `execute` of the admin with the request, the selected rows, and its own name.
    """
    admin_class.actions = tuple(actions)
    for name, (label, needs) in actions.items():
        permission = needs.partition(".")[2]
        setattr(admin_class, name, _build_list_action(name, label, permission))
        # Django's own, such as has_change_permission, stay: `FaktoryModelAdmin` adds conditions to them.
        if not hasattr(admin.ModelAdmin, f"has_{permission}_permission"):
            setattr(admin_class, f"has_{permission}_permission", requires_permission(needs))


def _build_list_action(name: str, label: StrOrPromise, permission: str) -> Callable[..., Any]:
    @admin.action(description=label, permissions=[permission])
    def execute(model_admin: Any, request: HttpRequest, queryset: QuerySet[Any]) -> Any:
        return model_admin.execute(request, queryset, name)

    return execute


class ObjectActionsMixin(FaktoryModelAdmin):
    """Add the operations of `object_actions` as buttons and list actions; messages show the `name` of the row."""

    object_actions: ClassVar[Mapping[str, ObjectAction]]
    """The operations by their names in addresses and forms. Each is also an action of the list."""
    change_form_template = "admin/django_faktory/with_buttons.html"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Only for the class that defines the table: a project's subclass may choose other list actions.
        if "object_actions" in vars(cls):
            list_actions = {verb: (one.list_label or one.label, one.needs) for verb, one in cls.object_actions.items()}
            add_list_actions(cls, list_actions)

    def buttons(self, row: Any) -> list[str]:
        """Return the names of the operations that are possible for this row now."""
        raise NotImplementedError

    def get_urls(self) -> list[URLPattern]:
        """Return the admin's URLs and the URL of the buttons."""
        view = self.admin_site.admin_view(self._action_view)
        name = f"{self.opts.app_label}_{self.opts.model_name}_act"
        return [path("<path:object_id>/act/<str:verb>/", view, name=name), *super().get_urls()]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Add the buttons that this user may press to the context."""
        row: Any = kwargs.get("obj")
        # A new object has no buttons: there is nothing to operate on yet.
        possible = [] if row is None else self.buttons(row)
        permitted = [
            (page_url(f"{self.opts.model_name}_act", row.pk, verb), self.object_actions[verb].label)
            for verb in possible
            if self._is_permitted(request, verb)
        ]
        return super().render_change_form(request, context | {"buttons": permitted}, *args, **kwargs)

    def execute(self, request: HttpRequest, rows: Iterable[Any], verb: str) -> None:
        """Execute the operation on each row and report each result; an error on one row does not stop the loop."""
        action = self.object_actions[verb]
        for row in rows:
            try:
                result = action.run(row, request)
            except FaktoryError as error:
                self.message_user(request, f"{row.name}: {error_text(error)}", messages.ERROR)
                continue
            # One log entry per row and not per action, so that the row's history page has it.
            log_action(request, [row], action.done_label, name=row.name)
            self.message_user(request, f"{row.name}: {result}", messages.SUCCESS)

    def _action_view(self, request: HttpRequest, object_id: str, verb: str) -> HttpResponse:
        """Execute the operation of a button, then redirect to the row's page.

        Redirects to the list if the operation made the row invisible to this user.
        """
        if request.method != "POST":
            return self.answer_get(request, page_url(f"{self.opts.model_name}_change", object_id))
        # Checked again here: hiding a button does not stop a hand-written POST.
        if not self._is_permitted(request, verb):
            raise PermissionDenied
        row = self.get_object(request, object_id)
        if row is None:
            return self.answer_missing(request)
        self.execute(request, [row], verb)
        if self.get_queryset(request).filter(pk=row.pk).exists():
            return HttpResponseRedirect(row_link(str(self.opts.model_name), row.pk))
        return HttpResponseRedirect(page_url(f"{self.opts.model_name}_changelist"))

    def _is_permitted(self, request: HttpRequest, verb: str) -> bool:
        # The view permission too, because the response reveals the row's name (ADR 0034).
        if verb not in self.object_actions or not self.has_view_permission(request):
            return False
        return permissions.may(request.user, self.object_actions[verb].needs)
