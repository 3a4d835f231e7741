"""The stored models and the constraints that enforce their invariants. State changes live in `store`.

Imports no broker, task or setting. Times are the database's, aware, in UTC.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from ..core.histograms import BUCKETS
from ..core.lifecycle import State
from . import permissions as may
from .constraints import JOB_IS_SOUND
from .cron import CronEntry as CronEntry  # Django finds models here
from .cron import CronRun as CronRun
from .fields import ExactCharField
from .indexes import HotIndex, IndexWhereSet, PartialIndex, UniqueWhereSet
from .limit import Gate as Gate
from .limit import Limit as Limit
from .querysets import JobQuerySet as JobQuerySet  # imported from here by other modules
from .querysets import QueueQuerySet

_HAS_FAILED = Q(state__in=["dead", "discarded", "expired"])


class Job(models.Model):
    """One unit of work, from PUSH to its end. Only `store` changes it, by guarded updates."""

    jid = ExactCharField(max_length=255, unique=True)
    jobtype = ExactCharField(max_length=255)
    queue = ExactCharField(max_length=255)
    state = ExactCharField(max_length=10, choices=[(str(state), str(state)) for state in State])
    weight = models.SmallIntegerField(
        default=0, help_text="Minus the priority: ascending, so that one plain index serves FETCH on every database."
    )
    payload = models.TextField(help_text="The job's JSON as its client sent it.")
    retry = models.IntegerField(default=25)
    reserve_for = models.IntegerField(default=1800)
    backtrace = models.SmallIntegerField(default=0)
    result_ttl = models.IntegerField(null=True)

    created_at = models.DateTimeField(db_default=Now())
    run_at = models.DateTimeField(null=True, help_text="When a scheduled or retrying job becomes due.")
    enqueued_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    reserved_until = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    purge_at = models.DateTimeField(null=True)

    # db_default: the INSERT of `store` names only the columns that a new job needs.
    wid = ExactCharField(max_length=255, default="", db_default="", help_text="Who holds it, or held it last.")
    attempt = models.IntegerField(
        default=0, db_default=0, help_text="How often it was handed out; fences late reports."
    )
    failures = models.IntegerField(default=0, db_default=0)
    losses = models.SmallIntegerField(default=0, db_default=0, help_text="How often its worker was lost.")
    interruptions = models.IntegerField(
        default=0, db_default=0, help_text="How often a worker that stopped gave it back unfinished."
    )
    errtype = ExactCharField(max_length=100, default="", db_default="")
    failure = models.TextField(default="", db_default="", help_text="JSON of the latest failure, as FETCH gives it.")
    history = models.TextField(default="", db_default="", help_text="JSON array: every failed attempt.")
    result = models.TextField(null=True, help_text="JSON of what the task returned.")

    expires_at = models.DateTimeField(null=True, help_text="A job that nobody took by then is dropped.")
    unique_key = ExactCharField(max_length=64, null=True, help_text="Held against others of its kind (W27).")
    unique_expires_at = models.DateTimeField(null=True, help_text="When the key is free whatever happens.")
    unique_until_start = models.BooleanField(default=False, db_default=False)

    lock_key = ExactCharField(max_length=255, null=True, help_text="Of the jobs with one key one runs at a time.")
    lock_token = models.BigIntegerField(null=True, help_text="The lock it holds, while it runs.")

    limit_key = ExactCharField(max_length=255, null=True, help_text="The key whose limit concerns it (ADR 0016).")
    gate = models.BigIntegerField(null=True, help_text="The gate it is parked at, or was let go from to be claimed.")
    passes = ExactCharField(max_length=64, null=True, help_text="The gates it holds passes of; empty: it must pass.")

    bid = ExactCharField(max_length=255, null=True, help_text="The batch it is a member of.")
    callback_of = ExactCharField(max_length=255, null=True, help_text="The batch whose callback it is.")
    has_run = models.BooleanField(default=False, db_default=False, help_text="Whether its batch counts it as executed.")
    counts_failed = models.BooleanField(
        default=False, db_default=False, help_text="Whether its batch counts it as failed."
    )

    claim = models.BigIntegerField(null=True, help_text="The claim that took it last; negative: read ahead (ADR 0022).")

    about = ExactCharField(max_length=255, null=True, help_text="The object it is about, as app.model/pk.")

    cancel_requested_at = models.DateTimeField(
        null=True, help_text="When somebody cancelled it while it ran; counts until it is enqueued anew."
    )

    # No save() and no post_save signal is part of a job's life: `store` writes raw SQL and updates (ADR 0003).
    objects = JobQuerySet.as_manager()

    class Meta:
        permissions = may.JOB
        indexes: ClassVar = [
            HotIndex(
                fields=["queue", "weight", "enqueued_at", "id"], name="faktory_ready", condition=Q(state="enqueued")
            ),
            # Without partial indexes (MariaDB) the index of ready jobs starts with the state, so it serves these too.
            models.Index(
                fields=["queue", "weight", "enqueued_at", "id"], name="faktory_blocked", condition=Q(state="blocked")
            ),
            # Includes the state, so that both sets are counted from the index alone.
            HotIndex(
                fields=["run_at", "id"],
                include=["state"],
                name="faktory_due",
                condition=Q(state__in=["scheduled", "retries"]),
            ),
            HotIndex(fields=["reserved_until"], name="faktory_reserved", condition=Q(state="working")),
            HotIndex(
                fields=["purge_at"],
                name="faktory_purge",
                condition=Q(state__in=["dead", "succeeded", "discarded", "expired"]),
            ),
            # Finished rows keep their expiry. In the index they would be the majority, and each maintenance query would
            # read past them. MariaDB indexes them, so maintenance clears theirs (`maintenance.due.expire`). Not a
            # HotIndex: with the state first, MariaDB would have to update it for each job that never expires.
            models.Index(
                fields=["expires_at"],
                name="faktory_expiring",
                condition=Q(expires_at__isnull=False, state__in=["scheduled", "enqueued", "blocked", "retries"]),
            ),
            # Finds the next job of a key in the order of claims (ADR 0015).
            IndexWhereSet(
                fields=["lock_key", "state", "queue", "weight", "enqueued_at", "id"], name="faktory_by_lock_key"
            ),
            # Finds the next jobs of a limiter, for each queue in the order of claims (ADR 0016).
            IndexWhereSet(fields=["gate", "queue", "weight", "enqueued_at", "id"], name="faktory_at_gate"),
            models.Index(fields=["bid", "state"], name="faktory_members", condition=Q(bid__isnull=False)),
            models.Index(fields=["callback_of"], name="faktory_callbacks", condition=Q(callback_of__isnull=False)),
            models.Index(fields=["about", "id"], name="faktory_about", condition=Q(about__isnull=False)),
            # For searches of failed jobs among millions that succeeded; a job that succeeds directly never touches
            # these indexes.
            PartialIndex(fields=["state", "errtype", "id"], name="faktory_failed", condition=_HAS_FAILED),
            PartialIndex(fields=["state", "id"], name="faktory_failed_latest", condition=_HAS_FAILED),
        ]
        constraints: ClassVar = [
            # NULL for jobs that are not unique, so most jobs have no entry in this index.
            UniqueWhereSet(name="faktory_job_unique", fields=["unique_key"]),
            models.CheckConstraint(name="faktory_job_sound", condition=JOB_IS_SOUND),
        ]

    def __str__(self) -> str:
        return f"{self.jobtype} {self.jid}"

    @property
    def priority(self) -> int:
        """Django's priority, -100 to 100, larger first."""
        return -self.weight

    @property
    def attempts(self) -> int:
        """Runs that failed, lost their worker, succeeded or are in progress. Interrupted runs do not count.

        The column `attempt` is a fence: it also counts claims that were released.
        """
        return self.failures + self.losses + (self.state in (State.WORKING, State.SUCCEEDED))

    @property
    def is_cancelled(self) -> bool:
        """True if it was cancelled after its latest enqueue."""
        asked, enqueued = self.cancel_requested_at, self.enqueued_at
        return asked is not None and (enqueued is None or asked >= enqueued)


class Batch(models.Model):
    """A group of jobs and the callbacks that follow them (W26). `batch_rules` has the rules.

    At every commit the counters equal what its rows in the table of jobs add up to.
    """

    bid = ExactCharField(max_length=255, unique=True)
    parent_bid = ExactCharField(max_length=255, default="", db_default="")
    depth = models.SmallIntegerField(default=0, help_text="Its ancestors: rows are locked the deepest first.")
    description = models.TextField(default="", db_default="")
    complete = models.TextField(default="", db_default="", help_text="JSON of the job for when all were executed.")
    success = models.TextField(default="", db_default="", help_text="JSON of the job for when all succeeded.")

    complete_jid = ExactCharField(max_length=255, default="", db_default="")
    success_jid = ExactCharField(max_length=255, default="", db_default="")

    total = models.IntegerField(default=0, db_default=0)
    pending = models.IntegerField(default=0, db_default=0, help_text="Members that are not settled.")
    unrun = models.IntegerField(default=0, db_default=0, help_text="Members that were never executed.")
    failed = models.IntegerField(default=0, db_default=0, help_text="Members whose last run failed.")
    is_broken = models.BooleanField(default=False, db_default=False, help_text="Success cannot come any more.")
    children = models.IntegerField(default=0, db_default=0)
    open_children = models.IntegerField(default=0, db_default=0)
    unsucceeded_children = models.IntegerField(default=0, db_default=0)

    complete_st = ExactCharField(max_length=1, default="", db_default="")
    success_st = ExactCharField(max_length=1, default="", db_default="")
    complete_failed = models.BooleanField(default=False, db_default=False)
    success_failed = models.BooleanField(default=False, db_default=False)
    told_broken = models.BooleanField(
        default=False, db_default=False, help_text="Its parent knows; so with the others."
    )
    told_complete = models.BooleanField(default=False, db_default=False)
    told_success = models.BooleanField(default=False, db_default=False)

    created_at = models.DateTimeField(db_default=Now())
    committed_at = models.DateTimeField(null=True)
    expires_at = models.DateTimeField(null=True, help_text="When it expires unless it is committed.")
    expired_at = models.DateTimeField(null=True)
    reopened_until = models.DateTimeField(
        null=True, help_text="When a batch that was opened again counts as committed, unless it is committed before."
    )
    finished_at = models.DateTimeField(null=True, help_text="When it was over: nothing can happen to it any more.")

    class Meta:
        permissions = may.BATCH
        verbose_name_plural = "batches"
        indexes: ClassVar = [
            models.Index(fields=["parent_bid"], name="faktory_children"),
            models.Index(fields=["expires_at"], name="faktory_batch_open", condition=Q(expires_at__isnull=False)),
            PartialIndex(
                fields=["reopened_until"], name="faktory_batch_reopened", condition=Q(reopened_until__isnull=False)
            ),
            models.Index(fields=["finished_at"], name="faktory_batch_over", condition=Q(finished_at__isnull=False)),
            # Finished batches are kept for BATCH_TTL, so the live ones have an index of their own.
            models.Index(fields=["id"], name="faktory_batch_live", condition=Q(finished_at__isnull=True)),
        ]
        constraints: ClassVar = [
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


class JobLock(models.Model):
    """A key that a running job has locked (ADR 0015). Its id is the fencing token: later locks have higher ids."""

    # Exclusion rests on this unique key alone; the state `blocked` only saves reads and wakeups (ADR 0015).
    key = ExactCharField(max_length=255, unique=True, db_column="lock_key")
    jid = ExactCharField(max_length=255)
    attempt = models.IntegerField()
    wid = ExactCharField(max_length=255, db_index=True)
    lease = models.DurationField(help_text="How long it lives without being extended.")
    acquired_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    is_lapsed = models.BooleanField(default=False, help_text="Whether its end was noticed: the next job is ready.")

    class Meta:
        permissions = may.LOCK
        indexes: ClassVar = [models.Index(fields=["is_lapsed", "expires_at"], name="faktory_lock_ends")]

    def __str__(self) -> str:
        return f"{self.key} #{self.pk}"


class Tracking(models.Model):
    """Progress of a job, set by TRACK SET and kept for a while after its end (W27). The state is the job's column."""

    jid = ExactCharField(max_length=255, primary_key=True)
    percent = models.SmallIntegerField(null=True)
    desc = models.TextField(null=True)
    updated_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(name="faktory_tracking_percent", condition=Q(percent__range=(0, 100))),
        ]

    def __str__(self) -> str:
        return str(self.jid)


class Queue(models.Model):
    """A queue that was used, and whether it is paused. Jobs refer to it by name only, without a foreign key."""

    name = ExactCharField(max_length=255, primary_key=True)
    paused_at = models.DateTimeField(null=True, blank=True)
    used_at = models.DateTimeField(
        db_default=Now(), editable=False, help_text="When a job was pushed to it last, or waited in it; to an hour."
    )

    objects = QueueQuerySet.as_manager()

    class Meta:
        permissions = may.QUEUE

    def __str__(self) -> str:
        return str(self.name)


class WorkerProcess(models.Model):
    """A process in any language that sent HELLO with a wid."""

    class State(models.TextChoices):
        """State of a worker; it changes in one direction only: running, quiet, terminate."""

        RUNNING = "running"
        QUIET = "quiet"
        TERMINATE = "terminate"

    wid = ExactCharField(max_length=255, primary_key=True)
    hostname = models.CharField(max_length=255, default="")
    pid = models.BigIntegerField(default=0)
    labels = models.JSONField(default=list)
    state = ExactCharField(max_length=10, choices=State.choices, default=State.RUNNING)
    rss_kb = models.BigIntegerField(default=0)
    started_at = models.DateTimeField(db_default=Now())
    seen_at = models.DateTimeField(db_default=Now(), help_text="Latest HELLO, BEAT or sight of a connection.")
    beat_at = models.DateTimeField(
        null=True, help_text="Latest BEAT; a wid that never sent one is left to its reservations."
    )

    class Meta:
        permissions = may.WORKER
        verbose_name_plural = "worker processes"
        constraints: ClassVar = [
            models.CheckConstraint(
                name="faktory_worker_state", condition=Q(state__in=["running", "quiet", "terminate"])
            ),
        ]

    def __str__(self) -> str:
        return f"{self.hostname}:{self.pid} {self.wid}"


class Counter(models.Model):
    """Numbers of finished jobs by day: a row for each counting connection, and one into which the others are folded.

    A row for each connection avoids that all transactions wait for the lock of one row.
    """

    pk = models.CompositePrimaryKey("day", "slot")
    day = models.DateField()
    slot = models.BigIntegerField(help_text="Drawn at random by the connection that counts in it; -1: folded.")
    processed = models.BigIntegerField(default=0, help_text="Ends, good and bad.")
    failed = models.BigIntegerField(default=0)
    late = models.BigIntegerField(default=0, help_text="Reports that came too late to change anything.")

    def __str__(self) -> str:
        return f"{self.day} #{self.slot}"


class Measure(models.Model):
    """Timings of one minute by queue and task; the row of 1970 has the totals since the beginning. See `histograms`."""

    pk = models.CompositePrimaryKey("minute", "queue", "jobtype")
    minute = models.DateTimeField()
    queue = ExactCharField(max_length=255)
    jobtype = ExactCharField(max_length=255)
    started = models.BigIntegerField()
    succeeded = models.BigIntegerField()
    failed = models.BigIntegerField()
    waited_s = models.FloatField(help_text="Seconds between enqueued and started, of all together.")
    ran_s = models.FloatField()
    used_at = models.DateTimeField(db_default=Now(), help_text="When something was added last.")
    for _place in range(BUCKETS):  # one column for each bucket of the histograms: SQL can add to them
        vars()[f"wait_{_place}"] = models.BigIntegerField()
        vars()[f"run_{_place}"] = models.BigIntegerField()

    def __str__(self) -> str:
        return f"{self.minute:%Y-%m-%d %H:%M} {self.queue} {self.jobtype}"


class OutboxEntry(models.Model):
    """A job in transit to another database or to a Faktory server: see `brokers.outbox`."""

    jid = ExactCharField(max_length=255)
    queue = ExactCharField(max_length=255)
    job = models.TextField(help_text="The job with all that is known of it, as JSON.")
    created_at = models.DateTimeField(db_default=Now())
    leased_until = models.DateTimeField(null=True, help_text="Somebody is handing it on until then.")
    error = models.TextField(default="", db_default="", help_text="Why it was refused: it stays for a person to see.")

    class Meta:
        permissions = may.OUTBOX
        verbose_name_plural = "outbox entries"

    def __str__(self) -> str:
        return f"#{self.pk} {self.jid}"
