"""Proxy models without a table: they give admin pages a place in the index, an address and permissions."""

from __future__ import annotations

from . import Queue
from .permissions import GEARMONKEY_PERMISSIONS


class Overview(Queue):
    """Dashboard of all jobs, queues and workers. Permission: `view_statistics`."""

    class Meta:
        app_label = "django_faktory"
        proxy = True
        # None of Django's four: nothing is added, changed or deleted there, and `view_statistics` is the queue's.
        default_permissions = ()
        verbose_name = verbose_name_plural = "overview"


class GearMonkeyFunction(Queue):
    """Page of GearMonkey functions, which are stored in Redis."""

    class Meta:
        permissions = GEARMONKEY_PERMISSIONS
        app_label = "django_faktory"
        proxy = True
        verbose_name = "GearMonkey function"
