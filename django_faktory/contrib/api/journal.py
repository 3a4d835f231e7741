"""Record each change made through the API: an entry in Django's admin log and a line in our log."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.db.models import Model
from rest_framework.request import Request

from ...core.logs import get_logger

logger = get_logger("django_faktory.api.journal")  # a documented name: projects give it a handler of its own

ADDED, CHANGED, DELETED = 1, 2, 3
"""Action flags of Django's admin log, copied here: the admin need not be installed."""


def record_change(
    request: Request,
    target: Model | type[Model],
    summary: str,
    *,
    name: str = "",
    flag: int = CHANGED,
    reason: str = "",
) -> None:
    """Record a change of a row or, if `target` is a model, of a set of rows.

    `name` is the name of the object in both logs; its default is the string of the row.
    """
    is_row = isinstance(target, Model)
    object_name = name or (str(target) if is_row else "")
    message = f"{summary}, through the API{f': {reason}' if reason else ''}"
    user: Any = request.user
    # ascii() keeps line breaks and escape sequences of clients out of the log.
    logger.info("change through the API user=%s target=%s action=%s", user.pk, ascii(object_name), ascii(message))
    # An authentication class of the project may return users without a row, which the admin log cannot reference.
    if not apps.is_installed("django.contrib.admin") or user.pk is None:
        return
    from django.contrib.admin.models import LogEntry  # the admin need not be installed
    from django.contrib.contenttypes.models import ContentType

    # Not the concrete model: the admin writes its own log entries the same way.
    content_type = ContentType.objects.get_for_model(target, for_concrete_model=False)
    LogEntry.objects.create(
        user_id=user.pk,
        content_type_id=content_type.pk,
        object_id=str(target.pk) if is_row else None,
        object_repr=object_name[:200],
        action_flag=flag,
        change_message=message,
    )
