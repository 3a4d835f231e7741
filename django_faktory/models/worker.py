"""Model of worker processes. Changed only by `store.workers`."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from .database import JobsModel
from .fields import ExactCharField
from .permissions import WORKER_PERMISSIONS


class WorkerProcess(JobsModel):
    """A process in any language that sent HELLO with a wid."""

    class Phase(models.TextChoices):
        """Phase of a worker; it changes in one direction only: running, quiet, terminate."""

        RUNNING = "running"
        QUIET = "quiet"
        TERMINATE = "terminate"

    wid = ExactCharField(max_length=255, primary_key=True)
    # For display only, so it needs no exact comparison.
    hostname = models.CharField(max_length=255, default="")
    pid = models.BigIntegerField(default=0)
    labels = models.JSONField(default=list)
    # NULL: a worker in another language, or of a release that does not report them.
    queues = models.JSONField(null=True, help_text="Queues that it serves.")
    threads = models.IntegerField(null=True, help_text="Number of jobs that it runs at a time.")
    state = ExactCharField(max_length=10, choices=Phase.choices, default=Phase.RUNNING)
    rss_kb = models.BigIntegerField(default=0)
    started_at = models.DateTimeField(db_default=Now())
    seen_at = models.DateTimeField(db_default=Now(), help_text="Time of the latest HELLO, BEAT or connection.")
    # Only a worker that has sent a BEAT counts as lost without further ones (W20).
    beat_at = models.DateTimeField(null=True, help_text="Time of the latest BEAT; None: only its reservations decide.")

    class Meta:
        permissions = WORKER_PERMISSIONS
        verbose_name_plural = "worker processes"
        constraints: ClassVar = [
            # Literals, because the body of Meta does not see `Phase`.
            models.CheckConstraint(
                name="faktory_worker_state", condition=Q(state__in=["running", "quiet", "terminate"])
            ),
        ]

    def __str__(self) -> str:
        return f"{self.hostname}:{self.pid} {self.wid}"

    @property
    def name(self) -> str:
        """Host and process, as people name it; the wid if it gave no host."""
        return f"{self.hostname}:{self.pid}" if self.hostname else str(self.wid)
