"""Cron schedules: compute ticks in a time zone and decide which missed ticks to run.

Pure, except for time zone data. Grammar and behaviour at clock changes are those of cronsim, which follows Debian cron
(`docs/cron.md`, ADR 0014). Datetimes are aware; returned ones are in UTC.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from ..errors import InvalidCron, quoted, translatable

ON_TIME_S = 60
"""Seconds within which a tick counts as on time; the restart of a node takes less."""

MAX_TICKS = 100
"""Maximum number of ticks of one entry that are enqueued in one transaction."""

MAX_LINE_LENGTH = 255
LONGEST_WINDOW_S = 366 * 86_400

_ABBREVIATIONS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_RANGES = {
    "second": "0-59",
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": "1-31, L, LW",
    "month": "1-12, JAN-DEC",
    "day-of-week": "0-7, SUN-SAT, 0L-7L, 0#1-7#5",
}
_SPANS = (timedelta(minutes=1), timedelta(hours=1), timedelta(days=1), timedelta(days=31))
"""Lengths of the spans that `Schedule.latest` searches, one after the other."""


class Missed(StrEnum):
    """What happens to ticks that no node took in time."""

    SKIP = "skip"
    ONCE = "once"
    ALL = "all"


class Overlap(StrEnum):
    """Whether a tick's job is enqueued while an earlier job of the entry waits or runs."""

    ALLOW = "allow"
    SKIP = "skip"


class RunOutcome(StrEnum):
    """How a tick ended: the state of its job, or why there is none."""

    ENQUEUED = "enqueued"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    DISCARDED = "discarded"
    EXPIRED = "expired"
    GONE = "gone"
    """The job is not stored any more, and its end was not recorded."""
    MISSED = "missed"
    OVERLAPPED = "overlapped"
    REFUSED = "refused"
    """The job could not be created; the run's note has the reason."""


@dataclass(frozen=True, slots=True)
class Cron:
    """An entry of `@task(cron=…)`. Raises InvalidCron, which names the field."""

    schedule: str
    """Five fields, or six with seconds first, or @hourly, @daily, @weekly, @monthly, @yearly."""
    zone: str = field(default="", kw_only=True)
    """Name of a time zone such as "Europe/Berlin"; the project's TIME_ZONE unless given."""
    args: Sequence[Any] = field(default=(), kw_only=True)
    """Positional arguments of its jobs."""
    kwargs: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Keyword arguments of its jobs."""
    name: str = field(default="", kw_only=True)
    """Name of the entry; the name of the task unless given."""
    queue: str = field(default="", kw_only=True)
    """Queue of its jobs; that of the task unless given."""
    # As in anacron: a deployment must not lose a nightly job, and many missed ticks must create one job (ADR 0014).
    missed: str = field(default="once", kw_only=True)
    """Ticks that no node took within a minute: "skip" them, run "once" for the latest, or run for "all"."""
    window: int = field(default=86_400, kw_only=True)
    """How many seconds into the past "once" and "all" extend, at most 366 days."""
    overlap: str = field(default="allow", kw_only=True)
    """While an earlier job of the entry waits or runs: "allow" another, or "skip" it."""

    def __post_init__(self) -> None:
        # The default zone is a Django setting, which this module does not read; any zone suffices to check the line.
        Schedule.of(self.schedule, self.zone or "UTC")
        check_policies(self.missed, self.window, self.overlap)


def parse_crons(value: Any) -> tuple[Cron, ...]:
    """Return the entries of `@task(cron=…)`, given as a cron expression, a Cron, or a list. Raises InvalidCron."""
    if isinstance(value, str):
        return (Cron(value),)
    crons = (value,) if isinstance(value, Cron) else value
    if not isinstance(crons, list | tuple) or not all(isinstance(cron, Cron) for cron in crons):
        raise InvalidCron(
            "schedule",
            'expected a cron expression such as "30 2 * * *", a Cron, or a list, got %(value)s',
            value=quoted(value),
        )
    return tuple(crons)


def check_policies(missed: object, window: object, overlap: object) -> None:
    """Raise InvalidCron, naming the field, for an invalid policy."""
    if missed not in tuple(Missed):
        raise InvalidCron("missed", 'expected "skip", "once" or "all", got %(value)s', value=quoted(missed))
    if not isinstance(window, int) or isinstance(window, bool) or not 0 < window <= LONGEST_WINDOW_S:
        raise InvalidCron(
            "window",
            "expected whole seconds from 1 to %(most)s, got %(value)s",
            most=LONGEST_WINDOW_S,
            value=quoted(window),
        )
    if overlap not in tuple(Overlap):
        raise InvalidCron("overlap", 'expected "allow" or "skip", got %(value)s', value=quoted(overlap))


class Schedule:
    """A cron expression in a time zone. Build it with `of`, which caches parsed schedules."""

    def __init__(self, line: str, zone: str) -> None:
        self.zone = zone_of(zone)
        self._line = _validate_line(line)
        # cronsim sets `fixup_tz` for five-field lines with fixed minutes and hours, and then handles clock changes.
        at_given_times = CronSim(self._line, datetime(2024, 1, 1, tzinfo=self.zone)).fixup_tz is not None
        self._needs_fixed_offsets = self.zone is not UTC and not at_given_times

    @staticmethod
    def of(line: object, zone: object) -> Schedule:
        """Return the schedule.

        Raises InvalidCron, naming the line's field and its expected values.
        """
        if not isinstance(line, str) or not line.strip() or len(line) > MAX_LINE_LENGTH:
            raise InvalidCron(
                "schedule", 'expected a cron expression such as "30 2 * * *", got %(value)s', value=quoted(line)
            )
        if not isinstance(zone, str):
            raise _zone_error(zone)
        # A line such as February 30 parses, but never has a tick.
        schedule = _cached_schedule(line, zone)
        if schedule.after(datetime(2024, 1, 1, tzinfo=UTC)) is None:
            raise InvalidCron(
                "schedule", '"%(line)s": expected a date that occurs, got none within 50 years', line=line
            )
        return schedule

    def after(self, moment: datetime) -> datetime | None:
        """Return the first tick after this moment; None if there is none within 50 years."""
        # cronsim stops its search after 50 years.
        return next(self.ticks(moment), None)

    def ticks(self, moment: datetime) -> Iterator[datetime]:
        """Yield the ticks after this moment in order, each once."""
        if self._needs_fixed_offsets:
            yield from self._ticks_by_offset(moment.astimezone(UTC))
            return
        latest = moment.astimezone(UTC)
        for tick in CronSim(self._line, moment.astimezone(self.zone)):
            utc_tick = tick.astimezone(UTC)
            # When clocks go back, cronsim yields the repeated hour a second time; when they go forward, every tick
            # inside the gap is due at its end.
            if utc_tick > latest:
                latest = utc_tick
                yield utc_tick

    def _ticks_by_offset(self, begin: datetime) -> Iterator[datetime]:
        """Yield the ticks of a line that matches every occurrence of a local time: twice in a repeated hour.

        cronsim steps by whole hours and so skips ticks where clocks change by half an hour. This method runs it on
        local time without a zone, and starts again at each change of the offset.
        """
        resume_after = begin
        while True:
            offset = _offset_at(self.zone, begin)
            for tick in CronSim(self._line, (resume_after + offset).replace(tzinfo=None)):
                utc_tick = tick.replace(tzinfo=UTC) - offset
                change = _next_offset_change(self.zone, begin, utc_tick)
                if change is not None:
                    # A microsecond earlier, so that a tick at the moment of the change is included.
                    begin, resume_after = change, change - timedelta(microseconds=1)
                    break
                yield utc_tick
                begin = utc_tick
            else:
                return

    def latest(self, first: datetime, until: datetime) -> datetime | None:
        """Return the last tick in this span, both ends included.

        Searches short spans at the end first, so that a frequent schedule does not yield all ticks of a long span.
        """
        for span in (*_SPANS, until - first):
            begin = max(first, until - span)
            last_tick = None
            for tick in self.ticks(begin - timedelta(microseconds=1)):
                if tick > until:
                    break
                last_tick = tick
            if last_tick or begin <= first:
                return last_tick
        return None

    def explain(self) -> str:
        """Return the schedule in English words, such as "At 02:30 every day"."""
        return str(CronSim(self._line, datetime(2024, 1, 1, tzinfo=UTC)).explain())


class Due(NamedTuple):
    """What to do for an entry now."""

    ticks: list[datetime]
    """Ticks to enqueue a job for."""
    passed: datetime | None
    """The first of the skipped ticks, if any are skipped."""
    next_at: datetime | None
    """When to check again: the next tick, or a past one if there were too many for one transaction."""


def due(schedule: Schedule, first: datetime, now: datetime, *, missed: str, window_s: int) -> Due:
    """Decide which ticks get a job: those from `first`, the earliest that no node took, up to `now`."""
    on_time_since, next_at = now - timedelta(seconds=ON_TIME_S), schedule.after(now)
    if missed != Missed.ALL and first < on_time_since:
        on_time = _ticks_between(schedule, on_time_since, now)
        oldest = max(first, now - timedelta(seconds=window_s))
        catch_up = None
        # A tick that is on time replaces the missed ones.
        if missed == Missed.ONCE and not on_time and oldest < on_time_since:
            catch_up = schedule.latest(oldest, on_time_since)
        ticks = [catch_up] if catch_up else on_time
        return Due(ticks, None if catch_up == first else first, next_at)
    oldest = first
    if first < on_time_since:
        # A window shorter than ON_TIME_S must not drop ticks that are on time.
        oldest = max(first, now - timedelta(seconds=max(window_s, ON_TIME_S)))
    ticks = _ticks_between(schedule, oldest, now, MAX_TICKS + 1)
    if len(ticks) > MAX_TICKS:
        # The next transaction continues with the tick that did not fit.
        next_at = ticks.pop()
    return Due(ticks, first if oldest > first else None, next_at)


def zone_of(name: str) -> tzinfo:
    """Return the time zone with this name. Raises InvalidCron."""
    if name == "UTC":
        return UTC  # several times as fast as ZoneInfo("UTC")
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError) as error:  # LookupError: not found; OSError: the name of a directory
        raise _zone_error(name) from error


def _zone_error(zone: object) -> InvalidCron:
    return InvalidCron(
        "zone", 'expected the name of a time zone, such as "Europe/Berlin", got %(value)s', value=quoted(zone)
    )


@lru_cache(maxsize=1024)
def _cached_schedule(line: str, zone: str) -> Schedule:
    return Schedule(line, zone)


def _offset_at(zone: tzinfo, moment: datetime) -> timedelta:
    offset = moment.astimezone(zone).utcoffset()
    assert offset is not None  # noqa: S101  (it is aware)
    return offset


def _next_offset_change(zone: tzinfo, begin: datetime, end: datetime) -> datetime | None:
    """Return the first moment after `begin`, up to `end`, with another offset from UTC; None if the offset stays."""
    offset = _offset_at(zone, begin)
    while begin < end:
        later = min(begin + timedelta(days=1), end)
        # Compare day by day, then bisect to the second.
        if _offset_at(zone, later) != offset:
            while later - begin > timedelta(seconds=1):
                middle = (begin + (later - begin) / 2).replace(microsecond=0)
                if _offset_at(zone, middle) == offset:
                    begin = middle
                else:
                    later = middle
            return later.replace(microsecond=0)
        begin = later
    return None


def _ticks_between(schedule: Schedule, first: datetime, until: datetime, limit: int | None = None) -> list[datetime]:
    ticks = []
    for tick in islice(schedule.ticks(first - timedelta(microseconds=1)), limit):
        if tick > until:
            break
        ticks.append(tick)
    return ticks


def _validate_line(line: str) -> str:
    """Return the line in the form that cronsim accepts. Raises InvalidCron."""
    fields = line.split()
    if fields[0].startswith("@"):
        if line.strip().lower() not in _ABBREVIATIONS:
            raise InvalidCron(
                "schedule",
                "expected one of %(known)s, or five fields, got %(value)s",
                known=", ".join(_ABBREVIATIONS),
                value=quoted(line),
            )
        return _ABBREVIATIONS[line.strip().lower()]
    if len(fields) not in (5, 6):
        raise InvalidCron(
            "schedule",
            '"%(line)s": expected five fields (minute, hour, day-of-month, month, day-of-week), or six with the second '
            "first, got %(count)s",
            line=line,
            count=len(fields),
        )
    try:
        CronSim(line, datetime(2024, 1, 1, tzinfo=UTC))
    except (CronSimError, AssertionError, ValueError) as error:
        raise _field_error(line, str(error), fields) from error
    return line


def _field_error(line: str, problem: str, fields: Sequence[str]) -> InvalidCron:
    """Return an error that names the field, its range and the value; cronsim reports only "Bad minute"."""
    name = problem.removeprefix("Bad ")
    if name not in _RANGES:
        return InvalidCron("schedule", '"%(line)s": cannot be read: %(problem)s', line=line, problem=problem)
    # A line of five fields has no second, the first name in _RANGES.
    position = list(_RANGES).index(name) - (6 - len(fields))
    text = translatable(
        '"%(line)s": %(name)s: expected %(range)s, *, a list (1,2), a range (1-5) or a step (*/5), got "%(value)s"'
    )
    if name == "day-of-month":
        text = translatable(
            '"%(line)s": %(name)s: expected %(range)s of a month that has the day, *, a list (1,2), a range (1-5) or a '
            'step (*/5), got "%(value)s"'
        )
    return InvalidCron("schedule", text, line=line, name=name, range=_RANGES[name], value=fields[position])
