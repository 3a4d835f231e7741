"""Models that are pages of the admin and nothing else: they give them a place, an address and permissions. No table."""

from __future__ import annotations

from . import permissions as may
from .models import Queue


class Overview(Queue):
    """All that goes on, at one look. Who may see it: `permissions.VIEW_STATISTICS`."""

    class Meta:
        app_label = "django_faktory"
        proxy = True
        default_permissions = ()
        verbose_name = verbose_name_plural = "overview"


class GearMonkeyFunction(Queue):
    """Functions themselves are in Redis."""

    class Meta:
        permissions = may.GEARMONKEY
        app_label = "django_faktory"
        proxy = True
        verbose_name = "GearMonkey function"
