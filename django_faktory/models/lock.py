"""Model of locks that running jobs hold (ADR 0015). Changed only by `store.locks`."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..core.lifecycle import count_claims
from .database import JobsModel
from .fields import ExactCharField
from .permissions import LOCK_PERMISSIONS


class JobLock(JobsModel):
    """A key that a running job has locked (ADR 0015). Its id is the fencing token: later locks have higher ids."""

    # Exclusion rests on this unique key alone; the state `blocked` only saves reads and wakeups (ADR 0015).
    key = ExactCharField(max_length=255, unique=True, db_column="lock_key")
    jid = ExactCharField(max_length=255)
    attempt = models.BigIntegerField()
    wid = ExactCharField(max_length=255, db_index=True)
    lease = models.DurationField(help_text=_("Time after which it expires unless it is extended."))
    acquired_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    is_lapsed = models.BooleanField(default=False, help_text="Whether its expiry was processed: the next job is ready.")

    class Meta:
        permissions = LOCK_PERMISSIONS
        # Maintenance searches every second for expired locks that were not processed yet (ADR 0015).
        indexes: ClassVar = [models.Index(fields=["is_lapsed", "expires_at"], name="faktory_lock_ends")]

    def __str__(self) -> str:
        return f"{self.key} #{self.pk}"

    @property
    def claims(self) -> int:
        """Number of claims of its job."""
        return count_claims(self.attempt)
