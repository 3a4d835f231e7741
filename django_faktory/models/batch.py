"""Model of batches (W26). Changed only by `store.batches`."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.checks import CheckMessage
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from .database import JobsModel
from .fields import ExactCharField
from .indexes import PartialIndex, without_ignored_parts
from .permissions import BATCH_PERMISSIONS


class Batch(JobsModel):
    """A group of jobs and the callbacks that follow them (W26). `batch_rules` has the rules.

    At every commit the counters agree with the rows of its jobs.
    """

    bid = ExactCharField(max_length=255, unique=True)
    parent_bid = ExactCharField(max_length=255, default="", db_default="")
    depth = models.SmallIntegerField(default=0, help_text="Number of ancestors; the deepest rows are locked first.")
    description = models.TextField(default="", db_default="")
    complete = models.TextField(
        default="", db_default="", help_text="JSON of the callback for when all members were executed."
    )
    success = models.TextField(
        default="", db_default="", help_text="JSON of the callback for when all members succeeded."
    )

    complete_jid = ExactCharField(max_length=255, default="", db_default="")
    success_jid = ExactCharField(max_length=255, default="", db_default="")

    # Counted in the transactions that change the members, so no query looks through a batch of 100,000 (ADR 0011).
    total = models.IntegerField(default=0, db_default=0)
    pending = models.IntegerField(default=0, db_default=0, help_text=_("Number of members that may still run."))
    unrun = models.IntegerField(default=0, db_default=0, help_text=_("Number of members that were never executed."))
    failed = models.IntegerField(default=0, db_default=0, help_text=_("Number of members whose last run failed."))
    is_broken = models.BooleanField(
        default=False, db_default=False, help_text=_("Whether success has become impossible.")
    )
    children = models.IntegerField(default=0, db_default=0)
    open_children = models.IntegerField(default=0, db_default=0)
    unsucceeded_children = models.IntegerField(default=0, db_default=0)

    # "": not enqueued, "1": enqueued, "2": ended with success. The protocol's BATCH STATUS has the same values (W26).
    complete_st = ExactCharField(max_length=1, default="", db_default="")
    success_st = ExactCharField(max_length=1, default="", db_default="")
    complete_failed = models.BooleanField(default=False, db_default=False)
    success_failed = models.BooleanField(default=False, db_default=False)
    # Each outcome is reported to the parent once, even if steps are repeated after a crash (ADR 0011).
    reported_broken = models.BooleanField(
        default=False, db_default=False, help_text="Whether the parent counts it as broken; the next two are alike."
    )
    reported_complete = models.BooleanField(default=False, db_default=False)
    reported_success = models.BooleanField(default=False, db_default=False)

    created_at = models.DateTimeField(db_default=Now())
    committed_at = models.DateTimeField(null=True)
    expires_at = models.DateTimeField(null=True, help_text="Time at which it expires unless it is committed.")
    expired_at = models.DateTimeField(null=True)
    reopened_until = models.DateTimeField(
        null=True, help_text="Time at which a reopened batch counts as committed again."
    )
    finished_at = models.DateTimeField(null=True, help_text="Time at which its last member and callback ended.")

    class Meta:
        permissions = BATCH_PERMISSIONS
        verbose_name_plural = "batches"
        indexes: ClassVar = [
            models.Index(fields=["parent_bid"], name="faktory_children"),
            # A commit clears `expires_at`, so this index has uncommitted batches only.
            models.Index(fields=["expires_at"], name="faktory_batch_open", condition=Q(expires_at__isnull=False)),
            PartialIndex(
                fields=["reopened_until"], name="faktory_batch_reopened", condition=Q(reopened_until__isnull=False)
            ),
            models.Index(fields=["finished_at"], name="faktory_batch_over", condition=Q(finished_at__isnull=False)),
            # Finished batches are kept for BATCH_TTL, so the live ones have an index of their own.
            models.Index(fields=["id"], name="faktory_batch_live", condition=Q(finished_at__isnull=True)),
        ]
        constraints: ClassVar = [
            # A member that is counted twice violates this, so its transaction is rolled back.
            models.CheckConstraint(
                name="faktory_batch_counts",
                condition=Q(pending__gte=0, pending__lte=F("total"), unrun__gte=0, unrun__lte=F("pending"))
                & Q(failed__gte=0, failed__lte=F("pending")),
            ),
            models.CheckConstraint(
                name="faktory_batch_children",
                condition=Q(open_children__gte=0, unsucceeded_children__gte=0)
                & Q(open_children__lte=F("unsucceeded_children"), unsucceeded_children__lte=F("children")),
            ),
            models.CheckConstraint(
                # The success callback is enqueued only after the complete callback has succeeded.
                name="faktory_batch_progress",
                condition=Q(complete_st__in=["", "1", "2"], success_st__in=["", "1", "2"])
                & (~Q(success_st__in=["1", "2"]) | Q(complete_st="2")),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.description[:100] or 'batch'} {self.bid}"

    @classmethod
    def check(cls, **kwargs: Any) -> list[CheckMessage]:
        """Run Django's checks, see `without_ignored_parts`."""
        return without_ignored_parts(super().check(**kwargs))

    @property
    def is_committed(self) -> bool:
        """True if its definition is complete."""
        return self.committed_at is not None

    @property
    def is_reopened(self) -> bool:
        """True if it was opened again after its commit: no callback is enqueued until it is committed again."""
        return self.reopened_until is not None

    @property
    def is_expired(self) -> bool:
        """True if it was not committed in time: its jobs run, its callbacks do not."""
        return self.expired_at is not None

    @property
    def has_complete(self) -> bool:
        """True if it has a callback for when all members were executed."""
        return self.complete != ""

    @property
    def has_success(self) -> bool:
        """True if it has a callback for when all members succeeded."""
        return self.success != ""

    @property
    def is_over(self) -> bool:
        """True if it is final: nothing can change it."""
        return self.finished_at is not None
