"""Model of queues, and their query set with operations to pause and resume them."""

from __future__ import annotations

from typing import Self

from django.db import models
from django.db.models.functions import Now

from .database import JobsManager
from .fields import ExactCharField
from .hooks import operations
from .pausable import Pausable
from .permissions import QUEUE_PERMISSIONS


class QueueQuerySet(models.QuerySet["Queue"]):
    """Known queues, with operations to pause and resume them."""

    def paused(self) -> Self:
        """Filter queues from which no job is fetched."""
        return self.filter(paused_at__isnull=False)

    def pause(self, *, by: str = "", reason: str = "") -> int:
        """Stop delivering jobs of these queues; return how many were not paused before.

        Pages show the `reason` and `by`, by default the host and process.
        """
        return operations().pause(self, by, reason)

    def resume(self) -> int:
        """Deliver jobs of these queues again; return how many were paused."""
        return operations().resume(self)

    # As for jobs: not on the manager, where it would pause every queue by accident, and not for templates.
    pause.queryset_only = resume.queryset_only = True  # type: ignore[attr-defined]
    pause.alters_data = resume.alters_data = True  # type: ignore[attr-defined]


class Queue(Pausable):
    """A queue that was used, and whether it is paused."""

    # Jobs refer to it by name only, without a foreign key.
    name = ExactCharField(max_length=255, primary_key=True, help_text="Name of the queue.")
    # Written once per hour at most: a push must not write the queue's row each time (ADR 0031).
    used_at = models.DateTimeField(
        db_default=Now(),
        editable=False,
        help_text="Last time that a job was pushed to it or waited in it, to the hour.",
    )

    objects = JobsManager.from_queryset(QueueQuerySet)()  # type: ignore[misc]

    class Meta:
        permissions = QUEUE_PERMISSIONS

    def __str__(self) -> str:
        return str(self.name)
