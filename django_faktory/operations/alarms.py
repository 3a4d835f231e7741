"""Alarms: conditions in which jobs do not run as they should. One definition for admin, API, command line and metrics.

`read` returns the present ones. Each check reads a bounded number of rows, and reports at most `MAX_PER_KIND` alarms.
Texts name queues, tasks, workers, batches and cron entries, but no contents of jobs (ADR 0034); see `hide_names`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections
from django.db.models import BigIntegerField, Exists, OuterRef, Q, Subquery
from django.utils import timezone
from django.utils.translation import get_language, gettext
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..core.lifecycle import State
from ..core.limits import Scope
from ..errors import UnknownJobType
from ..models import Batch, Job, Limit, Limiter, OutboxEntry, Queue, WorkerProcess
from ..models.cron import CronEntry
from ..store import alarm_records, queues, workers
from ..store.shared_reads import shared
from ..store.statistics import bounded_counts, counts, histograms
from . import queue_sizes
from .queue_sizes import format_number

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise

MAX_PER_KIND = 20
"""Alarms of one kind that are reported."""

UNSERVED_S = 120.0
"""A queue is unserved if its first job has waited this many seconds while no job of the queue started or ran."""

WINDOW_S = 600
"""Seconds in which the runs of a task are compared."""
STREAK_S = 86_400.0
"""Seconds before now in which the beginning of a streak of failures is looked for."""
MIN_FAILURES = 5
MAX_FAILED_SHARE = 0.5
"""A task fails if at least `MIN_FAILURES` of its runs in the window failed, and more than this share of all."""

OVERDUE_S = 60.0
"""A due job or cron entry raises an alarm after this many seconds. Maintenance looks for them once a second."""

SLOW_S = 0.1
"""A database is slow if the faster of two round trips takes this many seconds."""

QUEUES_READ = 100
DUE_READ = 1000
_DUE_COLUMNS = ("state", "run_at", "errtype", "jobtype", "created_at")
RECENT_BATCHES = 20_000
COUNTED = 1000
"""Bounds of the rows that one check reads."""


class AlarmKind(NamedTuple):
    """What is fixed about the alarms of one kind."""

    text: _StrPromise
    """What is wrong, in one line without a full stop."""
    advice: _StrPromise
    """Consequence and remedy, in one or two sentences."""
    is_critical: bool = False
    """Whether jobs do not run at all, or fail; otherwise they are late, or may soon be."""
    resource: str = ""
    """The resource that the user must be allowed to view if the text names a row; "": all users see the text."""
    nameless_text: _StrPromise | str = ""
    """The text for other users."""


KINDS = {
    "no-workers": AlarmKind(
        _("No running worker; jobs waiting: %(number)s"),
        _("Queued jobs wait until a worker runs. Start manage.py runfaktory, or read its log if it should run."),
        is_critical=True,
    ),
    "unserved-queue": AlarmKind(
        _("No worker takes jobs of queue %(queue)s; waiting: %(number)s"),
        _(
            "Workers run, but none has started a job of this queue. Add it to the queues of a worker "
            "(runfaktory --queues), or stop the workers that are busy with other queues."
        ),
        is_critical=True,
    ),
    "failing-task": AlarmKind(
        _("Task %(task)s fails: %(failed)s of %(runs)s runs in the last %(minutes)s minutes"),
        _(
            "Failed jobs are retried until their attempts are used up. Read the traceback; pause the task while "
            "you repair it, so that its jobs wait without using attempts."
        ),
        is_critical=True,
        resource="job",
        nameless_text=_("A task fails"),
    ),
    "unknown-task": AlarmKind(
        _("No worker knows task %(task)s; jobs waiting: %(number)s"),
        _("Deploy the code that defines the task, or correct its name. After UNKNOWN_JOBTYPE_GRACE its jobs fail."),
        is_critical=True,
        resource="job",
        nameless_text=_("No worker knows a task"),
    ),
    "overdue-jobs": AlarmKind(
        _("Jobs are due, but no node enqueues them; waiting: %(number)s"),
        _("Scheduled jobs and retries wait for maintenance, which every runfaktory does. Start one, or read its log."),
        is_critical=True,
    ),
    "cron-never-runs": AlarmKind(
        _("Cron entries that never run: %(names)s"),
        _("Their schedules match no date, or cannot be read. Open the entry to see why."),
        resource="cronentry",
        nameless_text=_("A cron entry never runs"),
    ),
    "cron-overdue": AlarmKind(
        _("Cron entries are due, but no node enqueues their jobs"),
        _("Every runfaktory does this. Start one, or read its log."),
        is_critical=True,
    ),
    "outbox-refused": AlarmKind(
        _("Refused jobs in the outbox: %(number)s"),
        _("They stay in the outbox. Read the error, correct the cause, and send them again or delete them."),
        is_critical=True,
    ),
    "silent-worker": AlarmKind(
        _("Worker %(worker)s sends no heartbeat"),
        _("After %(seconds)s s without a heartbeat it counts as lost, and its jobs run again elsewhere."),
        resource="workerprocess",
        nameless_text=_("A worker sends no heartbeat"),
    ),
    alarm_records.LOST_WORKER: AlarmKind(
        _("Worker %(worker)s was lost"),
        _(
            "It was killed, or its machine or network failed. Its jobs run again on other workers. The loss is "
            "shown for an hour, with the jobs that it ran."
        ),
        resource="workerprocess",
        nameless_text=_("A worker was lost"),
    ),
    "paused-queue": AlarmKind(
        _("Queue %(queue)s is paused; waiting: %(number)s"),
        _("No worker gets its jobs until the queue is resumed."),
    ),
    "paused-task": AlarmKind(
        _("Task %(task)s is paused; waiting: %(number)s"),
        _("No worker gets its jobs until the task is resumed."),
        resource="limit",
        nameless_text=_("A task with waiting jobs is paused"),
    ),
    "late-queue": AlarmKind(
        _("Jobs of queue %(queue)s start late; waiting: %(number)s"),
        _(
            "Its first job has waited for more than %(seconds)s s (ALARM_LATENCY). Add workers, or find the "
            "jobs that keep them busy."
        ),
    ),
    "stuck-batch": AlarmKind(
        _("Batches that cannot finish: %(number)s"),
        _(
            "All jobs that are left, or a callback, are dead. Retry them, or discard them to end the batch without "
            "success."
        ),
        resource="batch",
        nameless_text=_("A batch cannot finish"),
    ),
    alarm_records.FAILED_EXPORT: AlarmKind(
        _("The export of ended jobs fails"),
        _(
            "EXPORT_HISTORY raises an error, which the log has. The jobs stay until they are exported, but not longer "
            "than 7 days."
        ),
    ),
    "slow-database": AlarmKind(
        _("The database needs %(milliseconds)s ms for an empty statement"),
        _("Each job needs several statements, so all jobs are slow. Look at the load of the database and the network."),
    ),
}
"""The kinds of alarms, by names that programs can compare. `_LINKS` of `admin.overview.data` has the page of each."""


class Alarm(NamedTuple):
    """A condition that needs attention."""

    kind: str
    """One of `KINDS`."""
    subject: str
    """The queue, task, worker, batch or cron entry; "" if the alarm is about the whole installation."""
    text: str
    advice: str
    """See `AlarmKind`; in the active language."""
    since: datetime | None
    """Time at which the condition began, as far as it is known."""
    affected: int
    """Number of jobs, runs or rows that are affected."""
    note: str = ""
    """Of a pause: who paused it, and why. Shown to users who may view the row."""

    @property
    def explanation(self) -> str:
        """The note, if there is one, and the advice."""
        return f"{gettext('Paused %(note)s.') % {'note': self.note}} {self.advice}" if self.note else self.advice

    @property
    def is_critical(self) -> bool:
        return KINDS[self.kind].is_critical


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Data that several checks need, read once."""

    using: str
    now: datetime
    counts: counts.AllCounts
    waiting: dict[str, queues.Waiting]
    """Queues with enqueued jobs that are not paused: how many wait, and for how long the first one."""
    runs: list[histograms.RecentRuns]
    slow_s: float

    @property
    def has_workers(self) -> bool:
        """Return whether a worker process fetches jobs."""
        return self.counts.workers[WorkerProcess.Phase.RUNNING] > 0

    @cached_property
    def due(self) -> list[Any]:
        """The first scheduled and retrying jobs that are due, or due within a minute."""
        # A job that its worker did not know is due again within 30 s, so it is among them.
        soon = self.now + timedelta(seconds=60)
        rows = Job.objects.using(self.using).in_state(State.SCHEDULED, State.RETRIES).filter(run_at__lte=soon)
        return list(rows.order_by("run_at").values_list(*_DUE_COLUMNS, named=True)[:DUE_READ])

    @cached_property
    def unserved(self) -> list[str]:
        """Queues whose first job waits while workers run, but none has started or runs a job of the queue."""
        if not self.has_workers:
            return []  # `no-workers` reports this
        # The minute of a start is rounded down, so its jobs may be up to 60 s younger.
        limit = _ago(self, UNSERVED_S + 60)
        served = {run.queue for run in self.runs if run.started_at is not None and run.started_at > limit}
        names = {name for name, found in self.waiting.items() if found.ready_latency_s >= UNSERVED_S} - served
        if not names:
            return []
        # The jobs of the workers are few, those of the queues may be many.
        rows = Job.objects.using(self.using).working().order_by().values_list("queue", flat=True)
        running = set(rows.distinct())
        # No job started at all, and some run: the workers are busy, and the queue is late.
        return [] if running and not served else sorted(names - running)


Check = Callable[[Reading], Iterator[Alarm]]


def read(*, using: str) -> list[Alarm]:
    """Return the present alarms, critical ones first. They may be a second old; see `store.shared_reads`."""
    # Their texts are in the language of the caller, so the result is shared with callers of the same language only.
    return shared((read_now, get_language()), partial(read_now, using=using), using=using)


def read_now(*, using: str, slow_s: float = SLOW_S) -> list[Alarm]:
    """Return the present alarms, critical ones first. From `slow_s` for a round trip, the database is slow."""
    all_counts = counts.read(using=using, worker_timeout_s=conf.get("WORKER_TIMEOUT"))
    now = timezone.now()
    reading = Reading(
        using=using,
        now=now,
        counts=all_counts,
        waiting=_read_waiting(all_counts, using),
        runs=histograms.read_recent_runs(using=using, since=now - timedelta(seconds=WINDOW_S)),
        slow_s=slow_s,
    )
    alarms = [alarm for check in CHECKS for alarm in check(reading)]
    return sorted(alarms, key=lambda alarm: not alarm.is_critical)


def hide_names(alarms: Sequence[Alarm], may_see: Callable[[str], bool]) -> list[Alarm]:
    """Return the alarms, without the names of workers, tasks, batches and cron entries that the user may not see.

    `may_see` returns whether the user has the view permission of a resource (ADR 0034).
    """

    def hide(alarm: Alarm) -> Alarm:
        kind = KINDS[alarm.kind]
        if kind.resource and not may_see(kind.resource):
            return alarm._replace(subject="", note="", text=str(kind.nameless_text))
        return alarm if may_see("queue") or alarm.kind != "paused-queue" else alarm._replace(note="")

    return list(map(hide, alarms))


def _read_waiting(all_counts: counts.AllCounts, using: str) -> dict[str, queues.Waiting]:
    unpaused = [name for name, number in all_counts.queues.items() if number and name not in all_counts.paused]
    waiting = queue_sizes.read(unpaused, using=using, all_counts=all_counts)
    # Jobs behind a limit or a lock wait as they should.
    return {name: found for name, found in waiting.items() if found.ready}


def _alarm(kind: str, subject: str, since: datetime | None, affected: int, *, text: str = "", **names: Any) -> Alarm:
    """Return an alarm with these names and numbers in its texts; `text` replaces that of the kind."""
    names = {"number": affected, **names}
    values = {name: format_number(value) if isinstance(value, int) else value for name, value in names.items()}
    definition = KINDS[kind]
    return Alarm(kind, subject, (text or definition.text) % values, definition.advice % values, since, affected)


def _ago(reading: Reading, seconds: float) -> datetime:
    return reading.now - timedelta(seconds=seconds)


# --- workers


def _find_no_workers(reading: Reading) -> Iterator[Alarm]:
    if reading.has_workers or not reading.waiting:
        return
    count = sum(found.size for found in reading.waiting.values())
    stopping = sum(reading.counts.workers.values())
    text = ""
    if stopping:
        text = gettext("No running worker; jobs waiting: %(number)s; workers that are stopping: %(stopping)s")
    waited_s = max(found.ready_latency_s for found in reading.waiting.values())
    yield _alarm("no-workers", "", _ago(reading, waited_s), count, text=text, stopping=stopping)


def _find_silent_workers(reading: Reading) -> Iterator[Alarm]:
    timeout_s = conf.get("WORKER_TIMEOUT")
    silent = workers.find_stale_workers(timeout_s / 2, using=reading.using).order_by("beat_at")
    for worker in silent[:MAX_PER_KIND]:
        name = f"{worker.hostname}:{worker.pid}"
        yield _alarm("silent-worker", worker.wid, worker.beat_at, 1, worker=name, seconds=f"{timeout_s:g}")


def _find_lost_workers(reading: Reading) -> Iterator[Alarm]:
    lost = alarm_records.read_lost(using=reading.using, since=_ago(reading, alarm_records.LOST_SHOWN_S))
    for record in lost[:MAX_PER_KIND]:
        name, affected = record.subject, record.affected
        yield _alarm(alarm_records.LOST_WORKER, name, record.began_at, affected, worker=record.text)


# --- queues


def _find_unserved_queues(reading: Reading) -> Iterator[Alarm]:
    for name in reading.unserved[:MAX_PER_KIND]:
        found = reading.waiting[name]
        since, number = _ago(reading, found.ready_latency_s), queue_sizes.describe(found)
        yield _alarm("unserved-queue", name, since, found.size, queue=name, number=number)


def _find_late_queues(reading: Reading) -> Iterator[Alarm]:
    limit_s = conf.get("ALARM_LATENCY")
    late = [
        (name, found)
        for name, found in reading.waiting.items()
        if reading.has_workers and limit_s and found.ready_latency_s >= limit_s and name not in reading.unserved
    ]
    for name, found in sorted(late, key=lambda item: -item[1].ready_latency_s)[:MAX_PER_KIND]:
        since, number = _ago(reading, found.ready_latency_s - limit_s), queue_sizes.describe(found)
        seconds = f"{limit_s:g}"
        yield _alarm("late-queue", name, since, found.size, queue=name, number=number, seconds=seconds)


def _find_paused_queues(reading: Reading) -> Iterator[Alarm]:
    if not reading.counts.paused:
        return
    rows = Queue.objects.using(reading.using).filter(paused_at__isnull=False).order_by("paused_at")
    paused = {row.name: row for row in rows[:QUEUES_READ]}
    sizes = queue_sizes.read(list(paused), using=reading.using, all_counts=reading.counts)
    stuck = [name for name in paused if sizes[name].size]
    for name in stuck[:MAX_PER_KIND]:
        row, size = paused[name], sizes[name].size
        number = queue_sizes.describe(sizes[name])
        alarm = _alarm("paused-queue", name, row.paused_at, size, queue=name, number=number)
        yield alarm._replace(note=row.pause_note)


# --- tasks and limits


def _find_failing_tasks(reading: Reading) -> Iterator[Alarm]:
    runs_by_task: dict[str, list[histograms.RecentRuns]] = defaultdict(list)
    for run in reading.runs:
        runs_by_task[run.jobtype].append(run)
    failing: list[tuple[int, int, str]] = []
    for jobtype, runs in runs_by_task.items():
        failed, ended = sum(run.failed for run in runs), sum(run.failed + run.succeeded for run in runs)
        if failed >= MIN_FAILURES and failed > MAX_FAILED_SHARE * ended:
            failing.append((failed, ended, jobtype))
    failing = sorted(failing, key=lambda item: -item[0])[:MAX_PER_KIND]
    since: dict[str, datetime] = {}
    if failing:
        since = histograms.read_failing_since(
            [jobtype for *_, jobtype in failing],
            using=reading.using,
            since=_ago(reading, STREAK_S),
            max_share=MAX_FAILED_SHARE,
        )
    for failed, ended, jobtype in failing:
        names: dict[str, Any] = {"task": jobtype, "failed": failed, "runs": ended, "minutes": WINDOW_S // 60}
        yield _alarm("failing-task", jobtype, since.get(jobtype), failed, **names)


def _find_unknown_tasks(reading: Reading) -> Iterator[Alarm]:
    created_by_task: dict[str, list[datetime]] = defaultdict(list)
    for job in reading.due:
        if job.state == State.SCHEDULED and job.errtype == UnknownJobType.__name__:
            created_by_task[job.jobtype].append(job.created_at)
    for jobtype, created in sorted(created_by_task.items())[:MAX_PER_KIND]:
        yield _alarm("unknown-task", jobtype, min(created), len(created), task=jobtype)


def _find_paused_tasks(reading: Reading) -> Iterator[Alarm]:
    rows = Limit.objects.using(reading.using).filter(scope=Scope.TASK, paused_at__isnull=False).order_by("paused_at")
    limits = list(rows[:MAX_PER_KIND])
    if not limits:
        return
    pks = dict(Limiter.objects.using(reading.using).filter(limit__in=limits).values_list("limit_id", "pk"))
    jobs = Job.objects.using(reading.using).blocked()
    blocked = [jobs.filter(limiter=pks.get(limit.pk, 0)) for limit in limits]
    numbers = bounded_counts.counts(blocked, max_count=COUNTED, using=reading.using)
    for limit, number in zip(limits, numbers, strict=True):
        if number:
            alarm = _alarm("paused-task", limit.name, limit.paused_at, number, task=limit.name)
            yield alarm._replace(note=limit.pause_note)


# --- batches, cron, outbox


def _find_stuck_batches(reading: Reading) -> Iterator[Alarm]:
    batches = Batch.objects.using(reading.using)
    # The newest batches only: no index has the failed ones.
    newest = Subquery(batches.order_by("-pk").values("pk")[:1], output_field=BigIntegerField())
    members = Job.objects.using(reading.using).filter(bid=OuterRef("bid"))
    dead = members.dead()
    alive = members.in_state(State.SCHEDULED, State.ENQUEUED, State.BLOCKED, State.WORKING, State.RETRIES)
    stuck = (
        batches.filter(pk__gt=newest - RECENT_BATCHES, finished_at=None, committed_at__isnull=False)
        .filter(Q(failed__gt=0) | Q(complete_failed=True) | Q(success_failed=True))
        .filter(Exists(dead) | Q(complete_failed=True) | Q(success_failed=True), ~Exists(alive))
        .order_by("-pk")
    )
    rows = list(stuck.values_list("bid", "committed_at")[:COUNTED])
    if not rows:
        return
    subject = rows[0][0] if len(rows) == 1 else ""
    text = gettext("Batch %(batch)s cannot finish") if subject else ""
    since = min(committed_at for _, committed_at in rows if committed_at)
    yield _alarm("stuck-batch", subject, since, len(rows), text=text, batch=subject)


def _find_cron_problems(reading: Reading) -> Iterator[Alarm]:
    limit = _ago(reading, OVERDUE_S)
    # No next time, although it is neither paused nor removed: no node has read the row, or its schedule has no time.
    unscheduled = Q(next_at=None, paused_at=None, removed_at=None)
    wrong = CronEntry.objects.using(reading.using).filter(
        unscheduled & (~Q(problem="") | Q(created_at__lt=limit)) | Q(next_at__lt=limit)
    )
    rows = list(wrong.order_by("name").values_list("name", "problem", "next_at", "created_at")[:COUNTED])
    never = [name for name, problem, next_at, _ in rows if problem and next_at is None]
    if never:
        subject = never[0] if len(never) == 1 else ""
        names = ", ".join([*never[:3], *(["…"] if len(never) > 3 else [])])
        yield _alarm("cron-never-runs", subject, None, len(never), names=names)
    overdue = [next_at or created_at for name, problem, next_at, created_at in rows if next_at or not problem]
    if overdue:
        yield _alarm("cron-overdue", "", min(overdue), 1)


def _find_overdue_jobs(reading: Reading) -> Iterator[Alarm]:
    limit = _ago(reading, OVERDUE_S)
    overdue = [job.run_at for job in reading.due if job.run_at < limit]
    if overdue:
        yield _alarm("overdue-jobs", "", overdue[0], len(overdue))


def _find_refused_entries(reading: Reading) -> Iterator[Alarm]:
    # The database of the jobs is never an outbox, but may have rows from before a change of the settings.
    aliases = dict.fromkeys([reading.using, *(alias for alias in conf.outbox() if alias in connections)])
    total = 0
    first_times: list[datetime] = []
    for alias in aliases:
        refused = OutboxEntry.objects.using(alias).exclude(error="")
        [count] = bounded_counts.counts([refused], max_count=COUNTED, using=alias)
        if count:
            total += count
            first_times += refused.order_by("pk").values_list("created_at", flat=True)[:1]
    if total:
        yield _alarm("outbox-refused", "", min(first_times, default=None), total)


# --- the database


def _find_slow_database(reading: Reading) -> Iterator[Alarm]:
    round_trip_s = _time_round_trip(reading.using)
    if round_trip_s >= reading.slow_s:  # one slow answer is not yet a slow database
        round_trip_s = min(round_trip_s, _time_round_trip(reading.using))
    if round_trip_s >= reading.slow_s:
        yield _alarm("slow-database", "", None, 1, milliseconds=f"{round_trip_s * 1000:.0f}")


def _time_round_trip(using: str) -> float:
    with connections[using].cursor() as cursor:
        begun = time.perf_counter()
        cursor.execute("SELECT 1")
        cursor.fetchone()
        return time.perf_counter() - begun


def _find_failed_export(reading: Reading) -> Iterator[Alarm]:
    since = alarm_records.read_failed_export(using=reading.using)
    if since is not None:
        yield _alarm(alarm_records.FAILED_EXPORT, "", since, 1)


CHECKS: tuple[Check, ...] = (
    _find_no_workers,
    _find_unserved_queues,
    _find_failing_tasks,
    _find_unknown_tasks,
    _find_overdue_jobs,
    _find_cron_problems,
    _find_refused_entries,
    _find_silent_workers,
    _find_lost_workers,
    _find_paused_queues,
    _find_paused_tasks,
    _find_late_queues,
    _find_stuck_batches,
    _find_failed_export,
    _find_slow_database,
)
