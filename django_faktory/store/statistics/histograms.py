"""Histograms of waiting and running times of all processes, added up per minute and since the beginning.

Processes with new values add them every few seconds, in one statement; an idle node writes nothing. After
`MINUTES_KEPT_S` the rows of an hour's minutes become one row, at the beginning of the hour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Max, Q, QuerySet, Sum
from django.db.models.functions import Now

from ...core.histograms import BUCKETS, OTHER, Series
from ...models import Measure
from ..chunks import chunks
from ..dialects import clock_of
from ..dialects.base import marks
from ..transactions import read, run

CHUNK = 200
UNUSED_S = 14 * 86_400
"""Seconds after the last job that the all-time sums of a queue and task are kept."""

MINUTES_KEPT_S = 4 * 3600
"""Seconds that the sums of each minute are kept; older ones are kept by the hour.

The charts of the last three hours need the minutes.
"""

SUM_MEMORY = "32MB"
"""`work_mem` in which PostgreSQL sums a month by queue and task.

The planner expects every pair of both, and with the default of 4 MB sorts 280,000 rows on disk: 260 ms instead of 130.
"""

HOUR = timedelta(hours=1)

ALL_TIME = datetime(1970, 1, 1, tzinfo=UTC)
"""The "minute" of the all-time rows, which are never purged."""

_TABLE = "django_faktory_measure"
_SUMS = (
    "started", "succeeded", "failed", "waited_s", "ran_s",
    *(f"wait_{place}" for place in range(BUCKETS)),
    *(f"run_{place}" for place in range(BUCKETS)),
)  # fmt: skip
_COLUMNS = ("minute", "queue", "jobtype", *_SUMS)


def add(series: Mapping[tuple[str, str], Series], *, using: str, now: datetime | None = None) -> None:
    """Add these series to the sums of this minute and of all time, in one transaction."""
    if not series:
        return

    def verb(connection: BaseDatabaseWrapper) -> None:
        minute = clock_of(connection, now).replace(second=0, microsecond=0)
        # The same order in every process: two that add at the same time wait for each other instead of deadlocking.
        _add_to_rows(
            connection,
            [(row_minute, *names, series[names]) for row_minute in (ALL_TIME, minute) for names in sorted(series)],
        )

    run(using, verb)


def purge(*, using: str, kept_for_s: float) -> int:
    """Delete at most `CHUNK` rows of minutes older than `kept_for_s`; return how many."""
    measures = Measure.objects.using(using)
    # All-time rows have the minute `ALL_TIME` and must not match.
    outdated = measures.filter(minute__gt=ALL_TIME, minute__lt=Now() - timedelta(seconds=kept_for_s))

    def verb(_: BaseDatabaseWrapper) -> int:
        ids = list(outdated.order_by("minute").values_list("pk", flat=True)[:CHUNK])
        if ids:
            measures.filter(pk__in=ids).delete()
        return len(ids)

    return run(using, verb, atomic=False, writes=True)


def find_hour(*, using: str, start: datetime, end: datetime) -> datetime | None:
    """Return the beginning of the first hour with sums between two times, None if there is none."""
    rows = Measure.objects.using(using).filter(minute__gte=start, minute__lt=end).order_by("minute")
    minute: datetime | None = run(using, lambda _: rows.values_list("minute", flat=True).first(), atomic=False)
    return None if minute is None else minute.replace(minute=0)


def fold_hour(hour: datetime, *, using: str, limit: int = CHUNK) -> int | None:
    """Add the sums of an hour's minutes to the row of the hour, and delete them; return how many.

    None if there are no minutes; 0 if other transactions have locked all of them. `hour` is the beginning of the hour.
    Handles at most `limit` rows.
    """
    measures = Measure.objects.using(using)
    # The row of the hour is that of its first minute, which is not moved.
    minutes = measures.filter(minute__gt=hour, minute__lt=hour + HOUR).order_by("queue", "jobtype", "minute")
    if not run(using, lambda _: minutes[:1].exists(), atomic=False):
        return None

    def verb(connection: BaseDatabaseWrapper) -> int:
        sums: dict[tuple[str, str], Series] = {}
        # Locked before they are added up: an `add` between the read and the DELETE would be lost.
        rows = list(minutes.select_for_update(skip_locked=True).values_list("pk", "queue", "jobtype", *_SUMS)[:limit])
        for _, queue, jobtype, *values in rows:
            sums.setdefault((queue, jobtype), Series()).add(_build_series(values))
        measures.filter(pk__in=[pk for pk, *_ in rows]).delete()
        _add_to_rows(connection, [(hour, *names, sums[names]) for names in sorted(sums)])
        return len(rows)

    return run(using, verb)


def fold_idle_series(
    *, using: str, after: tuple[str, str] | None = None, unused_s: float = UNUSED_S
) -> tuple[str, str] | None:
    """Add all-time sums that did not change for `unused_s` to those of `OTHER`, and delete them.

    The grand total stays the same. Handles the next `CHUNK` pairs of queue and jobtype; returns the last pair, None at
    the end.
    """
    measures = Measure.objects.using(using)
    rows = measures.filter(minute=ALL_TIME).order_by("queue", "jobtype")
    if after is not None:
        queue, jobtype = after
        # A row comparison (queue, jobtype) > (…) written as terms that the index serves on each database.
        rows = rows.filter(Q(queue__gt=queue) | Q(jobtype__gt=jobtype), queue__gte=queue)
    next_pairs = rows.values_list("queue", "jobtype")[:CHUNK]
    pairs = read(next_pairs)
    if not pairs:
        return None
    stale = rows.filter(queue__lte=pairs[-1][0], used_at__lt=Now() - timedelta(seconds=unused_s))
    unused = stale.exclude(queue=OTHER, jobtype=OTHER)

    def verb(connection: BaseDatabaseWrapper) -> None:
        sums = Series()
        # Locked before they are added up: an `add` between the read and the DELETE would be lost.
        rows_to_fold = list(unused.select_for_update(skip_locked=True).values_list("pk", *_SUMS)[:CHUNK])
        for _, *values in rows_to_fold:
            sums.add(_build_series(values))
        measures.filter(pk__in=[pk for pk, *_ in rows_to_fold]).delete()
        if rows_to_fold:
            _add_to_rows(connection, [(ALL_TIME, OTHER, OTHER, sums)])

    # Usually there is nothing to fold: one read, no transaction.
    if run(using, lambda _: unused[:1].exists(), atomic=False):
        run(using, verb)
    return pairs[-1] if len(pairs) == CHUNK else None


def read_totals(*, using: str, limit: int = 1000) -> dict[tuple[str, str], Series]:
    """Return the all-time sums by queue and jobtype.

    Returns the `limit` pairs with the most started jobs; `OTHER` contains the sums of all remaining pairs.
    """
    rows = Measure.objects.using(using).filter(minute=ALL_TIME)
    # One row more than needed shows whether the sums of `OTHER` have to be computed.
    top = list(rows.order_by("-started", "queue", "jobtype").values_list("queue", "jobtype", *_SUMS)[: limit + 1])
    series_by_pair = {(queue, jobtype): _build_series(sums) for queue, jobtype, *sums in top[:limit]}
    if len(top) > limit:
        # The remaining pairs are the total minus the top ones, so that not every row has to be fetched.
        totals = rows.aggregate(**{f"{name}__sum": Sum(name) for name in _SUMS})
        remaining = _build_series([totals[f"{name}__sum"] or 0 for name in _SUMS])
        for series in series_by_pair.values():
            remaining.subtract(series)
        series_by_pair.setdefault((OTHER, OTHER), Series()).add(remaining)
    return dict(sorted(series_by_pair.items()))


def pace(*, using: str, since: datetime) -> dict[datetime, tuple[int, int]]:
    """Return (succeeded, failed) of each minute in which a job ended."""
    rows = Measure.objects.using(using).filter(minute__gt=max(since, ALL_TIME))
    sums = (
        rows.order_by()
        .values("minute")
        .annotate(succeeded_sum=Sum("succeeded"), failed_sum=Sum("failed"))
        .values_list("minute", "succeeded_sum", "failed_sum")
    )
    return {minute: (int(succeeded), int(failed)) for minute, succeeded, failed in sums}


class RecentRuns(NamedTuple):
    """Runs of one task in one queue in a period."""

    queue: str
    jobtype: str
    started: int
    succeeded: int
    failed: int
    started_at: datetime | None
    """Minute of the latest start, rounded down."""


def read_recent_runs(*, using: str, since: datetime) -> list[RecentRuns]:
    """Return the runs since a time, rounded up to the minute, by queue and task."""
    rows = Measure.objects.using(using).filter(minute__gt=since).order_by()
    sums = rows.values_list("queue", "jobtype").annotate(
        started_sum=Sum("started"),
        succeeded_sum=Sum("succeeded"),
        failed_sum=Sum("failed"),
        started_at=Max("minute", filter=Q(started__gt=0)),
    )
    return [
        RecentRuns(queue, jobtype, int(started), int(succeeded), int(failed), started_at)
        for queue, jobtype, started, succeeded, failed, started_at in sums
    ]


def read_failing_since(
    jobtypes: Sequence[str], *, using: str, since: datetime, max_share: float
) -> dict[str, datetime]:
    """Return for each task the first minute of its latest streak of failures after `since`.

    In each minute of a streak, more than `max_share` of the runs that ended failed; minutes without such runs count to
    it. Before the latest `MINUTES_KEPT_S`, an hour counts as one minute.
    """
    rows = Measure.objects.using(using).filter(minute__gt=since, jobtype__in=jobtypes).order_by()
    sums = rows.values("jobtype", "minute").annotate(good=Sum("succeeded"), bad=Sum("failed"))
    begun: dict[str, datetime] = {}
    ended: set[str] = set()
    for jobtype, minute, good, bad in sums.order_by("-minute").values_list("jobtype", "minute", "good", "bad"):
        if bad > max_share * (good + bad) and jobtype not in ended:
            begun[jobtype] = minute
        elif good and jobtype in begun:
            ended.add(jobtype)
    return begun


def read_tasks(queue: str, *, using: str, since: datetime) -> dict[str, Series]:
    """Return the sums of a queue since a time by jobtype. Sums older than `MINUTES_KEPT_S` belong to whole hours."""
    rows = _sum_columns(_rows_since(since, queue, None, using=using).values("jobtype"))
    return {jobtype: _build_series(sums) for jobtype, *sums in rows.values_list("jobtype", *_sum_names())}


def read_pairs(*, using: str, since: datetime) -> dict[tuple[str, str], Series]:
    """Return the sums since a time by queue and jobtype; see `read_tasks`."""
    pair = ("queue", "jobtype")
    sums = _sum_columns(_rows_since(since, None, None, using=using).values(*pair)).values_list(*pair, *_sum_names())

    def verb(connection: BaseDatabaseWrapper) -> list[tuple[Any, ...]]:
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(f"SET LOCAL work_mem = '{SUM_MEMORY}'")
        return list(sums)

    return {(queue, jobtype): _build_series(values) for queue, jobtype, *values in run(using, verb, snapshot=True)}


def read_times(
    *, using: str, since: datetime, queue: str | None = None, jobtype: str | None = None
) -> dict[datetime, Series]:
    """Return the sums of each minute, or older hour, since a time; of one queue or task, or all."""
    rows = _rows_since(since, queue, jobtype, using=using).values("minute")
    return {minute: _build_series(sums) for minute, *sums in _sum_columns(rows).values_list("minute", *_sum_names())}


def _rows_since(since: datetime, queue: str | None, jobtype: str | None, *, using: str) -> QuerySet[Measure]:
    rows = Measure.objects.using(using).filter(minute__gt=since).order_by()
    if queue is not None:
        rows = rows.filter(queue=queue)
    return rows if jobtype is None else rows.filter(jobtype=jobtype)


def _sum_columns(rows: Any) -> Any:
    return rows.annotate(**{f"{name}_sum": Sum(name) for name in _SUMS})


def _sum_names() -> list[str]:
    return [f"{name}_sum" for name in _SUMS]


def _add_to_rows(connection: BaseDatabaseWrapper, series: Sequence[tuple[datetime, str, str, Series]]) -> None:
    """Add each series to the row of its minute, queue and jobtype; insert rows that do not exist."""
    rows = [
        # Raw SQL bypasses the conversion of times by the ORM.
        (connection.ops.adapt_datetimefield_value(minute), queue, jobtype, *_column_values(sums))
        for minute, queue, jobtype, sums in series
    ]
    with connection.cursor() as cursor:
        for chunk in chunks(rows, CHUNK):
            cursor.execute(_build_upsert(connection, len(chunk)), [value for row in chunk for value in row])


def _column_values(series: Series) -> list[float]:
    return [
        series.started, series.succeeded, series.failed, series.waited_s, series.ran_s, *series.waits, *series.runs,
    ]  # fmt: skip


def _build_series(sums: Sequence[Any]) -> Series:
    """Build a series from the columns of `_SUMS`."""
    started, succeeded, failed, waited_s, ran_s, *counts = sums
    return Series(
        started=int(started),
        succeeded=int(succeeded),
        failed=int(failed),
        waited_s=waited_s,
        ran_s=ran_s,
        waits=[int(count) for count in counts[:BUCKETS]],
        runs=[int(count) for count in counts[BUCKETS:]],
    )


def _build_upsert(connection: BaseDatabaseWrapper, count: int) -> str:
    row = f"({marks(_COLUMNS)})"
    insert = f"INSERT INTO {_TABLE} ({', '.join(_COLUMNS)}) VALUES {', '.join([row] * count)} "
    if connection.vendor == "mysql":
        added = ", ".join(f"{name} = {name} + VALUES({name})" for name in _SUMS)
        return f"{insert} ON DUPLICATE KEY UPDATE {added}, used_at = UTC_TIMESTAMP(6)"
    added = ", ".join(f"{name} = {_TABLE}.{name} + excluded.{name}" for name in _SUMS)
    return f"{insert} ON CONFLICT (minute, queue, jobtype) DO UPDATE SET {added}, used_at = excluded.used_at"
