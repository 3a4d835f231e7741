"""Admin pages of rows on which something can be done: a button for each act that makes sense now, and the same acts on
many rows of the list. Each asks for its own permission, is a POST, and is put on record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.shortcuts import redirect
from django.urls import URLPattern, path, reverse

from . import permissions
from .errors import FaktoryError
from .look_only import Styled, log


class Act(NamedTuple):
    """What a button does: `does(row)` says what became of it, or raises FaktoryError."""

    does: Callable[[Any], str]
    done: str
    needs: str
    """The act as `permissions` has it, `resource.verb`."""


class WithButtons(Styled):
    """The rows' names tell them apart."""

    acts: ClassVar[Mapping[str, Act]]
    change_form_template = "admin/django_faktory/with_buttons.html"

    def buttons(self, row: Any) -> list[tuple[str, str]]:
        """The acts that make sense for this row now, and what their buttons say."""
        raise NotImplementedError

    def get_urls(self) -> list[URLPattern]:
        """And those of the buttons."""
        view = self.admin_site.admin_view(self._act_view)
        return [path("<path:object_id>/act/<str:verb>/", view, name=self._place("act")), *super().get_urls()]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """With the buttons that this user may press."""
        row: Any = kwargs.get("obj")
        shown = (
            []
            if row is None
            else [
                (reverse(f"{self.admin_site.name}:{self._place('act')}", args=[row.pk, verb]), label)
                for verb, label in self.buttons(row)
                if self._may(request, verb)
            ]
        )
        return super().render_change_form(request, context | {"buttons": shown}, *args, **kwargs)

    def carry_out(self, request: HttpRequest, rows: Iterable[Any], verb: str) -> None:
        """Do it to each, and say so: one that cannot be done holds up no other."""
        act = self.acts[verb]
        for row in rows:
            try:
                said = act.does(row)
            except FaktoryError as error:
                self.message_user(request, f"{row.name}: {error}", messages.ERROR)
                continue
            log(request, [row], act.done)
            self.message_user(request, f"{row.name}: {said}", messages.SUCCESS)

    def _act_view(self, request: HttpRequest, object_id: str, verb: str) -> HttpResponse:
        """Do the act of a button, and go back to the row's page."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not self._may(request, verb):
            raise PermissionDenied
        row = self.get_object(request, object_id)
        if row is None:
            raise Http404
        self.carry_out(request, [row], verb)
        if self.get_queryset(request).filter(pk=row.pk).exists():
            return redirect(f"{self.admin_site.name}:{self._place('change')}", row.pk)
        return redirect(f"{self.admin_site.name}:{self._place('changelist')}")

    def _may(self, request: HttpRequest, verb: str) -> bool:
        if verb not in self.acts or not self.has_view_permission(request):  # its answer names the row
            return False
        return permissions.may(request.user, self.acts[verb].needs)

    def _place(self, page: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{page}"
