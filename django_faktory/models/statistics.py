"""Models of counted jobs and of their timings. Changed only by `store.statistics`."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from ..core.histograms import BUCKETS
from .database import JobsModel
from .fields import ExactCharField, MarkField


class Delta(JobsModel):
    """A part of a number of jobs: the number is the sum of its rows (ADR 0047). Written by triggers."""

    pk = models.CompositePrimaryKey("mark", "kind", "name")
    mark = MarkField(
        help_text="Transaction that counted, on MariaDB the connection; 0, or a number from 2^62 on, for sums of them."
    )
    kind = ExactCharField(max_length=20, help_text="State of the jobs, or a total of each day.")
    name = ExactCharField(max_length=255, help_text="Queue of live jobs, day of ended ones.")
    amount = models.BigIntegerField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.amount}"


class Measure(JobsModel):
    """Timings of one minute by queue and task; the row of 1970 has the totals since the beginning. See `histograms`."""

    pk = models.CompositePrimaryKey("minute", "queue", "jobtype")
    minute = models.DateTimeField()
    queue = ExactCharField(max_length=255)
    jobtype = ExactCharField(max_length=255)
    started = models.BigIntegerField()
    succeeded = models.BigIntegerField()
    failed = models.BigIntegerField()
    waited_s = models.FloatField(help_text="Total seconds between enqueue and start.")
    ran_s = models.FloatField()
    # Totals without a job for 14 days are added to those of all others, which bounds the number of rows (ADR 0031).
    used_at = models.DateTimeField(db_default=Now(), help_text="Time of the last change.")
    for _place in range(BUCKETS):  # one column for each bucket of the histograms: SQL can add to them
        vars()[f"wait_{_place}"] = models.BigIntegerField()
        vars()[f"run_{_place}"] = models.BigIntegerField()

    def __str__(self) -> str:
        return f"{self.minute:%Y-%m-%d %H:%M} {self.queue} {self.jobtype}"
