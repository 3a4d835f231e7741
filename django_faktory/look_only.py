"""Pages of the admin that only show: nothing is added, edited or deleted on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.utils.functional import cached_property

if TYPE_CHECKING:
    AnyAdmin = admin.ModelAdmin[Any]
    CappedBase = Paginator[Any]
else:  # Django's own classes take no type parameters at run time
    AnyAdmin = admin.ModelAdmin
    CappedBase = Paginator


class CappedPaginator(CappedBase):
    """Counts no further than `cap` rows: a list of millions opens as fast as a list of ten thousand."""

    cap = 10_000

    @cached_property
    def count(self) -> int:
        """How many rows there are, at most `cap`."""
        rows: Any = self.object_list
        return len(rows[: self.cap]) if isinstance(rows, list) else rows.order_by()[: self.cap].count()


class LookOnly(AnyAdmin):
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
