"""Model of jobs in transit to another database or to a Faktory server."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from .. import conf
from .database import JobsModel
from .fields import ExactCharField
from .permissions import OUTBOX_PERMISSIONS


class OutboxEntry(JobsModel):
    """A job in transit to another database or to a Faktory server: see `brokers.outbox`."""

    jid = ExactCharField(max_length=255)
    queue = ExactCharField(max_length=255)
    job = models.TextField(help_text="JSON of the job with all its fields.")
    created_at = models.DateTimeField(db_default=Now())
    # A lease, so that no transaction is open while a process sends the job over the network (ADR 0008).
    leased_until = models.DateTimeField(null=True, help_text="Until then, a relay is sending it.")
    # A row with an error is not sent again automatically, and does not block later rows (ADR 0008).
    error = models.TextField(
        default="", db_default="", help_text="Reason of the refusal; the row stays until a person acts."
    )

    class Meta:
        permissions = OUTBOX_PERMISSIONS
        verbose_name_plural = "outbox entries"

    def __str__(self) -> str:
        return f"#{self.pk} {self.jid}"

    @classmethod
    def get_alias(cls) -> str:
        """Return the first database with an outbox, because transactions of that one enqueue in it."""
        return next(iter(conf.outbox()), super().get_alias())
