"""Models of cron entries and their runs. Changed only by `store.cron.entries` and `store.cron.runs`.

Imports no task: an entry names a jobtype, which may belong to a worker in any language.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import pgettext_lazy

from ..core.cron import Missed, Overlap, RunOutcome
from .database import JobsModel
from .fields import ExactCharField
from .permissions import CRON_PERMISSIONS

_MISSED = [
    (str(Missed.SKIP), pgettext_lazy("missed runs", "skip")),
    (str(Missed.ONCE), pgettext_lazy("missed runs", "once")),
    (str(Missed.ALL), pgettext_lazy("missed runs", "all")),
]
_OVERLAP = [
    (str(Overlap.ALLOW), pgettext_lazy("overlapping runs", "allow")),
    (str(Overlap.SKIP), pgettext_lazy("overlapping runs", "skip")),
]


class CronEntry(JobsModel):
    """A recurring job: its schedule, its time zone and the job to enqueue."""

    class EntryOrigin(models.TextChoices):
        """Where the entry is defined; an entry from code cannot be edited in the admin."""

        CODE = "code", pgettext_lazy("origin of a definition", "Code")
        ADMIN = "admin", pgettext_lazy("origin of a definition", "Admin")

    name = ExactCharField(max_length=255, unique=True)
    origin = ExactCharField(max_length=10, choices=EntryOrigin.choices, default=EntryOrigin.ADMIN)
    schedule = models.CharField(
        max_length=255, help_text="Five fields, six with seconds first, or a name such as @daily."
    )
    zone = models.CharField(max_length=64, help_text='The time zone the schedule is read in, as in "Europe/Berlin".')
    jobtype = ExactCharField(
        max_length=255, help_text="A task of this project, or the jobtype of a worker in another language."
    )
    queue = ExactCharField(
        max_length=255, default="", blank=True, help_text='Empty: that of the task, "default" for other jobtypes.'
    )
    args = models.TextField(default="[]", help_text="JSON array.")
    kwargs = models.TextField(default="{}", help_text="JSON object; for tasks of this project.")
    job = models.TextField(
        default="{}", help_text="JSON object: retry, reserve_for, priority, backtrace, custom; for other jobtypes."
    )
    # ONCE, as in anacron: a deployment must not lose a nightly job, and a day without nodes must not add a thousand
    # jobs (ADR 0014).
    missed = ExactCharField(
        max_length=4,
        choices=_MISSED,
        default=str(Missed.ONCE),
        help_text="Ticks that no node ran within a minute: skip them, run the latest only, or run all.",
    )
    window_s = models.IntegerField(
        default=86_400, verbose_name="window", help_text='Seconds back that "once" and "all" look.'
    )
    overlap = ExactCharField(
        max_length=5,
        choices=_OVERLAP,
        default=str(Overlap.ALLOW),
        help_text="While an earlier job of this entry waits or runs: allow another, or skip it.",
    )

    # The first tick that was not taken. All nodes read it at each poll, so an edit needs no notification (ADR 0014).
    next_at = models.DateTimeField(null=True, help_text="The next tick; one node advances it and enqueues the job.")
    paused_at = models.DateTimeField(null=True)
    # Marked, not deleted: the entry keeps its history (ADR 0014).
    removed_at = models.DateTimeField(null=True, help_text="Time at which the code no longer defined it.")
    problem = models.TextField(default="", db_default="", help_text="Reason why it is never due.")
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        permissions = CRON_PERMISSIONS
        verbose_name_plural = "cron entries"
        indexes: ClassVar = [models.Index(fields=["next_at"], name="faktory_cron_due")]
        constraints: ClassVar = [
            # `next_at` is what claims search for, so a paused or removed entry must not have one.
            models.CheckConstraint(
                name="faktory_cron_idle_is_never_due",
                condition=Q(next_at=None) | Q(paused_at=None, removed_at=None),
            ),
            models.CheckConstraint(
                name="faktory_cron_missed", condition=Q(missed__in=[str(policy) for policy in Missed])
            ),
            models.CheckConstraint(
                name="faktory_cron_overlap", condition=Q(overlap__in=[str(policy) for policy in Overlap])
            ),
        ]

    def __str__(self) -> str:
        return str(self.name)

    @property
    def state(self) -> str:
        """Return "active", "paused", "removed" (from code) or "never" (due)."""
        if self.removed_at:
            return "removed"
        if self.paused_at:
            return "paused"
        return "active" if self.next_at else "never"


class CronRun(JobsModel):
    """The run of an entry for one tick, or a manual run.

    A unique constraint permits one row per tick, however many nodes run, so each tick is taken once. Ticks that are
    NULL, of manual runs, do not conflict.
    """

    entry = models.ForeignKey(CronEntry, on_delete=models.CASCADE, related_name="runs")
    tick = models.DateTimeField(null=True, help_text="None: it was run manually.")
    at = models.DateTimeField(db_default=Now())
    jid = ExactCharField(max_length=255, default="", db_default="")
    outcome = ExactCharField(max_length=10, choices=[(str(outcome), str(outcome)) for outcome in RunOutcome])
    note = models.TextField(default="", db_default="")
    # Written by maintenance, because an ACK that looked for a run would cost every job (ADR 0014).
    ended_at = models.DateTimeField(null=True)

    class Meta:
        constraints: ClassVar = [
            # Enforces "once per tick" even if two nodes pass every other check (ADR 0014).
            models.UniqueConstraint(name="faktory_cron_tick", fields=["entry", "tick"]),
            models.CheckConstraint(
                name="faktory_cron_outcome", condition=Q(outcome__in=[str(outcome) for outcome in RunOutcome])
            ),
        ]

    def __str__(self) -> str:
        return f"{self.entry_id} {self.tick or 'manually'} {self.outcome}"
