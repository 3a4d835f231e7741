"""Read long texts of rows (arguments, results, errors, callbacks) up to a size, for pages.

A job may have 16 MiB of arguments. A page reads a text completely up to `WHOLE` characters, otherwise only its
beginning, and shows `SHOWN_BYTES` of it; a download sends all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from django.db.models import Case, F, Model, TextField, When
from django.db.models.functions import Length, Substr

from ..core.json.jsontext import decode
from ..errors import FaktoryError

WHOLE = 1024 * 1024
"""Characters up to which a text is read completely for a page."""

SHOWN_BYTES = 16 * 1024
"""Bytes of HTML that one text may take on a page."""

_HTML_BYTES = {"&": 5, "<": 4, ">": 4, '"': 6, "'": 6}


class StoredText(NamedTuple):
    """The part of a text that was read, and its full length in characters."""

    text: str
    size: int

    @property
    def is_whole(self) -> bool:
        """Return whether the text was read completely."""
        return len(self.text) >= self.size


def read(row: Model, *fields: str) -> dict[str, StoredText]:
    """Read these texts of a row in one query. A deleted row and a NULL give empty texts."""
    # The database cuts the texts, so that a long one is never sent to this process.
    sizes = {f"{field}_size": Length(field) for field in fields}
    texts: dict[str, Any] = {
        f"{field}_text": Case(
            When(**{f"{field}_size__lte": WHOLE}, then=F(field)),
            default=Substr(field, 1, SHOWN_BYTES),
            output_field=TextField(),
        )
        for field in fields
    }
    values: dict[str, Any] = _select(row).annotate(**sizes).annotate(**texts).values(*sizes, *texts).first() or {}
    return {field: StoredText(values.get(f"{field}_text") or "", values.get(f"{field}_size") or 0) for field in fields}


def read_beginnings(row: Model, lengths: Mapping[str, int]) -> dict[str, str]:
    """Read the beginning of each of these texts in one query; `lengths` are in characters."""
    parts = {f"{field}_beginning": Substr(field, 1, length) for field, length in lengths.items()}
    values: dict[str, Any] = _select(row).annotate(**parts).values(*parts).first() or {}
    return {field: values.get(f"{field}_beginning") or "" for field in lengths}


def read_whole(row: Model, field: str) -> str:
    """Read a text completely; empty if the row was deleted."""
    return _select(row).values_list(field, flat=True).first() or ""


def format_json(text: str, limit: int = SHOWN_BYTES) -> str:
    """Return JSON indented, cut at about `limit` characters; other text is returned unchanged.

    The encoder is stopped early, because indentation can make a text a hundred times longer.
    """
    if not text:
        return ""
    try:
        value = decode(text)
        parts, length = [], 0
        for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
            parts.append(_escape_unprintable(part))
            length += len(parts[-1])
            if length > limit:
                break
        return "".join(parts)
    except (FaktoryError, ValueError):
        return text


def cut(text: str, limit: int = SHOWN_BYTES) -> str:
    """Return the beginning of a text that takes at most `limit` bytes of HTML."""
    remaining = limit
    # Each character takes at least one byte, so none after `limit` characters can fit.
    for index, char in enumerate(text[:limit]):
        # Control characters are shown as symbols of 3 bytes in UTF-8, see `admin.sanitize`.
        remaining -= _HTML_BYTES.get(
            char, 3 if char < " " else 1 if char < "\x80" else len(char.encode("utf-8", "replace"))
        )
        if remaining < 0:
            return text[:index]
    return text[:limit]


def _select(row: Model) -> Any:
    return type(row)._base_manager.using(row._state.db).filter(pk=row.pk)  # noqa: SLF001  (documented)


def _escape_unprintable(text: str) -> str:
    """Replace unprintable characters by JSON escapes, so that an edited text is saved with the same value."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)
