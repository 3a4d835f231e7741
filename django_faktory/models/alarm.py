"""Model of recorded alarms. Changed only by `store.alarm_records`."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models.functions import Now

from .database import JobsModel
from .fields import ExactCharField


class AlarmRecord(JobsModel):
    """An alarm that no other row shows, or about which a message was or will be sent in one way.

    `operations.alarms` defines the kinds of alarms and the subject of each kind.
    """

    kind = ExactCharField(max_length=40)
    subject = ExactCharField(max_length=255, default="")
    way = ExactCharField(max_length=20, default="", help_text="How messages are sent; empty: none is sent about it.")
    text = models.TextField(default="", db_default="")
    began_at = models.DateTimeField(db_default=Now())
    jobs = models.JSONField(default=list, help_text="Of a lost worker: jid, jobtype and queue of jobs that it ran.")
    affected = models.IntegerField(default=1, db_default=1, help_text="Number of these jobs, of which some are kept.")
    notified_at = models.DateTimeField(null=True, help_text="Time of the latest message about it.")
    claimed_until = models.DateTimeField(null=True, help_text="Until then, a node is sending a message in this way.")

    class Meta:
        # Internal rows without an admin page, so no permissions.
        default_permissions = ()
        constraints: ClassVar = [models.UniqueConstraint(fields=["kind", "subject", "way"], name="faktory_alarm")]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}".strip()
