"""Admin pages with a button for each operation on a row, and the same operations as list actions.

Each operation requires its own permission, is a POST, and is recorded in the admin log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path, reverse

from ..errors import FaktoryError
from ..models import permissions
from .base import FaktoryModelAdmin, log_action
from .formats import error_text

if TYPE_CHECKING:
    from django.utils.functional import _StrOrPromise


class ObjectAction(NamedTuple):
    """An operation behind a button: `run(row)` returns the outcome as text, or raises FaktoryError."""

    run: Callable[[Any], str]
    done_label: _StrOrPromise
    needs: str
    """The permission required, as `resource.verb` (see `permissions`)."""


class ObjectActionsMixin(FaktoryModelAdmin):
    """Model admin base for rows that are identified by `name` in messages."""

    object_actions: ClassVar[Mapping[str, ObjectAction]]
    change_form_template = "admin/django_faktory/with_buttons.html"

    def buttons(self, row: Any) -> list[tuple[str, _StrOrPromise]]:
        """Return the (verb, label) pairs of the operations that are possible for this row now."""
        raise NotImplementedError

    def get_urls(self) -> list[URLPattern]:
        """Return the admin's URLs and the URL of the buttons."""
        view = self.admin_site.admin_view(self._action_view)
        return [path("<path:object_id>/act/<str:verb>/", view, name=self._url_name("act")), *super().get_urls()]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Add the buttons that this user may press to the context."""
        row: Any = kwargs.get("obj")
        # A new object has no buttons: there is nothing to operate on yet.
        possible = [] if row is None else self.buttons(row)
        permitted = [
            (reverse(f"{self.admin_site.name}:{self._url_name('act')}", args=[row.pk, verb]), label)
            for verb, label in possible
            if self._is_permitted(request, verb)
        ]
        return super().render_change_form(request, context | {"buttons": permitted}, *args, **kwargs)

    def execute(self, request: HttpRequest, rows: Iterable[Any], verb: str) -> None:
        """Execute the operation on each row and report each result; an error on one row does not stop the loop."""
        action = self.object_actions[verb]
        for row in rows:
            try:
                result = action.run(row)
            except FaktoryError as error:
                self.message_user(request, f"{row.name}: {error_text(error)}", messages.ERROR)
                continue
            # One log entry per row and not per action, so that the row's history page has it.
            log_action(request, [row], action.done_label)
            self.message_user(request, f"{row.name}: {result}", messages.SUCCESS)

    def _action_view(self, request: HttpRequest, object_id: str, verb: str) -> HttpResponse:
        """Execute the operation of a button, then redirect to the row's page.

        Redirects to the list if the operation made the row invisible to this user.
        """
        if request.method != "POST":
            page = reverse(f"{self.admin_site.name}:{self._url_name('change')}", args=[object_id])
            return self.answer_get(request, page)
        # Checked again here: hiding a button does not stop a hand-written POST.
        if not self._is_permitted(request, verb):
            raise PermissionDenied
        row = self.get_object(request, object_id)
        if row is None:
            return self.answer_missing(request)
        self.execute(request, [row], verb)
        if self.get_queryset(request).filter(pk=row.pk).exists():
            return redirect(f"{self.admin_site.name}:{self._url_name('change')}", row.pk)
        return redirect(f"{self.admin_site.name}:{self._url_name('changelist')}")

    def _is_permitted(self, request: HttpRequest, verb: str) -> bool:
        # The view permission too, because the response reveals the row's name (ADR 0034).
        if verb not in self.object_actions or not self.has_view_permission(request):
            return False
        return permissions.may(request.user, self.object_actions[verb].needs)

    def _url_name(self, page: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{page}"
