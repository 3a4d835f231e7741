"""Read how long jobs waited and ran, by task or queue and over time, for pages and reports.

Quantiles are estimated from histograms (`core.histograms.BOUNDS_S`), which have no data of single jobs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..core.histograms import Series, estimate_quantile
from ..models import WorkerProcess
from ..store.shared_reads import shared
from ..store.statistics import histograms

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise

TASK, QUEUE = "jobtype", "queue"
"""Columns by which timings are summed."""

QUANTILES = (0.5, 0.95, 0.99)
MAX_ROWS = 500
"""Tasks or queues of one table, those with the most starts."""

STARTS_READ = 200
"""Maximum number of workers with a mark at their start, the latest ones."""
SAME_DEPLOY_S = 300
"""Workers that start within this time of each other count as one deployment."""


class Period(NamedTuple):
    """A time until now, and the intervals of its charts."""

    name: str
    label: _StrPromise
    length: timedelta
    interval: timedelta

    def starts(self, now: datetime) -> list[datetime]:
        """Return the beginnings of its intervals; the last one contains `now`."""
        minute = timezone.localtime(now).replace(second=0, microsecond=0)
        if self.interval >= timedelta(days=1):
            last = minute.replace(hour=0, minute=0)
        elif self.interval >= timedelta(hours=1):
            last = minute.replace(minute=0)
        else:
            last = minute - timedelta(minutes=minute.minute % (self.interval // timedelta(minutes=1)))
        intervals_ago = range(self.length // self.interval - 1, -1, -1)
        if self.interval >= timedelta(days=1):
            return [last - self.interval * count for count in intervals_ago]
        # In UTC: an hour of local time may be missing or come twice.
        return [timezone.localtime(last.astimezone(UTC) - self.interval * count) for count in intervals_ago]


PERIODS = {
    period.name: period
    for period in (
        Period("1h", _("1 hour"), timedelta(hours=1), timedelta(minutes=2)),
        Period("24h", _("24 hours"), timedelta(hours=24), timedelta(hours=1)),
        Period("30d", _("30 days"), timedelta(days=30), timedelta(days=1)),
    )
}


class Timing(NamedTuple):
    """Jobs of a task or queue in a period: numbers, and quantiles of waiting and running time in seconds."""

    name: str
    started: int
    ended: int
    failed: int
    per_minute: float
    """Number of runs that ended, per minute."""
    waits: tuple[float | None, ...]
    """In the order of `QUANTILES`; None without jobs."""
    runs: tuple[float | None, ...]

    @property
    def failed_percent(self) -> float | None:
        """Share of the runs that failed; None without runs."""
        return 100 * self.failed / self.ended if self.ended else None


def read_table(by: str, period: Period, *, using: str) -> list[Timing]:
    """Return the timings of each task or queue with jobs in the period, those with the most starts first."""
    # Sums older than four hours are kept by the hour, so an hour that began before the period is left out.
    since = timezone.now() - period.length
    # By both columns: the tables of tasks and queues need one read of the month, not two.
    read = partial(histograms.read_pairs, using=using, since=since)
    series_by_name: dict[str, Series] = {}
    for (queue, jobtype), series in shared((read_table, period.name), read, using=using).items():
        series_by_name.setdefault(queue if by == QUEUE else jobtype, Series()).add(series)
    return _list_largest(series_by_name, period)


def read_history(name: str, by: str, period: Period, *, using: str) -> dict[datetime, Series]:
    """Return the sums of one task or queue in the period, by minute or older hour."""
    since = timezone.now() - period.length
    return histograms.read_times(using=using, since=since, **{by: name})


def build_total(name: str, history: Mapping[datetime, Series], period: Period) -> Timing:
    """Return the figures of a history, as far as it is in the period."""
    since = timezone.now() - period.length
    total = Series()
    for minute, series in history.items():
        if minute > since:
            total.add(series)
    return build_timing(name, total, period)


def read_tasks_of_queue(queue: str, period: Period, *, using: str) -> list[Timing]:
    """Return the timings of each task with jobs in this queue, those with the most starts first."""
    series_by_task = histograms.read_tasks(queue, using=using, since=timezone.now() - period.length)
    return _list_largest(series_by_task, period)


def _list_largest(series_by_name: dict[str, Series], period: Period) -> list[Timing]:
    largest = sorted(series_by_name, key=lambda name: (-series_by_name[name].started, name))[:MAX_ROWS]
    return [build_timing(name, series_by_name[name], period) for name in largest]


def build_timing(name: str, series: Series, period: Period) -> Timing:
    """Return the figures of a series that covers the period."""
    ended = series.succeeded + series.failed
    return Timing(
        name=name,
        started=series.started,
        ended=ended,
        failed=series.failed,
        per_minute=ended / (period.length / timedelta(minutes=1)),
        waits=estimate_quantiles(series.waits),
        runs=estimate_quantiles(series.runs),
    )


def estimate_quantiles(counts: Sequence[int]) -> tuple[float | None, ...]:
    """Return the quantiles of a histogram in seconds, each None without jobs."""
    return tuple(estimate_quantile(counts, quantile) for quantile in QUANTILES)


def split_intervals(history: Mapping[datetime, Series], period: Period) -> list[tuple[datetime, Series]]:
    """Return the sums of a history in each interval of the period."""
    starts = period.starts(timezone.now())
    sums = [Series() for _ in starts]
    for minute, series in history.items():
        index = bisect_right(starts, minute) - 1
        if index >= 0:
            sums[index].add(series)
    return list(zip(starts, sums, strict=True))


def read_deployments(since: datetime, *, using: str) -> list[tuple[datetime, int]]:
    """Return when groups of the known workers started, and how many each, oldest first.

    Rows of stopped workers are deleted after a while, so older deployments are missing.
    """
    rows = WorkerProcess.objects.using(using).filter(started_at__gte=since).order_by("-started_at")
    groups: list[tuple[datetime, int]] = []
    latest: datetime | None = None
    for started_at in reversed(rows.values_list("started_at", flat=True)[:STARTS_READ]):
        if latest is not None and (started_at - latest).total_seconds() <= SAME_DEPLOY_S:
            started, count = groups[-1]
            groups[-1] = (started, count + 1)
        else:
            groups.append((started_at, 1))
        latest = started_at
    return groups
