"""Rows as JSON, each described once: for the API with its OpenAPI document, and for the command line. Stable formats.

Times are RFC 3339, in UTC. `contrib.api.answers` builds the serializers from these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

from ..core.cron import RunOutcome
from ..core.lifecycle import State
from ..core.limits import rate_text
from ..core.payloads import rfc3339
from ..models import WorkerProcess
from ..models.cron import CronEntry
from ..models.pausable import Pausable
from .alarms import KINDS


def time_of(moment: datetime | str | None) -> str | None:
    """Return a time as RFC 3339 in UTC."""
    if moment is None or isinstance(moment, str):
        return moment or None
    return rfc3339(moment)


_CONVERTED: dict[str, Callable[[Any], Any]] = {"time": time_of, "choice": str}


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A member of a document."""

    kind: str
    help: str
    source: str | Callable[[Any], Any] = ""
    """Attribute of the row, or a function of it; "": the attribute with the name of the member."""
    null: bool = False
    choices: Sequence[str] = ()
    row: type[Row] | None = None
    many: bool = False

    def read(self, row: Any, name: str) -> Any:
        """Return the value of a row."""
        value = self.source(row) if callable(self.source) else attrgetter(self.source or name)(row)
        # Columns have empty texts where a document has null.
        if self.null and self.kind == "text":
            return value or None
        return _CONVERTED[self.kind](value) if self.kind in _CONVERTED else value


Text, Number, Flag, Seconds = (partial(Field, kind) for kind in ("text", "number", "flag", "seconds"))
Time, Times, Texts = (partial(Field, kind) for kind in ("time", "times", "texts"))
Choice, Value, Counts, Document = (partial(Field, kind) for kind in ("choice", "value", "counts", "document"))


class Row:
    """A document. Subclasses have a `Field` for each member."""

    fields: ClassVar[dict[str, Field]] = {}

    def __init_subclass__(cls) -> None:
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        cls.fields = {**cls.fields, **own}

    @classmethod
    def read(cls, row: Any, **given: Any) -> dict[str, Any]:
        """Return the document of a row; `given` has members that are no columns, such as counts of a whole page."""
        return {name: given[name] if name in given else field.read(row, name) for name, field in cls.fields.items()}


def _is_paused(row: Pausable) -> bool:
    return row.paused_at is not None


_PAUSE = (
    Time("When it was paused.", null=True),
    Text("The user or program that paused it.", lambda row: row.paused_at and row.paused_by, null=True),
    Text("Why it was paused.", lambda row: row.paused_at and row.pause_reason, null=True),
)


SHORT = (
    "id", "jid", "jobtype", "queue", "state", "sort_priority", "retry", "failures", "losses", "interruptions",
    "errtype", "about", "waits_for", "bid", "wid", "created_at", "run_at", "enqueued_at", "started_at", "finished_at",
    "failed_at",
)  # fmt: skip
"""Columns that `JobSummary` reads, so that lists do not load long texts."""


class JobSummary(Row):
    """A job without its arguments and failures."""

    jid = Text("Its id.")
    jobtype = Text("Name of the task, or of the function of a worker in another language.")
    queue = Text("Its queue.")
    state = Choice("Its state.", choices=tuple(State))
    priority = Number("Django's priority, -100 to 100, larger first.")
    attempt = Number("Its attempts: failed ones, lost ones, and the one that runs or succeeded.", "attempts")
    max_attempts = Number("Attempts it may use; a manual retry adds one to a job that has used them all.")
    failures = Number("How often it failed.")
    interruptions = Number("Number of runs interrupted by the stop of a worker; not counted as attempts.")
    errtype = Text("Type of the latest failure.", null=True)
    about = Text("The object it is about, as `app.model/pk`.", null=True)
    batch = Text("The batch it is a member of.", "bid", null=True)
    worker = Text("The worker that runs it, or ran it last.", "wid", null=True)
    created_at = Time("When it was pushed.")
    run_at = Time("When a scheduled or retrying job becomes due.", "due_at", null=True)
    waits_for = Text("Name of the signal for which it waits.", "awaited", null=True)
    enqueued_at = Time("When it was enqueued; it determines the order of jobs with equal priority.", null=True)
    started_at = Time("When a worker claimed it.", null=True)
    finished_at = Time("When it ended.", null=True)
    failed_at = Time("When it failed the last time, or was killed.", null=True)


class FailedAttempt(Row):
    """A failed attempt of a job."""

    worker = Text("The worker that ran it.", "wid")
    errtype = Text("Type of the error.")
    message = Text("Message of the error.")
    started_at = Time("When it began.", null=True)
    failed_at = Time("When it failed.", null=True)
    backtrace = Texts("Lines of the traceback.")
    log = Texts("The latest lines that its task logged.")
    release = Text("The project's release that its worker ran; empty if unknown.")


class InterruptedRun(Row):
    """A run that ended through no fault of the task, as at a shutdown: neither an attempt nor a failure."""

    worker = Text("The worker that ran it.", "wid")
    message = Text("Why it ended.")
    started_at = Time("When it began.", null=True)
    interrupted_at = Time("When the run was interrupted.", "failed_at", null=True)


class WaitingReason(Row):
    """Why a job waits."""

    kind = Text(
        "paused-queue, paused-task, no-workers, unserved-queue, limit, rate, lock, unknown-task, scheduled, retry, "
        "overdue, or queued if nothing holds it back."
    )
    text = Text("The reason, in one line.")
    at = Time("Since when it waits for this, or the time for which it waits.", null=True)


class JobDetail(JobSummary):
    """A job with the reason why it waits, its arguments, failures and result."""

    waiting_reason = Document("Null: it does not wait.", row=WaitingReason, null=True)
    job = Value("The job as its client sent it, with args and custom.")
    attempts = Document("Failed attempts, the oldest first.", row=FailedAttempt, many=True)
    interrupted = Document("Interrupted runs, the latest 10.", row=InterruptedRun, many=True)
    result = Value("Return value of the task; null if it is not kept.")
    log = Texts("The latest lines that the successful run logged.")


class AlarmRow(Row):
    """A condition that needs attention."""

    kind = Choice("The kind of the problem.", choices=sorted(KINDS))
    subject = Text("The queue, task, worker, batch or cron entry; empty if it is about the whole installation.")
    is_critical = Flag("Whether jobs do not run at all, or fail.")
    text = Text("What is wrong, in one line.")
    advice = Text("Consequence and remedy.")
    since = Time("When it began, as far as it is known.", null=True)
    affected = Number("Jobs, runs or rows that are affected.")
    note = Text("Of a pause: who paused it, and why; empty for other alarms.")


class QueueRow(Row):
    """A queue with its size and latency."""

    name = Text("Its name.")
    size = Number("Waiting jobs.")
    latency_s = Seconds("Seconds its oldest job has waited.")
    is_paused = Flag("Whether workers get no jobs from it.", _is_paused)
    paused_at, paused_by, pause_reason = _PAUSE


class WorkerRow(Row):
    """A worker process in any language."""

    wid = Text("Its id.")
    hostname = Text("The machine it runs on.")
    pid = Number("Its process id there.")
    labels = Texts("Labels that it reports.")
    queues = Texts("Queues that it serves; null for workers in other languages.", null=True)
    threads = Number("Jobs that it runs at a time; null for workers in other languages.", null=True)
    state = Choice("running, quiet or terminate; a worker never goes back.", choices=WorkerProcess.Phase.values)
    rss_kb = Number("Its memory in KB; 0 if it reports none.")
    jobs = Number("Jobs that it runs.")
    started_at = Time("When it connected.")
    beat_at = Time("Its latest heartbeat.", null=True)


# The keys are the values of BATCH STATUS, see `batch_rules.CallbackProgress`.
_CALLBACK_WORDS = {"": "not yet", "1": "enqueued", "2": "done"}


class BatchRow(Row):
    """A batch with its counters and callbacks."""

    bid = Text("Its id.")
    description = Text("Description given by its creator.")
    parent = Text("The batch it is a child of.", "parent_bid", null=True)
    total = Number("Its members.")
    pending = Number("Members that have not ended.")
    failed = Number("Members whose last run failed.")
    complete = Text(
        "Progress of the callback that runs after all members were executed: `not yet`, `enqueued` or `done`.",
        lambda batch: _CALLBACK_WORDS.get(batch.complete_st, batch.complete_st),
    )
    success = Text(
        "Progress of the callback that runs after all members succeeded.",
        lambda batch: _CALLBACK_WORDS.get(batch.success_st, batch.success_st),
    )
    is_broken = Flag("Whether the success callback can no longer run.")
    created_at = Time("When it was created.")


# The rows come in the order of a depth-first walk, so the depth suffices to draw the tree.
class BatchTreeItem(BatchRow):
    """A batch with its depth in the tree."""

    depth = Number("Number of its ancestors: 0 for the root.")


class CronRunRow(Row):
    """Outcome of one tick of a cron entry."""

    tick = Time("When it was due; null: it was run manually.", null=True)
    at = Time("When a node handled it.")
    outcome = Choice("Its outcome.", choices=tuple(RunOutcome))
    jid = Text("Its job.", null=True)
    note = Text("Why it has no job; null for users who may not view jobs.", null=True)


class CronSummary(Row):
    """A cron entry with its latest run."""

    name = Text("Its name.")
    schedule = Text("Five fields, or six with the second first; or @daily, …")
    zone = Text("The time zone the schedule is read in.")
    jobtype = Text("Name of the task or function that it enqueues.")
    queue = Text("Its queue; null: the queue of the task.", null=True)
    origin = Choice("Where it is defined.", choices=CronEntry.EntryOrigin.values)
    state = Choice("Its state; `never`: it has no next tick.", choices=["active", "paused", "removed", "never"])
    problem = Text("Why it has no next tick.", null=True)
    next_at = Time("The next tick.", null=True)
    latest = Document("Its latest run.", row=CronRunRow, null=True)


# Hidden members are null here only: in other responses clients could not distinguish them from empty ones (ADR 0034).
class CronDetail(CronSummary):
    """A cron entry with its arguments, policies and past runs."""

    args = Value("The arguments, a list; null for users who may not view jobs.")
    kwargs = Value("The keyword arguments, an object; null for users who may not view jobs.")
    job = Value("Members of a job for another language's worker: retry, …; null for users who may not view jobs.")
    missed = Text("Policy for ticks that no node handled within a minute: skip, once or all.")
    window = Number('Seconds back that "once" and "all" search.', "window_s")
    overlap = Text("Policy while an earlier job of the entry waits or runs: allow or skip.")
    next_times = Times("The next five ticks; for a paused entry, the ticks it would have.")
    runs = Document("The latest runs, the newest first; at most 50.", row=CronRunRow, many=True)


class LockRow(Row):
    """A lock key, held by a running job."""

    token = Number("Fencing token; a later lock of the same key has a higher one.", "pk")
    key = Text("Lock key; of all jobs with it, one runs at a time.")
    jid = Text("The job that has it.")
    attempt = Number("Number of claims of the job that has it.", "claims")
    worker = Text("The worker that runs the job.", "wid", null=True)
    acquired_at = Time("When the job acquired it.")
    expires_at = Time("When it expires unless it is extended.")


# A limit without a limiter is not in use: no job with its key has run.
class LimitRow(Row):
    """A limit on how many jobs run at once or start per period."""

    id = Number("Its number.", "pk")
    scope = Text("queue, task or key.")
    name = Text("Name of the queue, task or key.")
    concurrency = Number("Jobs that may run at once.", null=True)
    rate = Text(
        "Jobs that may start per period, such as 100/s.",
        lambda limit: None if limit.rate is None else rate_text(limit.rate, limit.per),
        null=True,
    )
    burst = Number("Jobs that may start at once after an idle period.", null=True)
    is_paused = Flag("Whether no job may start.", _is_paused)
    paused_at, paused_by, pause_reason = _PAUSE
    origin = Text("Where it is defined: code, edited (code, overridden here) or admin.")
    in_use = Number("Jobs that run under it.")
    opens_at = Time("When the next job that waits for the rate may start.", null=True)


class LimitDetail(LimitRow):
    """A limit with the number of jobs waiting for it."""

    waiting = Number("Jobs that wait for it, counted up to 10,000.")
