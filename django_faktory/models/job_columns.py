"""The columns of a job, which its row has in both tables: see `tables`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.core.checks import CheckMessage
from django.db import models
from django.db.models.functions import Now

from ..core.lifecycle import State, count_claims
from ..core.steps import FOREVER
from .database import JobsModel
from .fields import ExactCharField
from .indexes import without_ignored_parts


class JobColumns(JobsModel):
    """One unit of work, from PUSH to its end."""

    # The order of the table's columns: those of fixed width, texts, then those that a claim changes. If the new version
    # of a row is on the same page, PostgreSQL logs only what is between their equal beginning and end: claims then
    # write 441 instead of 941 bytes of its log (`fillfactor` in the migration leaves room on the page).
    # db_default: the INSERT of `store` names only the columns that a new job needs.

    created_at = models.DateTimeField(db_default=Now(), help_text="Time at which it was pushed.")
    enqueued_at = models.DateTimeField(null=True, help_text="Time at which it last became ready.")
    finished_at = models.DateTimeField(null=True, help_text="Time at which it ended.")
    purge_at = models.DateTimeField(null=True, help_text="Time at which its row is deleted.")
    failed_at = models.DateTimeField(
        null=True, help_text="Time of its latest failure, or of its kill; set while it is dead or waits for a retry."
    )
    expires_at = models.DateTimeField(null=True, help_text="Time at which it is dropped unless it was claimed before.")
    unique_expires_at = models.DateTimeField(null=True, help_text="Time at which the unique key is free in any case.")
    cancel_requested_at = models.DateTimeField(
        null=True, help_text="Time at which it was cancelled while it ran; cleared when it is enqueued again."
    )
    retry = models.IntegerField(default=25, help_text="How many failures are followed by another attempt.")
    reserve_for = models.IntegerField(default=1800)
    result_ttl = models.IntegerField(null=True)
    failures = models.IntegerField(default=0, db_default=0, help_text="Number of failed attempts.")
    interruptions = models.IntegerField(
        default=0, db_default=0, help_text="Number of times a stopping worker released it unfinished."
    )
    sort_priority = models.SmallIntegerField(
        default=0, help_text="Minus the priority: ascending, so that one index serves FETCH on every database."
    )
    backtrace = models.SmallIntegerField(default=0)
    losses = models.SmallIntegerField(default=0, db_default=0, help_text="Number of times its worker was lost.")
    unique_until_start = models.BooleanField(default=False, db_default=False)
    has_run = models.BooleanField(default=False, db_default=False, help_text="Whether its batch counts it as executed.")
    counts_failed = models.BooleanField(
        default=False, db_default=False, help_text="Whether its batch counts it as failed."
    )

    jid = ExactCharField(max_length=255, help_text="Id of the job; `id` is the number of its row.")
    jobtype = ExactCharField(max_length=255, help_text="Name of its task.")
    queue = ExactCharField(max_length=255, help_text="Name of its queue.")
    lock_key = ExactCharField(max_length=255, null=True, help_text="Jobs with the same key run one at a time.")
    limit_key = ExactCharField(max_length=255, null=True, help_text="The key whose limit applies to it (ADR 0016).")
    bid = ExactCharField(max_length=255, null=True, help_text="The batch it is a member of.")
    callback_of = ExactCharField(max_length=255, null=True, help_text="The batch whose callback it is.")
    about = ExactCharField(max_length=255, null=True, help_text="The related object, as app.model/pk.")
    waits_for = ExactCharField(
        max_length=100, null=True, help_text="Name of the signal for which it waits, if it is scheduled (ADR 0052)."
    )
    errtype = ExactCharField(
        max_length=100, default="", db_default="", help_text="Path of the exception class of its latest failure."
    )
    failure = models.TextField(default="", db_default="", help_text="JSON of the latest failure, as FETCH returns it.")
    history = models.TextField(default="", db_default="", help_text="JSON array of all failed attempts.")
    result = models.TextField(null=True, help_text="JSON of the value that the task returned.")
    payload = models.TextField(help_text="The job's JSON as its client sent it.")

    state = ExactCharField(
        max_length=10,
        choices=[(str(state), str(state)) for state in State],
        help_text="One of: " + ", ".join(State) + ".",
    )
    wid = ExactCharField(
        max_length=255, default="", db_default="", help_text="The worker that holds it, or held it last."
    )
    is_returned = models.BooleanField(
        default=False, db_default=False, help_text="Whether it became ready later than its `enqueued_at` (ADR 0046)."
    )
    attempt = models.BigIntegerField(
        default=0, db_default=0, help_text="Grows with each claim; a report with another number is too late (ADR 0048)."
    )
    run_at = models.DateTimeField(null=True, help_text="Time at which a scheduled or retrying job becomes due.")
    started_at = models.DateTimeField(null=True, help_text="Begin of its latest run.")
    reserved_until = models.DateTimeField(null=True)
    # Drawn by the sender before the claim, so that it can release the jobs of a claim without an answer (ADR 0017).
    claim = models.BigIntegerField(
        null=True, help_text="The claim that took it last; negative: not confirmed (ADR 0026)."
    )
    lock_token = models.BigIntegerField(null=True, help_text="Id of the lock that it holds while it runs.")
    # No foreign key: a limiter may be deleted while jobs name it, and a sweep then unblocks them (ADR 0016).
    limiter = models.BigIntegerField(null=True, help_text="The limiter that blocks it, or that unblocked it.")
    permits = ExactCharField(
        max_length=64,
        null=True,
        help_text="The limiters it holds permits of; empty: claimed, without permits yet; NULL: it needs none.",
    )
    unique_key = ExactCharField(max_length=64, null=True, help_text="Key that no other job may have meanwhile (W27).")

    class Meta(JobsModel.Meta):
        abstract = True

    @classmethod
    def check(cls, **kwargs: Any) -> list[CheckMessage]:
        """Run Django's checks, see `without_ignored_parts`."""
        return without_ignored_parts(super().check(**kwargs))

    def __str__(self) -> str:
        return f"{self.jobtype} {self.jid}"

    @property
    def priority(self) -> int:
        """Django's priority, -100 to 100, larger first."""
        return -self.sort_priority

    @property
    def due_at(self) -> datetime | None:
        """Time at which it becomes due; None also if it waits for a signal without a time-out."""
        return None if self.run_at == FOREVER else self.run_at

    @property
    def awaited(self) -> str:
        """Name of the signal for which it waits; "" if it does not."""
        # The column keeps the latest name: the ways out of this state need not clear it.
        return (self.waits_for or "") if self.state == State.SCHEDULED else ""

    @property
    def claims(self) -> int:
        """Number of claims, of which some may have been released."""
        return count_claims(self.attempt)

    @property
    def attempts(self) -> int:
        """Runs that failed, lost their worker, succeeded or are in progress. Interrupted runs do not count.

        Neither do runs before the latest one that has ended and had committed a step (ADR 0051).
        """
        # The column `attempt` is a fence: it grows with each claim, and begins at a number of its own in each row.
        return self.failures + self.losses + (self.state in (State.WORKING, State.SUCCEEDED))

    @property
    def max_attempts(self) -> int:
        """Attempts it may use: the first, its retries, and one for each loss, which uses no retry.

        A manual retry adds one to a job that has used them all.
        """
        return max(max(self.retry, 0) + 1 + self.losses, self.attempts)

    @property
    def is_cancelled(self) -> bool:
        """True if it was cancelled after its latest enqueue."""
        requested_at, enqueued_at = self.cancel_requested_at, self.enqueued_at
        return requested_at is not None and (enqueued_at is None or requested_at >= enqueued_at)
