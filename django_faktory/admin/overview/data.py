"""Read the data of the overview page: at most a dozen statements, none of which counts jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from heapq import nlargest
from typing import NamedTuple

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.safestring import SafeString
from django.utils.translation import get_language, gettext

from ... import conf
from ...core.lifecycle import State
from ...models import Job, WorkerProcess
from ...operations import alarms, queue_sizes, worker_names
from ...operations.alarms import Alarm
from ...operations.error_groups import ErrorGroup, group_failed
from ...store import workers
from ...store.queues import Waiting
from ...store.shared_reads import shared
from ...store.statistics import counts, histograms
from .. import links
from ..formats import format_age, format_duration, format_number, render_worker
from ..labels import PHASES, STATES
from ..links import jobs_link, page_url, row_link
from .charts import Chart, Point, build_chart

# Each statement of the page reads a bounded number of rows, however large the tables are.
QUEUES_SHOWN = 20
ROWS_SHOWN = 10
FAILED_JOBS_READ = 500
MINUTES, MINUTES_PER_BAR = 180, 3
DAYS = 30
_PARTS = ("running", "workers", "errors")
_TILES = (State.ENQUEUED, State.SCHEDULED, State.WORKING, State.RETRIES, State.BLOCKED, State.DEAD)


class Tile(NamedTuple):
    """A state with the number of jobs in it."""

    name: str
    number: str
    link: str
    is_bad: bool


class QueueLine(NamedTuple):
    """A queue's row of the overview."""

    name: str
    size: int
    depth: str
    latency: str
    is_paused: bool
    link: str


class WorkerLine(NamedTuple):
    """A worker process with its number of jobs."""

    worker: WorkerProcess
    jobs: int
    phase: str
    memory: str
    last_seen: str
    is_stale: bool


class Button(NamedTuple):
    """A form that ends an alarm, or keeps it from getting worse, and returns to the overview."""

    label: str
    url: str
    fields: tuple[tuple[str, str], ...]


class AlarmLine(NamedTuple):
    """An alarm with its age, link and buttons."""

    alarm: Alarm
    age: str
    """How long it has lasted; "" if that is unknown."""
    link: str
    buttons: tuple[Button, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewData:
    at: datetime
    tiles: list[Tile]
    charts: list[Chart]
    queues: list[QueueLine]
    hidden_queues: int
    running: list[tuple[Job, str, SafeString]] | None
    workers: list[WorkerLine] | None
    alarms: list[AlarmLine]
    groups: list[ErrorGroup] | None
    """Like `running` and `workers`, None if the user may not see it."""


def read(
    may_see: Callable[[str], bool] = lambda _: True,
    may: Callable[[str], bool] = lambda _: True,
    *,
    using: str,
    is_shared: bool = False,
) -> OverviewData:
    """Read the numbers of the page, and its parts `running`, `workers` and `errors` if `may_see` admits them.

    `may` returns whether the user has a permission, `resource.verb`. With `is_shared`, users with the same permissions
    get the same numbers for a while; see `shared_reads`.
    """
    parts = tuple(part for part in _PARTS if may_see(part))
    read_now = partial(_read_numbers, parts, using=using)
    # Texts of times depend on language and zone, links on the site.
    key = (_read_numbers, parts, get_language(), timezone.get_current_timezone_name(), links.site.get())
    numbers = shared(key, read_now, using=using) if is_shared else read_now()
    # Alarms quote no job, so the permission of the page suffices (ADR 0034).
    return replace(numbers, alarms=_read_alarm_lines(may, using=using))


def _read_numbers(parts: Sequence[str], *, using: str) -> OverviewData:
    now = timezone.now()
    all_counts = counts.read(using=using, worker_timeout_s=conf.get("WORKER_TIMEOUT"))
    # Equal sizes remain in the order of names.
    fullest = sorted(nlargest(QUEUES_SHOWN, all_counts.queues, key=all_counts.queues.__getitem__))
    # Parts that the user may not see are not even queried.
    worker_lines = _read_workers(using) if "workers" in parts else None
    return OverviewData(
        at=now,
        tiles=[_build_tile(all_counts, state) for state in _TILES],
        charts=[_build_recent_chart(now, using), _build_daily_chart(now, all_counts)],
        queues=build_queue_lines(fullest, all_counts, using=using),
        hidden_queues=len(all_counts.queues) - len(fullest),
        running=_read_running(now, worker_lines, using) if "running" in parts else None,
        workers=worker_lines,
        alarms=[],
        groups=group_failed(using=using, limit=FAILED_JOBS_READ).groups[:5] if "errors" in parts else None,
    )


def _build_tile(all_counts: counts.AllCounts, state: State) -> Tile:
    number = format_number(all_counts.of(state))
    return Tile(str(STATES[state]), number, jobs_link(state=str(state)), state is State.DEAD and number != "0")


def _build_queue_line(name: str, waiting: Waiting, *, is_paused: bool) -> QueueLine:
    return QueueLine(
        name=name,
        size=waiting.size,
        depth=queue_sizes.describe(waiting),
        # An empty queue has no oldest job.
        latency=format_duration(waiting.latency_s) if waiting.size else "–",
        is_paused=is_paused,
        link=row_link("queue", name),
    )


def build_queue_lines(names: Sequence[str], all_counts: counts.AllCounts, *, using: str) -> list[QueueLine]:
    waiting = queue_sizes.read(names, using=using, all_counts=all_counts)
    return [_build_queue_line(name, waiting[name], is_paused=name in all_counts.paused) for name in names]


def _read_running(now: datetime, shown: Sequence[WorkerLine] | None, using: str) -> list[tuple[Job, str, SafeString]]:
    """Return the jobs that have run longest, each with the time since its start and its worker."""
    # Without the long texts, which no list shows.
    columns = ("jid", "jobtype", "queue", "wid", "started_at", "about")
    jobs = list(Job.objects.working().order_by("started_at").only(*columns)[:ROWS_SHOWN])
    names = {line.worker.wid: line.worker.name for line in shown or ()}
    if shown is not None:  # users who may not see workers get no host names
        names |= worker_names.read({job.wid for job in jobs} - names.keys(), using=using)
    return [(job, format_age(job.started_at or now), render_worker(job.wid, names.get(job.wid, ""))) for job in jobs]


def _read_workers(using: str) -> list[WorkerLine]:
    living = workers.living(conf.get("WORKER_TIMEOUT"))
    rows = list(WorkerProcess.objects.filter(living).order_by("started_at")[:ROWS_SHOWN])
    job_counts = workers.count_jobs_of([row.wid for row in rows], using=using)
    return [
        WorkerLine(
            worker=row,
            jobs=job_counts.get(row.wid, 0),
            phase=str(PHASES[row.state]),
            memory=format_memory(row),
            last_seen=format_age(row.seen_at),
            is_stale=is_stale(row),
        )
        for row in rows
    ]


def format_memory(worker: WorkerProcess) -> str:
    return f"{format_number(worker.rss_kb // 1024)} MB" if worker.rss_kb else "–"


def is_stale(worker: WorkerProcess) -> bool:
    """Return whether the worker has sent a heartbeat, but none within WORKER_TIMEOUT.

    A worker that never sent a heartbeat is not stale.
    """
    oldest_allowed = timezone.now() - timedelta(seconds=conf.get("WORKER_TIMEOUT"))
    return worker.beat_at is not None and worker.beat_at < oldest_allowed


def _build_recent_chart(now: datetime, using: str) -> Chart:
    """Return the chart of the last three hours, in intervals of `MINUTES_PER_BAR` minutes."""
    last_minute = now.replace(second=0, microsecond=0)
    first_minute = last_minute - timedelta(minutes=MINUTES - 1)
    sums = [[0, 0] for _ in range(MINUTES // MINUTES_PER_BAR)]
    # One second earlier, because `pace` returns later minutes than `since` only.
    pace = histograms.pace(using=using, since=first_minute - timedelta(seconds=1))
    for minute, (succeeded, failed) in pace.items():
        index = int((minute - first_minute).total_seconds()) // (60 * MINUTES_PER_BAR)
        # A minute outside of the chart, for example from a clock ahead of this one, is left out.
        if 0 <= index < len(sums):
            sums[index][0] += succeeded
            sums[index][1] += failed
    times = (first_minute + timedelta(minutes=MINUTES_PER_BAR * index) for index in range(len(sums)))
    points = [
        Point(date_format(timezone.localtime(time), "H:i"), *pair) for time, pair in zip(times, sums, strict=True)
    ]
    return build_chart(gettext("Last 3 hours"), points)


def _build_daily_chart(now: datetime, all_counts: counts.AllCounts) -> Chart:
    today = now.astimezone(UTC).date()  # the database counts by days in UTC
    days = [today - timedelta(days=DAYS - 1 - index) for index in range(DAYS)]
    processed, failed = (
        [all_counts.numbers.get(kind, {}).get(day.isoformat(), 0) for day in days] for kind in ("processed", "failed")
    )
    points = [
        Point(date_format(day, "j M"), ended - bad, bad)
        for day, ended, bad in zip(days, processed, failed, strict=True)
    ]
    return build_chart(gettext("Last 30 days"), points)


def _read_alarm_lines(may: Callable[[str], bool], *, using: str) -> list[AlarmLine]:
    """Return the present alarms, critical ones first. `may` returns whether the user has a permission, `resource.verb`.

    Without it an alarm has no button, and names no row that the user may not view.
    """
    return [
        AlarmLine(
            alarm,
            format_age(alarm.since) if alarm.since else "",
            _LINKS[alarm.kind](alarm.subject),
            tuple(_build_buttons(alarm, may)),
        )
        for alarm in alarms.hide_names(alarms.read(using=using), lambda resource: may(f"{resource}.view"))
    ]


def _build_buttons(alarm: Alarm, may: Callable[[str], bool]) -> Iterator[Button]:
    back = ("back", page_url("overview_changelist"))
    if not alarm.subject:
        return
    if alarm.kind == "paused-queue" and may("queue.resume"):
        fields = (("action", "resume"), ("_selected_action", alarm.subject), back)
        yield Button(gettext("Resume queue"), _list_url("queue"), fields)
    elif alarm.kind == "paused-task" and may("limit.resume"):
        yield Button(
            gettext("Resume task"), page_url("task_pause"), (("task", alarm.subject), ("verb", "resume"), back)
        )
    elif alarm.kind == "failing-task" and may("limit.pause"):
        yield Button(gettext("Pause task"), page_url("task_pause"), (("task", alarm.subject), ("verb", "pause"), back))


def _list_url(model: str, **filters: str) -> str:
    return page_url(f"{model}_changelist", **filters)


def _page_url(model: str, key: str) -> str:
    return row_link(model, key) if key else _list_url(model)


def _task_page(task: str) -> str:
    return page_url("task", task=task) if task else page_url("tasks")


_LINKS: dict[str, Callable[[str], str]] = {
    "no-workers": lambda _: _list_url("workerprocess"),
    "lost-worker": lambda _: f"{_list_url('workerprocess')}#faktory-lost",
    "silent-worker": lambda wid: _page_url("workerprocess", wid),
    "unserved-queue": lambda name: _page_url("queue", name),
    "late-queue": lambda name: _page_url("queue", name),
    "paused-queue": lambda name: _page_url("queue", name),
    "paused-task": _task_page,
    "failing-task": _task_page,
    "unknown-task": lambda task: jobs_link(q=f'task:"{task}"') if task else jobs_link(),
    "overdue-jobs": lambda _: jobs_link(state="scheduled"),
    "stuck-batch": lambda bid: _list_url("batch", q=bid) if bid else _list_url("batch", stage="failing"),
    "cron-never-runs": lambda _: _list_url("cronentry", state="never runs"),
    "cron-overdue": lambda _: _list_url("cronentry"),
    "outbox-refused": lambda _: _list_url("outboxentry", error__isempty="0"),
    "failed-export": lambda _: jobs_link(state="succeeded"),
    "slow-database": lambda _: _list_url("workerprocess"),
}
"""The page that explains an alarm, from its kind and its subject."""
