"""Read the data of the overview page: at most a dozen statements, none of which counts a large set completely.

Counts come from the snapshot that all pages, INFO and metrics of this process share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from heapq import nlargest, nsmallest
from typing import NamedTuple

from django.contrib.admin.utils import quote
from django.db.models import Sum
from django.urls import reverse
from django.utils import timezone
from django.utils.formats import date_format

from ... import conf
from ...core.lifecycle import State
from ...models import Counter, Job, JobQuerySet, OutboxEntry, Queue, WorkerProcess
from ...models.cron import CronEntry
from ...store import queues, workers
from ...store.statistics import bounded_counts, histograms
from ...store.statistics import counts as statistics
from ..base import capped, jobs_link
from ..jobs.error_groups import ErrorGroup, found
from .charts import Chart, Point, chart

# Each statement of the page reads a bounded number of rows, however large the tables are.
COUNTED = 5000
QUEUES_LOOKED_AT, QUEUES_SHOWN = 100, 20
ROWS = 10
GROUPS_LOOKED_AT = 500
MINUTES, STRETCH = 180, 3
DAYS = 30
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


class QueueLines(NamedTuple):
    """The fullest queues and the paused queues."""

    shown: list[QueueLine]
    total: int
    paused: list[QueueLine]
    paused_count: int


class WorkerLine(NamedTuple):
    """A worker process with its number of jobs."""

    worker: WorkerProcess
    jobs: int
    memory: str
    seen: str
    is_stale: bool


class Alarm(NamedTuple):
    """A condition that needs attention."""

    text: str
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewData:
    """Data of the overview page."""

    at: datetime
    tiles: list[Tile]
    charts: list[Chart]
    queues: list[QueueLine]
    hidden_queues: int
    running: list[tuple[Job, str]] | None
    workers: list[WorkerLine] | None
    alarms: list[Alarm]
    groups: list[ErrorGroup] | None
    """These three are None if the user may see numbers only."""


def duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    left = round(seconds)
    counts: list[tuple[int, str]] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or counts:
            counts.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in counts[:2] if count) or "0 s"


def read(sees: Callable[[str], bool] = lambda _: True, *, using: str) -> OverviewData:
    """Read the numbers of the page, and its parts `running`, `workers` and `errors` if `sees` admits them."""
    now = timezone.now()
    counts = statistics.shared_glance(using=using, worker_timeout_s=conf.get("WORKER_TIMEOUT"))
    # Only a complete snapshot shows which queues are the fullest.
    queues_ = _all_queues(counts) if counts.is_complete else _first_queues(using)
    return OverviewData(
        at=now,
        tiles=[_tile(counts, state) for state in _TILES],
        charts=[minutes(now, using=using), _days(now, using)],
        queues=sorted(queues_.shown, key=lambda line: line.name),
        hidden_queues=queues_.total - len(queues_.shown),
        # Not even queried unless the user may see them.
        running=[(job, ago(job.started_at or now)) for job in running(using=using)] if sees("running") else None,
        workers=_workers(using) if sees("workers") else None,
        alarms=[*_paused(queues_), *_alarms(_number(counts, State.BLOCKED), using)],
        groups=found(Job.objects.using(using).dead(), limit=GROUPS_LOOKED_AT).groups[:5] if sees("errors") else None,
    )


def _tile(counts: statistics.AllCounts, state: State) -> Tile:
    number = _number(counts, state)
    return Tile(str(state), number, jobs_link(state=str(state)), state is State.DEAD and number != "0")


def _number(counts: statistics.AllCounts, state: State) -> str:
    """Format the number of jobs in this state, with a plus sign if the count is partial."""
    return f"{counts.of(state):,}{'+' if counts.is_partial(state) else ''}"


def _all_queues(counts: statistics.AllCounts) -> QueueLines:
    def line(name: str) -> QueueLine:
        size, latency_s = counts.queues[name], counts.latencies.get(name, 0.0)
        return _line(name, size, f"{size:,}", latency_s, is_paused=name in counts.paused)

    # Equal sizes remain in the order of names.
    fullest = nlargest(QUEUES_SHOWN, counts.queues, key=counts.queues.__getitem__)
    paused = [line(name) for name in sorted(counts.paused)[:ROWS]]
    return QueueLines([line(name) for name in fullest], len(counts.queues), paused, len(counts.paused))


def _first_queues(using: str) -> QueueLines:
    """Return the first queues by name, for databases too large to count every queue for a page."""
    rows = list(Queue.objects.using(using).order_by("name")[: QUEUES_LOOKED_AT + 1])
    lines = queue_lines(rows[:QUEUES_LOOKED_AT], using=using)
    fullest = nsmallest(QUEUES_SHOWN, lines, key=lambda line: (-line.size, line.name))
    paused = [line for line in lines if line.is_paused]
    return QueueLines(fullest, len(rows), paused[:ROWS], len(paused))


def _line(name: str, size: int, depth: str, latency_s: float, *, is_paused: bool) -> QueueLine:
    return QueueLine(
        name=name,
        size=size,
        depth=depth,
        # An empty queue has no oldest job.
        latency=duration(latency_s) if size else "–",
        is_paused=is_paused,
        # Names may contain `_`, with which the URLs of the admin begin an escape.
        link=reverse("admin:django_faktory_queue_change", args=[quote(name)]),
    )


def queue_lines(rows: Sequence[Queue], *, using: str) -> list[QueueLine]:
    """Return these queues with size and latency."""
    seen = waiting([queue.name for queue in rows], using=using)
    return [
        _line(queue.name, size, _of_queue(size), latency_s, is_paused=queue.paused_at is not None)
        for queue, (size, latency_s) in ((queue, seen[queue.name]) for queue in rows)
    ]


def _of_queue(size: int) -> str:
    return f"{size:,}+" if size >= queues.COUNTED else f"{size:,}"


def waiting(names: Sequence[str], *, using: str) -> dict[str, queues.Waiting]:
    """Return size and latency of each queue, read in groups of `QUEUES_LOOKED_AT`."""
    found: dict[str, queues.Waiting] = {}
    for start in range(0, len(names), QUEUES_LOOKED_AT):
        some = names[start : start + QUEUES_LOOKED_AT]
        found |= queues.waiting(some, using=using, max_count=queues.COUNTED)
    return found


def running(*, using: str) -> JobQuerySet:
    """Return the running jobs, the longest running first, at most `ROWS`."""
    # Without the long texts, which no list shows.
    columns = ("jid", "jobtype", "queue", "wid", "started_at", "about")
    return Job.objects.using(using).working().order_by("started_at").only(*columns)[:ROWS]


def _paused(queues_: QueueLines) -> Iterator[Alarm]:
    for line in queues_.paused:
        yield Alarm(f"Queue {line.name} is paused; waiting jobs: {line.depth}", line.link)
    if queues_.paused_count > len(queues_.paused):
        yield Alarm(f"More queues are paused: {queues_.paused_count - len(queues_.paused)}", _page("queue"))


def _alarms(blocked: str, using: str) -> Iterator[Alarm]:
    silent = workers.find_stale_workers(conf.get("WORKER_TIMEOUT"), using=using)
    refused = OutboxEntry.objects.using(using).exclude(error="")
    # No next time, although it is neither paused nor removed: its schedule matches no date.
    never = CronEntry.objects.using(using).filter(next_at=None, paused_at=None, removed_at=None)
    # One statement for three counts.
    counts = bounded_counts.counts([silent, refused, never], max_count=COUNTED + 1, using=using)
    stale, outbox, cron = (capped(count, COUNTED) if count else "" for count in counts)
    if stale:
        limit = duration(conf.get("WORKER_TIMEOUT"))
        yield Alarm(f"Workers not heard of for {limit}: {stale}", _page("workerprocess"))
    if blocked != "0":
        yield Alarm(f"Jobs that wait for a lock or a limit: {blocked}", jobs_link(state="blocked"))
    if outbox:
        yield Alarm(
            f"Jobs refused on their way elsewhere: {outbox}",
            f"{_page('outboxentry')}?error__isempty=0",
        )
    if cron:
        yield Alarm(f"Cron entries that will never be due: {cron}", f"{_page('cronentry')}?state=never+due")


def _page(model: str) -> str:
    return reverse(f"admin:django_faktory_{model}_changelist")


def _workers(using: str) -> list[WorkerLine]:
    timeout_s = conf.get("WORKER_TIMEOUT")
    rows = list(WorkerProcess.objects.using(using).filter(workers.living(timeout_s)).order_by("started_at")[:ROWS])
    held = workers.count_jobs_of([row.wid for row in rows], using=using)
    return [WorkerLine(row, held.get(row.wid, 0), memory(row), ago(row.seen_at), is_stale(row)) for row in rows]


def memory(worker: WorkerProcess) -> str:
    """Format the memory that the worker reports."""
    return f"{worker.rss_kb // 1024:,} MB" if worker.rss_kb else "–"


def ago(moment: datetime) -> str:
    """Format the time since `moment`."""
    # The clock of the database may be ahead of this one.
    return duration(max(0.0, (_aware(timezone.now()) - _aware(moment)).total_seconds()))


def is_stale(worker: WorkerProcess) -> bool:
    """Return whether the worker has sent a heartbeat, but none within WORKER_TIMEOUT.

    A worker that never sent a heartbeat is not stale.
    """
    limit = timezone.now() - timedelta(seconds=conf.get("WORKER_TIMEOUT"))
    return worker.beat_at is not None and _aware(worker.beat_at) < _aware(limit)


def _aware(moment: datetime) -> datetime:
    # Moments are naive if the project sets USE_TZ to False.
    return timezone.make_aware(moment) if timezone.is_naive(moment) else moment


def minutes(now: datetime, *, using: str, queue: str | None = None) -> Chart:
    """Return the chart of the last three hours, in intervals of `STRETCH` minutes.

    It covers one queue, or all queues without `queue`.
    """
    end = _aware(now).replace(second=0, microsecond=0)
    begin = end - timedelta(minutes=MINUTES - 1)
    sums = [[0, 0] for _ in range(MINUTES // STRETCH)]
    for minute, (well, badly) in histograms.pace(using=using, since=begin - timedelta(seconds=1), queue=queue).items():
        place = int((_aware(minute) - begin).total_seconds()) // (60 * STRETCH)
        # A minute outside of the chart, for example from a clock ahead of this one, is left out.
        if 0 <= place < len(sums):
            sums[place][0] += well
            sums[place][1] += badly
    times = (timezone.localtime(begin + timedelta(minutes=STRETCH * place)) for place in range(len(sums)))
    points = [Point(date_format(time, "H:i"), *pair) for time, pair in zip(times, sums, strict=True)]
    return chart("Last 3 hours", points)


def _days(now: datetime, using: str) -> Chart:
    today = _aware(now).astimezone(UTC).date()  # the database counts by days in UTC
    days = [today - timedelta(days=DAYS - 1 - place) for place in range(DAYS)]
    rows = Counter.objects.using(using).filter(day__gte=days[0]).order_by().values("day")
    sums = {
        day: (processed - failed, failed)
        for day, processed, failed in rows.annotate(p=Sum("processed"), f=Sum("failed")).values_list("day", "p", "f")
    }
    return chart("Last 30 days", [Point(date_format(day, "j M"), *sums.get(day, (0, 0))) for day in days])
