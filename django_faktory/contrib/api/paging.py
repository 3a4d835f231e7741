"""Cursor pagination over an indexed order.

Page 1,000 costs as much as the first page, and no total is counted.
"""

from __future__ import annotations

import re
from typing import Any

from rest_framework.exceptions import ValidationError
from rest_framework.pagination import Cursor, CursorPagination
from rest_framework.request import Request

MAX_PAGE_SIZE = 200


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
        if position is not None and not self.position_pattern.fullmatch(str(position)):
            raise ValidationError({"cursor": "expected what `next` or `previous` of another page has"})
        return cursor

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

    ordering = "-id"
    position_pattern = re.compile(r"\d{1,18}", re.ASCII)


class _ByText(_ByCursor):
    position_pattern = re.compile(r"[^\x00-\x1f\ud800-\udfff]{0,255}")


class ByName(_ByText):
    """Order by name, ascending."""

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
