"""Write and read entries of Django's admin log: the user, the action and its reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model
from django.http import HttpRequest
from django.utils.translation import gettext, override

from .formats import StrOrPromise


def get_reason(request: HttpRequest) -> str:
    """Return the reason that the user entered, at most 500 characters."""
    # The form has the same maximum, but a client may post any text.
    return request.POST.get("why", "").strip()[:500]


def log_action(
    request: HttpRequest,
    rows: Iterable[Model | type[Model]],
    summary: StrOrPromise,
    *,
    name: str = "",
    reason: str | None = None,
) -> None:
    """Write a log entry for each row, or for a model: the user, the action and the reason, by default that of the form.

    `name` is the row's name in the entry.
    """
    reason = get_reason(request) if reason is None else reason
    action_text = f"{in_english(summary)}: {reason}" if reason else f"{in_english(summary)}."
    logged_rows = list(rows)
    if not logged_rows:
        return
    content_type = ContentType.objects.get_for_model(logged_rows[0], for_concrete_model=False)
    user_id: Any = request.user.pk
    # One INSERT for all rows. Django's column for the name of a row has 200 characters.
    LogEntry.objects.bulk_create(
        LogEntry(
            user_id=user_id, content_type=content_type, object_id=row.pk if isinstance(row, Model) else None,
            object_repr=(name or str(row))[:200], action_flag=CHANGE, change_message=action_text,
        )
        for row in logged_rows
    )  # fmt: skip


def in_english(label: StrOrPromise) -> str:
    """Return a label in English, the language in which the history is stored."""
    with override(None):
        return str(label)


def translate_entry(message: str) -> str:
    """Return a message of the history in the language of the reader, unless its summary has numbers or names."""
    summary, mark, reason = message.partition(": ")
    if not mark and message.endswith("."):
        summary, mark = message[:-1], "."
    return f"{gettext(summary) if summary else ''}{mark}{reason}"
