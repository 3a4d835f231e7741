"""Lists of the admin: counts that end at a limit, and a change list that is sorted by the columns of its page only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ORDER_VAR, ChangeList
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.db.models.functions import Substr
from django.http import HttpRequest
from django.utils.functional import cached_property

from .formats import format_number

if TYPE_CHECKING:
    CappedBase = Paginator[Any]
    AnyQuerySet = QuerySet[Any]
else:  # Django's own classes take no type parameters at run time
    CappedBase = Paginator
    AnyQuerySet = QuerySet

MAX_COUNTED = 10_000
"""Maximum number of rows that a list counts."""


class LowerBound(int):
    """A lower bound at which counting stopped; its text ends with a plus sign."""

    def __str__(self) -> str:
        return format_number(int(self), is_more=True)


def format_capped(count: int, limit: int) -> str:
    """Format a count that ends at `limit`: "5,000+" for any larger number, and for `LowerBound` its own text."""
    return str(count) if isinstance(count, LowerBound) else format_number(min(count, limit), is_more=count > limit)


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
