"""Models of counted jobs and of their timings. Changed only by `store.statistics`."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from ..core.histograms import BUCKETS
from .database import JobsModel
from .fields import ExactCharField


class Counter(JobsModel):
    """Numbers of finished jobs by day: a row for each counting connection, and one into which the others are folded.

    With a row for each connection, transactions need not wait for the lock of one shared row.
    """

    pk = models.CompositePrimaryKey("day", "slot")
    day = models.DateField()
    # Random, because connections of all nodes choose it without coordination (ADR 0024).
    slot = models.BigIntegerField(
        help_text="Random number of the connection that counts in it; -1: the total of folded rows."
    )
    processed = models.BigIntegerField(default=0, help_text="Number of ended runs, failed ones included.")
    failed = models.BigIntegerField(default=0)
    late = models.BigIntegerField(default=0, help_text="Number of reports that came too late to have an effect.")

    def __str__(self) -> str:
        return f"{self.day} #{self.slot}"


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
