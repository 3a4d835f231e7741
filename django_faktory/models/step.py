"""Models of the committed steps of jobs (ADR 0051), and of the signals that jobs wait for (ADR 0052)."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models.functions import Now

from .database import JobsModel
from .fields import ExactCharField


class JobStep(JobsModel):
    """A committed step of a job, how far a walk over rows has come, or a sleep or wait that has begun.

    It is deleted some time after the row of its job.
    """

    pk = models.CompositePrimaryKey("job_id", "name", "key")
    # No foreign key: jobs are in two tables, and their ends need not know of steps.
    job_id = models.BigIntegerField(help_text="The id of the job's row.")
    name = ExactCharField(max_length=100)
    key = ExactCharField(max_length=255, db_column="step_key")
    pushed_at = models.DateTimeField(help_text="The time at which the job was pushed.")
    attempt = models.BigIntegerField(help_text="The claim of the job that committed it.")
    result = models.TextField(null=True, help_text="JSON of its result.")
    reached = models.TextField(null=True, help_text="The place of the last row that is done.")
    done = models.BigIntegerField(null=True, help_text="Number of rows that are done; NULL: a step without rows.")
    total = models.BigIntegerField(null=True, help_text="Number of rows at its begin, if known.")
    is_finished = models.BooleanField()
    until = models.DateTimeField(null=True, help_text="End of a sleep, or time-out of a wait for a signal.")
    started_at = models.DateTimeField()
    recorded_at = models.DateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.name} {self.key}".rstrip()


class JobSignal(JobsModel):
    """A signal that its job has not taken yet; deleted when it is taken, or some time after the end of the job."""

    # No foreign key: its INSERT would lock the row of the job.
    job_id = models.BigIntegerField(help_text="The id of the job's row.")
    pushed_at = models.DateTimeField(help_text="The time at which the job was pushed.")
    name = ExactCharField(max_length=100)
    payload = models.TextField(help_text="JSON.")
    sent_at = models.DateTimeField(db_default=Now())

    class Meta:
        default_permissions = ()
        indexes: ClassVar = [models.Index(fields=["job_id", "name"], name="faktory_signal_job")]

    def __str__(self) -> str:
        return f"{self.name} {self.job_id}"
