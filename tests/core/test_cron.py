"""Cron schedules: parsing, time zones, clock changes, and which missed ticks are caught up."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_faktory import Cron
from django_faktory.core.cron import MAX_TICKS, Due, Schedule, due, parse_crons
from django_faktory.errors import InvalidCron

pytestmark = pytest.mark.core

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


def times(line, zone, begin, hours):
    """Return the ticks of this many hours in local time; `begin` is a local midnight."""
    schedule, there = Schedule.of(line, zone), ZoneInfo(zone)
    first = datetime.fromisoformat(begin).replace(tzinfo=there).astimezone(UTC)
    ticks = takewhile(lambda tick: tick < first + timedelta(hours=hours), schedule.ticks(first - timedelta(seconds=1)))
    return [f"{tick.astimezone(there):%H:%M%z}" for tick in ticks]


QUARTERS, HOURS = range(0, 60, 15), range(24)
LINES = {
    "0 * * * *": ([0], HOURS),
    "30 * * * *": ([30], HOURS),
    "*/15 * * * *": (QUARTERS, HOURS),
    "0 */2 * * *": ([0], HOURS[::2]),
    "0 */3 * * *": ([0], HOURS[::3]),
    "15 */2 * * *": ([15], HOURS[::2]),
    "*/15 1-2 * * *": (QUARTERS, [1, 2]),
}
"""Schedules that are due each time the clock shows a matching time: the minutes and hours that match."""

CHANGES = [
    (BERLIN, "2026-03-29"),  # 02:00 is 03:00
    (BERLIN, "2026-10-25"),  # 03:00 is 02:00
    (NEW_YORK, "2026-03-08"),  # 02:00 is 03:00
    (NEW_YORK, "2026-11-01"),  # 02:00 is 01:00
    # The clock changes by half an hour, at midnight, and once by a whole day.
    ("Australia/Lord_Howe", "2026-04-05"),
    ("Australia/Lord_Howe", "2026-10-04"),
    ("America/Havana", "2026-03-08"),
    ("America/Havana", "2026-11-01"),
    ("America/Santiago", "2026-09-06"),
    ("Pacific/Apia", "2011-12-30"),
]


@pytest.mark.parametrize(("zone", "day"), CHANGES)
@pytest.mark.parametrize("line", LINES)
def test_interval_schedules_tick_whenever_the_clock_shows_a_matching_time(line, zone, day):
    minutes, hours = LINES[line]
    first = datetime.fromisoformat(day).replace(tzinfo=UTC) - timedelta(days=1)
    passing = [first + timedelta(minutes=5 * number) for number in range(3 * 24 * 12)]
    shown = [(moment, moment.astimezone(ZoneInfo(zone))) for moment in passing]
    expected = [moment for moment, clock in shown if clock.minute in minutes and clock.hour in hours]
    ticks = Schedule.of(line, zone).ticks(first - timedelta(microseconds=1))
    assert list(takewhile(lambda tick: tick <= passing[-1], ticks)) == expected


def test_an_interval_schedule_finds_a_day_years_ahead():
    following = Schedule.of("*/59 2 29 2 *", "Australia/Lord_Howe").after(datetime(2024, 3, 1, tzinfo=UTC))
    assert following == datetime(2028, 2, 29, 2, 0, tzinfo=ZoneInfo("Australia/Lord_Howe"))


def test_a_daily_time_in_a_clock_change_gap_runs_at_its_end():
    assert times("30 2 * * *", BERLIN, "2026-03-29", 23) == ["03:00+0200"]
    assert times("30 2 * * *", NEW_YORK, "2026-03-08", 23) == ["03:00-0400"]


def test_a_daily_time_in_a_repeated_hour_runs_once_in_the_first():
    assert times("30 2 * * *", BERLIN, "2026-10-25", 25) == ["02:30+0200"]
    assert times("30 1 * * *", NEW_YORK, "2026-11-01", 25) == ["01:30-0400"]
    assert times("30 2 * * *", NEW_YORK, "2026-11-01", 25) == ["02:30-0500"]


def test_daily_at_half_past_two_runs_once_a_day_all_year():
    schedule = Schedule.of("30 2 * * *", BERLIN)
    days = [tick.astimezone(ZoneInfo(BERLIN)).date() for tick in between(schedule, "2026-01-01", "2027-01-01")]
    assert len(days) == len(set(days)) == 365


def between(schedule, begin, end):
    first, last = (datetime.fromisoformat(day).replace(tzinfo=UTC) for day in (begin, end))
    for tick in schedule.ticks(first):
        if tick >= last:
            return
        yield tick


def test_two_ticks_inside_the_clock_change_gap_become_one():
    assert times("0,30 2 * * *", BERLIN, "2026-03-29", 23) == ["03:00+0200"]


def test_a_daily_time_is_not_due_again_in_the_repeated_hour():
    at = datetime(2026, 10, 25, 2, 10, fold=1, tzinfo=ZoneInfo(BERLIN))
    following = Schedule.of("30 2 * * *", BERLIN).after(at)
    assert following == datetime(2026, 10, 26, 2, 30, tzinfo=ZoneInfo(BERLIN))


@given(
    line=st.sampled_from(
        ["0 * * * *", "30 2 * * *", "*/15 * * * *", "0,30 1-3 * * *", "15 */2 * * *", "*/7 * * * * *"]
    ),
    zone=st.sampled_from([BERLIN, NEW_YORK, "Australia/Lord_Howe", "Asia/Kolkata", "UTC"]),
    moment=st.integers(0, 365 * 86_400).map(
        lambda seconds: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    ),
)
def test_ticks_ascend_and_do_not_depend_on_the_start_time(line, zone, moment):
    schedule = Schedule.of(line, zone)
    ticks = schedule.ticks(moment)
    first, second, third = next(ticks), next(ticks), next(ticks)
    assert moment < first < second < third
    assert schedule.after(first) == second
    assert schedule.after(second - timedelta(microseconds=1)) == second


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("61 * * * *", 'minute: expected 0-59, *, a list (1,2), a range (1-5) or a step (*/5), got "61"'),
        ("* 24 * * *", "hour: expected 0-23"),
        ("* * 32 * *", "day-of-month: expected 1-31, L, LW"),
        ("0 0 30 2 *", "day-of-month: expected 1-31, L, LW of a month that has the day"),
        ("* * * 13 *", "month: expected 1-12, JAN-DEC"),
        ("* * * * 8", "day-of-week: expected 0-7, SUN-SAT"),
        ("* * * * MON-", 'got "MON-"'),
        ("60 * * * * *", "second: expected 0-59"),
        ("* * * *", "expected five fields (minute, hour, day-of-month, month, day-of-week)"),
        ("@often", "expected one of @yearly"),
        ("* * */20 * 1L", "expected a date that occurs"),
        ("", "expected a cron expression"),
        ("   ", "expected a cron expression"),
        ("*/0 * * * *", "minute: expected"),
        (5, "expected a cron expression"),
        ("0 " * 200, "expected a cron expression"),
    ],
)
def test_an_invalid_cron_line_is_refused_with_its_field_and_valid_values(line, message):
    with pytest.raises(InvalidCron) as raised:
        Schedule.of(line, "UTC")
    assert str(raised.value).startswith("schedule: ")
    assert message in str(raised.value)


@given(st.text("0123456789*/,-#LW@ MONSU", max_size=20))
def test_any_text_is_a_schedule_or_raises_invalid_cron(line):
    with suppress(InvalidCron):
        assert Schedule.of(line, "UTC").after(NOON) > NOON


@pytest.mark.parametrize("zone", ["Europe/Berlni", "", "../etc/passwd", "Europe", "\x00", 5])
def test_an_invalid_time_zone_is_refused(zone):
    with pytest.raises(InvalidCron) as raised:
        Schedule.of("0 * * * *", zone)
    assert str(raised.value).startswith("zone: expected the name of a time zone")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"missed": "never"}, "missed"),
        ({"window": 0}, "window"),
        ({"window": 1.5}, "window"),
        ({"window": True}, "window"),
        ({"overlap": "forbid"}, "overlap"),
        ({"zone": "Mars/Olympus"}, "zone"),
    ],
)
def test_an_invalid_cron_option_is_refused_with_its_field(options, field):
    with pytest.raises(InvalidCron) as raised:
        Cron("0 * * * *", **options)
    assert raised.value.field == field


def test_an_entry_is_a_cron_line_one_cron_object_or_several():
    one = Cron("0 * * * *")
    assert parse_crons("0 * * * *") == parse_crons(one) == parse_crons([one]) == (one,)
    assert parse_crons(()) == ()
    with pytest.raises(InvalidCron):
        parse_crons(["0 * * * *"])


# --- missed ticks


def judged(first, now, missed, window_s=86_400, line="0 * * * *"):
    return due(Schedule.of(line, "UTC"), first, now, missed=missed, window_s=window_s)


def at(hour, minute=0, second=0):
    return datetime(2026, 5, 1, hour, minute, second, tzinfo=UTC)


@pytest.mark.parametrize("missed", ["skip", "once", "all"])
def test_a_tick_that_is_a_minute_late_is_not_missed(missed):
    assert judged(at(12), at(12, 1), missed) == Due([at(12)], None, at(13))


def test_skip_drops_all_missed_ticks():
    assert judged(at(9), at(12, 30), "skip") == Due([], at(9), at(13))
    assert judged(at(9), at(12, 0, 5), "skip") == Due([at(12)], at(9), at(13))


def test_once_runs_only_the_latest_missed_tick():
    assert judged(at(9), at(12, 30), "once") == Due([at(12)], at(9), at(13))
    assert judged(at(12), at(12, 30), "once") == Due([at(12)], None, at(13))


def test_once_runs_no_missed_tick_if_one_is_on_time():
    assert judged(at(9), at(12, 0, 5), "once") == Due([at(12)], at(9), at(13))


def test_all_runs_every_missed_tick():
    assert judged(at(9), at(12, 30), "all") == Due([at(9), at(10), at(11), at(12)], None, at(13))


def test_missed_ticks_older_than_the_window_are_dropped():
    assert judged(at(9), at(12, 30), "all", window_s=2 * 3600) == Due([at(11), at(12)], at(9), at(13))
    assert judged(at(9), at(12, 30), "once", window_s=600) == Due([], at(9), at(13))


def test_a_tick_on_time_runs_even_with_a_short_window():
    assert judged(at(12), at(12, 0, 50), "all", window_s=1) == Due([at(12)], None, at(13))


def test_many_missed_ticks_are_caught_up_in_several_rounds():
    plan = judged(at(1), at(12), "all", line="* * * * *")
    assert len(plan.ticks) == MAX_TICKS
    assert plan.next_at == at(1) + timedelta(minutes=MAX_TICKS)
    rest = judged(plan.next_at, at(12), "all", line="* * * * *")
    assert rest.ticks[0] == plan.next_at


def test_a_year_of_missed_second_ticks_is_skipped_in_one_call():
    first = datetime(2025, 5, 1, tzinfo=UTC)
    for missed, count in [("skip", 61), ("once", 61)]:
        plan = judged(first, at(12), missed, line="* * * * * *")
        assert len(plan.ticks) == count
        assert plan.passed == first


@pytest.mark.parametrize("line", ["* * * * *", "0 3 * * *", "0 0 1 1 *", "*/7 * * * * *", "59 23 31 12 *"])
def test_latest_returns_the_last_tick_in_a_time_range(line):
    schedule = Schedule.of(line, "UTC")
    first, until = datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, 12, tzinfo=UTC)
    latest = schedule.latest(first, until)
    assert schedule.after(latest - timedelta(seconds=1)) == latest
    assert schedule.after(latest) > until
    assert schedule.latest(first, first - timedelta(seconds=1)) is None
