"""Model of the jobs that have ended for good (ADR 0048). `Job.objects` reads them together with the live ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from django.db import models
from django.db.models import Q

from ..core.lifecycle import ENDED, KEPT
from .constraints import OneOf
from .indexes import HotIndex, PartialIndex
from .job_columns import JobColumns

_DROPPED = Q(state__in=["discarded", "expired"])


class History(JobColumns):
    """A job that has succeeded, was discarded or has expired. Its row keeps the id that it had in the table of jobs."""

    day = models.DateField(help_text="Day with whose rows it leaves: that of its end, or an earlier one.")

    class Meta:
        default_permissions = ()
        indexes: ClassVar = [
            # Few: each job that keeps a result is added to them once more.
            models.Index(fields=["jid"], name="faktory_history_jid"),
            HotIndex(fields=["purge_at"], name="faktory_history_purge"),
            models.Index(fields=["bid", "state"], name="faktory_history_bid", condition=Q(bid__isnull=False)),
            models.Index(fields=["about", "id"], name="faktory_history_about", condition=Q(about__isnull=False)),
            PartialIndex(fields=["state", "errtype", "id"], name="faktory_dropped", condition=_DROPPED),
            PartialIndex(fields=["state", "id"], name="faktory_dropped_latest", condition=_DROPPED),
        ]
        constraints: ClassVar = [
            models.CheckConstraint(
                name="faktory_history_sound",
                condition=Q(OneOf("state", sorted(map(str, ENDED))), finished_at__isnull=False, purge_at__isnull=False),
            ),
        ]

    @classmethod
    def copy(cls, jobs: Sequence[Any], *, using: str) -> None:
        """Insert rows with the values of these jobs."""
        names = [field.attname for field in JobColumns._meta.local_fields]  # noqa: SLF001  (documented)
        rows: list[Any] = [cls(id=job.pk, day=KEPT, **{name: getattr(job, name) for name in names}) for job in jobs]
        cls.objects.using(using).bulk_create(rows, batch_size=500)
