"""Serializers of the API's responses: the dicts of `operations.serializers`, described for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema_serializer
from rest_framework import serializers

from ...core.cron import RunOutcome
from ...core.lifecycle import State
from ...models import WorkerProcess
from ...models.cron import CronEntry
from ...operations import serializers as operation_serializers
from ...operations.alarms import CRITICAL, WARNINGS

Base = serializers.Serializer[Any]


def _text(help_text: str, *, null: bool = False) -> serializers.CharField:
    return serializers.CharField(help_text=help_text, allow_null=null, read_only=True)


def _number(help_text: str, *, null: bool = False) -> serializers.IntegerField:
    return serializers.IntegerField(help_text=help_text, allow_null=null, read_only=True)


def _time(help_text: str, *, null: bool = True) -> serializers.DateTimeField:
    return serializers.DateTimeField(help_text=help_text, allow_null=null, read_only=True)


def _flag(help_text: str) -> serializers.BooleanField:
    return serializers.BooleanField(help_text=help_text, read_only=True)


def _json(help_text: str) -> serializers.JSONField:
    """Return a field for any JSON value, null included.

    Its schema is `{}`. With `allow_null` it would be `oneOf` that and null, and a null would match both.
    """
    return serializers.JSONField(help_text=help_text, read_only=True)


def _log_lines(help_text: str) -> serializers.ListField:
    return serializers.ListField(child=serializers.CharField(), read_only=True, help_text=help_text)


class ShapedSerializer(Base):
    """Serializer of a row through its `shape` function."""

    shape: ClassVar[Callable[..., dict[str, Any]]]

    def to_representation(self, instance: Any) -> dict[str, Any]:
        """Return the same dict as the command line prints with `--json`."""
        return type(self).shape(instance)


# The fields below are in the order of the dicts: tests compare both, so that no member is left undescribed.
class JobSummarySerializer(ShapedSerializer):
    """A job without its arguments and failures."""

    shape = staticmethod(operation_serializers.job_of)

    jid = _text("Its id.")
    jobtype = _text("Name of the task, or of the function of a worker in another language.")
    queue = _text("Its queue.")
    state = serializers.ChoiceField([str(state) for state in State], read_only=True, help_text="Its state.")
    priority = _number("Django's priority, -100 to 100, larger first.")
    attempt = _number("Its attempts: failed ones, lost ones, and the one that runs or succeeded.")
    max_attempts = _number("Attempts it may use; a manual retry adds one to a job that has used them all.")
    failures = _number("How often it failed.")
    interruptions = _number("Number of runs interrupted by the stop of a worker; not counted as attempts.")
    errtype = _text("Type of the latest failure.", null=True)
    about = _text("The object it is about, as `app.model/pk`.", null=True)
    batch = _text("The batch it is a member of.", null=True)
    worker = _text("The worker that runs it, or ran it last.", null=True)
    created_at = _time("When it was pushed.", null=False)
    run_at = _time("When a scheduled or retrying job becomes due.")
    enqueued_at = _time("When it was enqueued; it determines the order of jobs with equal priority.")
    started_at = _time("When a worker claimed it.")
    finished_at = _time("When it ended.")
    failed_at = _time("When it failed the last time, or was killed.")


class FailedAttemptSerializer(Base):
    """A failed attempt of a job."""

    worker = _text("The worker that ran it.")
    errtype = _text("Type of the error.")
    message = _text("Message of the error.")
    started_at = _time("When it began.")
    failed_at = _time("When it failed.")
    backtrace = serializers.ListField(
        child=serializers.CharField(), read_only=True, help_text="Lines of the traceback."
    )
    log = _log_lines("The latest lines that its task logged.")
    release = _text("The project's release that its worker ran; empty if unknown.")


class InterruptedRunSerializer(Base):
    """A run that ended through no fault of the task, as at a shutdown: neither an attempt nor a failure."""

    worker = _text("The worker that ran it.")
    message = _text("Why it ended.")
    started_at = _time("When it began.")
    interrupted_at = _time("When the run was interrupted.")


class WaitingReasonSerializer(Base):
    """Why a job waits."""

    kind = _text(
        "paused-queue, paused-task, no-workers, unserved-queue, limit, rate, lock, unknown-task, scheduled, retry, "
        "overdue, or queued if nothing holds it back."
    )
    text = _text("The reason, in one line.")
    at = _time("Since when it waits for this, or the time for which it waits.")


class JobDetailSerializer(JobSummarySerializer):
    """A job with the reason why it waits, its arguments, failures and result."""

    shape = staticmethod(operation_serializers.whole_job_of)

    waiting_reason = WaitingReasonSerializer(allow_null=True, read_only=True, help_text="Null: it does not wait.")
    job = _json("The job as its client sent it, with args and custom.")
    attempts = FailedAttemptSerializer(many=True, read_only=True, help_text="Failed attempts, the oldest first.")
    interrupted = InterruptedRunSerializer(many=True, read_only=True, help_text="Interrupted runs, the latest 10.")
    result = _json("Return value of the task; null if it is not kept.")
    log = _log_lines("The latest lines that the successful run logged.")


class AlarmSerializer(ShapedSerializer):
    """A condition that needs attention."""

    shape = staticmethod(operation_serializers.alarm_of)

    kind = serializers.ChoiceField(sorted(CRITICAL | WARNINGS), read_only=True, help_text="The kind of the problem.")
    subject = _text("The queue, task, worker, batch or cron entry; empty if it is about the whole installation.")
    is_critical = _flag("Whether jobs do not run at all, or fail.")
    text = _text("What is wrong, in one line.")
    advice = _text("Consequence and remedy.")
    since = _time("When it began, as far as it is known.")
    affected = _number("Jobs, runs or rows that are affected.")
    note = _text("Of a pause: who paused it, and why; empty for other alarms.")


class EnqueuedSerializer(Base):
    """The job that was enqueued."""

    # No more of the job: a user who may enqueue need not have the permission to view jobs (ADR 0034).
    jid = _text("The job's id.")


class ActionResultSerializer(Base):
    """Result of an action on one job."""

    changed = _number("Jobs changed: 1.")
    state = _text("The job's state now; null: its row is gone.", null=True)


class BulkResultSerializer(Base):
    """Result of one part of an action on many jobs."""

    query = _text("The query in canonical form.")
    found = _number("Jobs found in this part; with `dry_run` all matching jobs, counted up to 10000.")
    changed = _number("Jobs changed; the others had left the states that the action requires.")
    next = _text("Send it as `after`, with the same query, for the next part; null: this was the last.", null=True)


class QueueSerializer(Base):
    """A queue with its size and latency."""

    # Sizes end at a limit, because a count of a long queue takes too long for a request.
    name = _text("Its name.")
    size = _number("Waiting jobs, counted up to 10000, and up to 20000 for all queues of a page.")
    is_more = _flag("Whether there may be more than `size`.")
    latency_s = serializers.FloatField(read_only=True, help_text="Seconds its oldest job has waited.")
    is_paused = _flag("Whether workers get no jobs from it.")
    paused_at = _time("When it was paused.")
    paused_by = _text("The user or program that paused it.", null=True)
    pause_reason = _text("Why it was paused.", null=True)


class ClearedQueueSerializer(Base):
    """Whether a queue has been cleared completely."""

    is_done = _flag("False: jobs are left; send the request again.")


class WorkerSerializer(Base):
    """A worker process in any language."""

    wid = _text("Its id.")
    hostname = _text("The machine it runs on.")
    pid = _number("Its process id there.")
    labels = serializers.ListField(child=serializers.CharField(), read_only=True, help_text="Labels that it reports.")
    queues = serializers.ListField(
        child=serializers.CharField(),
        read_only=True,
        allow_null=True,
        help_text="Queues that it serves; null for workers in other languages.",
    )
    threads = serializers.IntegerField(
        read_only=True,
        allow_null=True,
        help_text="Jobs that it runs at a time; null for workers in other languages.",
    )
    state = serializers.ChoiceField(
        WorkerProcess.Phase.values, read_only=True, help_text="running, quiet or terminate; a worker never goes back."
    )
    rss_kb = _number("Its memory in KB; 0 if it reports none.")
    jobs = _number("Jobs that it runs.")
    started_at = _time("When it connected.", null=False)
    beat_at = _time("Its latest heartbeat.")


class ChangeCountSerializer(Base):
    """Result of an action on a worker process, or of a retry of the failed jobs of a batch."""

    changed = _number("Workers or jobs changed. A worker receives its new state in the reply to its next heartbeat.")


class BatchSerializer(ShapedSerializer):
    """A batch with its counters and callbacks."""

    shape = staticmethod(operation_serializers.batch_of)

    bid = _text("Its id.")
    description = _text("Description given by its creator.")
    parent = _text("The batch it is a child of.", null=True)  # type: ignore[assignment]  # DRF's `Field.parent`
    total = _number("Its members.")
    pending = _number("Members that have not ended.")
    failed = _number("Members whose last run failed.")
    complete = _text(
        "Progress of the callback that runs after all members were executed: `not yet`, `enqueued` or `done`."
    )
    success = _text("Progress of the callback that runs after all members succeeded.")
    is_broken = _flag("Whether the success callback can no longer run.")
    created_at = _time("When it was created.", null=False)


class BatchTreeItemSerializer(BatchSerializer):
    """A batch with its depth in the tree."""

    # The rows come in the order of a depth-first walk, so the depth suffices to draw the tree.
    depth = _number("Number of its ancestors: 0 for the root.")

    @staticmethod
    def shape(batch: Any) -> dict[str, Any]:
        """Return the batch with its depth."""
        return {**operation_serializers.batch_of(batch), "depth": batch.depth}


class BatchTreeSerializer(Base):
    """The tree of a batch, depth first."""

    batches = BatchTreeItemSerializer(many=True, read_only=True, help_text="Depth first, beginning with the root.")
    is_more = _flag("Whether the tree is larger than what is shown.")


class CronRunSerializer(ShapedSerializer):
    """Outcome of one tick of a cron entry."""

    shape = staticmethod(operation_serializers.cron_run_of)

    tick = _time("When it was due; null: it was run manually.")
    at = _time("When a node handled it.", null=False)
    outcome = serializers.ChoiceField([str(value) for value in RunOutcome], read_only=True, help_text="Its outcome.")
    jid = _text("Its job.", null=True)
    note = _text("Why it has no job; null for users who may not view jobs.", null=True)


class CronSummarySerializer(Base):
    """A cron entry with its latest run."""

    name = _text("Its name.")
    schedule = _text("Five fields, or six with the second first; or @daily, …")
    zone = _text("The time zone the schedule is read in.")
    jobtype = _text("Name of the task or function that it enqueues.")
    queue = _text("Its queue; null: the queue of the task.", null=True)
    origin = serializers.ChoiceField(CronEntry.EntryOrigin.values, read_only=True, help_text="Where it is defined.")
    state = serializers.ChoiceField(
        ["active", "paused", "removed", "never"], read_only=True, help_text="Its state; `never`: it has no next tick."
    )
    problem = _text("Why it has no next tick.", null=True)
    next_at = _time("The next tick.")
    latest = CronRunSerializer(allow_null=True, read_only=True, help_text="Its latest run.")


# Hidden members are null here only: in other responses clients could not distinguish them from empty ones (ADR 0034).
class CronDetailSerializer(CronSummarySerializer):
    """A cron entry with its arguments, policies and past runs."""

    args = _json("The arguments, a list; null for users who may not view jobs.")
    kwargs = _json("The keyword arguments, an object; null for users who may not view jobs.")
    job = _json("Members of a job for another language's worker: retry, …; null for users who may not view jobs.")
    missed = _text("Policy for ticks that no node handled within a minute: skip, once or all.")
    window = _number('Seconds back that "once" and "all" search.')
    overlap = _text("Policy while an earlier job of the entry waits or runs: allow or skip.")
    next_times = serializers.ListField(
        child=serializers.DateTimeField(),
        read_only=True,
        help_text="The next five ticks; for a paused entry, the ticks it would have.",
    )
    runs = CronRunSerializer(many=True, read_only=True, help_text="The latest runs, the newest first; at most 50.")


class LockSerializer(ShapedSerializer):
    """A lock key, held by a running job."""

    shape = staticmethod(operation_serializers.lock_of)

    token = _number("Fencing token; a later lock of the same key has a higher one.")
    key = _text("Lock key; of all jobs with it, one runs at a time.")
    jid = _text("The job that has it.")
    attempt = _number("The attempt of the job that has it.")
    worker = _text("The worker that runs the job.", null=True)
    acquired_at = _time("When the job acquired it.", null=False)
    expires_at = _time("When it expires unless it is extended.", null=False)


class LimitSerializer(ShapedSerializer):
    """A limit on how many jobs run at once or start per period."""

    shape = staticmethod(operation_serializers.limit_of)

    id = _number("Its number.")
    scope = _text("queue, task or key.")
    name = _text("Name of the queue, task or key.")
    concurrency = _number("Jobs that may run at once.", null=True)
    rate = _text("Jobs that may start per period, such as 100/s.", null=True)
    burst = _number("Jobs that may start at once after an idle period.", null=True)
    is_paused = _flag("Whether no job may start.")
    paused_at = _time("When it was paused.")
    paused_by = _text("The user or program that paused it.", null=True)
    pause_reason = _text("Why it was paused.", null=True)
    origin = _text("Where it is defined: code, edited (code, overridden here) or admin.")
    in_use = _number("Jobs that run under it.")
    opens_at = _time("When the next job that waits for the rate may start.")


class LimitDetailSerializer(LimitSerializer):
    """A limit with the number of jobs waiting for it."""

    waiting = _number("Jobs that wait for it, counted up to 10,000.")


class RemovedLimitSerializer(Base):
    """Note about a deleted limit that is defined in code."""

    detail = _text("What follows: the limit returns when a node starts.")


class ChangedTasksSerializer(Base):
    """Tasks changed by a pause or resume."""

    tasks = serializers.ListField(child=_text("A task."), read_only=True, help_text="Tasks that this request changed.")


class ReleasedLockSerializer(Base):
    """Result of releasing a lock."""

    changed = _number("Locks released: 1.")


@extend_schema_serializer(many=False)  # one object, although the action is named `list`
class StatisticsSerializer(Base):
    """Totals and counts of all jobs, queues, workers and batches."""

    processed = _number("Jobs that ended, with or without success.")
    failed = _number("Failures.")
    late = _number("Reports of workers that arrived too late to change a job.")
    sets = serializers.DictField(child=serializers.IntegerField(), read_only=True, help_text="Jobs by state.")
    queues = _number("Queues that have been used.")
    workers = serializers.DictField(
        child=serializers.IntegerField(), read_only=True, help_text="Live workers by state."
    )
    batches = serializers.DictField(
        child=serializers.IntegerField(), read_only=True, help_text="Unfinished batches: open, committed."
    )
    counted_to = _number(
        "Limit of the counts in `sets`, `queues` and `batches`: a count equal to it means this number or more."
    )
