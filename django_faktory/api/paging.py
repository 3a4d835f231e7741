"""Pages by a cursor over an indexed order: the thousandth costs what the first one does, and nothing is counted."""

from __future__ import annotations

import re
from typing import Any

from rest_framework.exceptions import ValidationError
from rest_framework.pagination import Cursor, CursorPagination
from rest_framework.request import Request

MOST = 200


class _ByCursor(CursorPagination):
    page_size = 50
    max_page_size = MOST
    page_size_query_param = "page_size"
    page_size_query_description = f"Rows of a page: 50 unless said, {MOST} at most."
    cursor_query_description = "Where the page begins: of `next` or `previous` of another page."
    offset_cutoff = 1  # every order here is unique: a position needs no offset
    positions = re.compile("")

    def decode_cursor(self, request: Request) -> Cursor | None:
        """What a client sends is checked before it reaches the database."""
        try:
            cursor = super().decode_cursor(request)
        except Exception as error:
            raise ValidationError({"cursor": "expected what `next` or `previous` of another page has"}) from error
        if cursor is not None and cursor.position is not None and not self.positions.fullmatch(str(cursor.position)):
            raise ValidationError({"cursor": "expected what `next` or `previous` of another page has"})
        return cursor

    def get_paginated_response_schema(self, schema: Any) -> Any:
        """With JSON Schema's null, as OpenAPI 3.1 has it, in place of the framework's `nullable` of 3.0."""
        found = super().get_paginated_response_schema(schema)
        for name in ("next", "previous"):
            described = {key: value for key, value in found["properties"][name].items() if key != "nullable"}
            found["properties"][name] = described | {"type": ["string", "null"]}
        return found


class NewestFirst(_ByCursor):
    """By id, which is the order in which they came."""

    ordering = "-id"
    positions = re.compile(r"\d{1,18}", re.ASCII)


class _ByText(_ByCursor):
    positions = re.compile(r"[^\x00-\x1f\ud800-\udfff]{0,255}")


class ByName(_ByText):
    """In the order of names."""

    ordering = "name"


class ByWid(_ByText):
    """In the order of wids."""

    ordering = "wid"


class FewByName(ByName):
    """Of queues: their sizes are read by one statement with a term for each."""

    max_page_size = 100
    page_size_query_description = "Rows of a page: 50 unless said, 100 at most."
