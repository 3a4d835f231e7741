"""Cursor pagination over an indexed order.

Page 1,000 costs as much as the first page, and no total is counted.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from typing import Any

from django.db.models import Q
from rest_framework.exceptions import ValidationError
from rest_framework.pagination import Cursor, CursorPagination
from rest_framework.request import Request
from rest_framework.response import Response

from ...operations import searches
from .base import get_alias

MAX_PAGE_SIZE = 200
_SEARCHED = {
    "type": ["object", "null"],
    "description": "How many jobs the list looked at, the newest ones; null: all, by an index. `among:` widens it.",
    "required": ["jobs", "of", "is_more"],
    "properties": {
        "jobs": {"type": "integer", "description": "Jobs that were searched."},
        "of": {"type": "integer", "description": "Jobs that there are."},
        "is_more": {"type": "boolean", "description": "Whether there are more than `of`."},
    },
}


class _ByCursor(CursorPagination):
    page_size = 50
    max_page_size = MAX_PAGE_SIZE
    page_size_query_param = "page_size"
    page_size_query_description = f"Rows per page: 50 by default, {MAX_PAGE_SIZE} at most."
    cursor_query_description = "Position of the page, from `next` or `previous` of another page."
    offset_cutoff = 1  # every order here is unique: a position needs no offset
    position_pattern = re.compile("")

    def decode_cursor(self, request: Request) -> Cursor | None:
        """Return the cursor of the request, checked before it reaches the database. Raises ValidationError."""
        try:
            cursor = super().decode_cursor(request)
        # Decoding a forged cursor raises errors of several kinds.
        except Exception as error:
            raise ValidationError({"cursor": "expected what `next` or `previous` of another page has"}) from error
        # The position becomes a parameter of the query: NUL or a wrong type would raise in the database.
        position = cursor.position if cursor is not None else None
        if position is not None and not self._is_position(str(position)):
            raise ValidationError({"cursor": "expected what `next` or `previous` of another page has"})
        return cursor

    def _is_position(self, text: str) -> bool:
        return self.position_pattern.fullmatch(text) is not None

    def get_paginated_response_schema(self, schema: Any) -> Any:
        """Return the schema with `null` types as in OpenAPI 3.1.

        DRF emits `nullable`, which is OpenAPI 3.0.
        """
        response_schema = super().get_paginated_response_schema(schema)
        for name in ("next", "previous"):
            member = {key: value for key, value in response_schema["properties"][name].items() if key != "nullable"}
            response_schema["properties"][name] = member | {"type": ["string", "null"]}
        return response_schema


class NewestFirst(_ByCursor):
    """Order by id, which is the order of insertion, newest first."""

    ordering: Any = "-id"
    position_pattern = re.compile(r"\d{1,18}", re.ASCII)


class LatestFirst(NewestFirst):
    """Order of `Query.order`: jobs by id, or failed jobs by the time of their failure, then by id."""

    ordering = ("-id",)

    def get_ordering(self, request: Request, queryset: Any, view: Any) -> tuple[str, ...]:  # noqa: ARG002
        return tuple(queryset.query.order_by) or self.ordering

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> Any:
        rows: Any = _Rows(queryset)
        return super().paginate_queryset(rows, request, view)

    def get_paginated_response(self, data: Any) -> Response:
        """Return the page, with how far the list looked."""
        response = super().get_paginated_response(data)
        request: Any = self.request  # type: ignore[attr-defined]  # set by `paginate_queryset`
        query = getattr(request, "faktory_query", None)  # members of a batch are found by their index
        coverage = query and searches.read_coverage(query, using=get_alias())
        response.data["searched"] = coverage and coverage.document
        return response

    def get_paginated_response_schema(self, schema: Any) -> Any:
        response_schema = super().get_paginated_response_schema(schema)
        response_schema["properties"]["searched"] = _SEARCHED
        response_schema["required"] = [*response_schema["required"], "searched"]
        return response_schema

    def _get_position_from_instance(self, instance: Any, ordering: Any) -> Any:
        return "/".join(str(getattr(instance, column.lstrip("-"))) for column in ordering)

    def _is_position(self, text: str) -> bool:
        moment, _, key = text.rpartition("/")
        is_time = len(self.ordering) > 1
        with suppress(ValueError):
            return super()._is_position(key) and bool(datetime.fromisoformat(moment) if is_time else not moment)
        return False


class _Rows:
    """A query set of jobs in one or two columns' order, which REST framework filters by the first one only."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.query = rows, rows.query

    def order_by(self, *order: str) -> _Rows:
        return _Rows(self.rows.order_by(*order))

    def filter(self, **condition: str) -> _Rows:
        [(lookup, position)] = condition.items()
        column, _, sign = lookup.partition("__")
        first, _, key = position.rpartition("/")
        if not first:
            return _Rows(self.rows.filter(**condition))
        # The first condition alone is a range of the index.
        beyond = Q(**{lookup: first}) | Q(**{f"id__{sign}": key})
        return _Rows(self.rows.filter(beyond, **{f"{column}__{sign}e": first}))

    def __getitem__(self, part: slice) -> Any:
        return self.rows[part]


class _ByText(_ByCursor):
    position_pattern = re.compile(r"[^\x00-\x1f\ud800-\udfff]{0,255}")


class ByName(_ByText):
    ordering = "name"


class ByWid(_ByText):
    """Order by worker id, ascending."""

    ordering = "wid"


class FewByName(ByName):
    """Pages of queues, limited to 100 rows.

    Their sizes are read with one statement that has one term per queue.
    """

    max_page_size = 100
    page_size_query_description = "Rows per page: 50 by default, 100 at most."
