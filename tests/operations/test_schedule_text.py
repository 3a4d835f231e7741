"""A cron schedule in words."""

import random
from datetime import UTC, datetime
from itertools import islice

import pytest
from django.utils import translation

from django_faktory.core.cron import Schedule
from django_faktory.errors import InvalidCron
from django_faktory.operations.schedule_text import describe
from tests.examples import examples

pytestmark = pytest.mark.core

TEXTS = {
    "* * * * *": "Every minute",
    "*/15 * * * *": "Every 15 minutes",
    "*/7 * * * *": "Every hour, at minutes 0, 7, 14, 21, 28, 35, 42, 49 and 56",
    "0 * * * *": "Every hour, at minute 0",
    "@hourly": "Every hour, at minute 0",
    "1-5/2 * * * *": "Every hour, at minutes 1, 3 and 5",
    "23 0-20/2 * * *": "In hours 0, 2, 4, 6, 8, 10, 12, 14, 16, 18 and 20, at minute 23, every day",
    "0 */6 * * *": "At 00:00, 06:00, 12:00 and 18:00, every day",
    "5 */2 * * *": "Every 2 hours, at minute 5, every day",
    "*/5 9-17 * * MON-FRI": "In hours 9 to 17, every 5 minutes, on Monday to Friday",
    "* 9 * * *": "In hour 9, every minute, every day",
    "* * * * * *": "Every second",
    "*/10 * * * * *": "Every 10 seconds",
    "5,20 * * * * *": "Every minute, at seconds 5 and 20",
    "15 30 2 * * *": "At 02:30:15, every day",
    "0-9 30 * * * *": "Every hour, at minute 30, at seconds 0 to 9",
    "30 2 * * *": "At 02:30, every day",
    "0 22 * * 1-5": "At 22:00, on Monday to Friday",
    "0 0 * * 0,7": "At 00:00, on Sunday",
    "0 0 * * SAT,SUN,MON": "At 00:00, on Monday, Saturday and Sunday",
    "0 9 * * MON#2": "At 09:00, on the second Monday of the month",
    "0 0 * * FRI#1,FRI#3,5L": "At 00:00, on the first Friday of the month, the third Friday of the month and the last "
    "Friday of the month",
    "0 2 1,15 * *": "At 02:00, on days 1 and 15 of the month",
    "0 0 L * *": "At 00:00, on the last day of the month",
    "0 0 1,LW * *": "At 00:00, on day 1 and the last weekday of the month",
    "0 0 13 * 5": "At 00:00, on day 13 of the month or on Friday",
    "0 0 1-31 * 5": "At 00:00, every day",
    "0 0 */10 * 5": "At 00:00, on days 1, 11, 21 and 31 of the month, only on Friday",
    "0 0 1 1 *": "At 00:00, on January 1",
    "0 0 29 2 *": "At 00:00, on February 29",
    "0 0 * 1-3,12 *": "At 00:00, every day, in January to March and December",
    "0 0 1 1,7 *": "At 00:00, on day 1 of the month, in January and July",
}


@pytest.mark.parametrize(("line", "text"), TEXTS.items(), ids=list(TEXTS))
def test_a_schedule_reads_like_this(line, text):
    assert describe(Schedule.of(line, "UTC")) == text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("*/15 9-17 * * MON-FRI", "In den Stunden 9 bis 17, alle 15 Minuten, am Montag bis Freitag"),
        ("30 2 1,15 * *", "Um 02:30, an den Tagen 1 und 15 des Monats"),
        ("0 9 13 * MON#2", "Um 09:00, an Tag 13 des Monats oder am zweiten Montag des Monats"),
        ("0 0 1 1 *", "Um 00:00, am 1. Januar"),
        ("0 0 LW 3 *", "Um 00:00, an dem letzten Arbeitstag des Monats, im März"),
    ],
)
def test_the_text_is_in_the_active_language(line, text):
    with translation.override("de"):
        assert describe(Schedule.of(line, "UTC")) == text


FIELDS = (
    ("0", "0", "*", "*/20", "10-19"),
    ("0", "30", "*", "*/15", "*/7", "1-5", "1,2,3,4,5"),
    ("2", "*", "*/6", "9-17", "0,12"),
    ("*", "*", "1", "1-31", "31", "*/10", "1,15", "L", "LW", "1,L"),
    ("*", "*", "1", "1-12", "2,3", "*/3"),
    ("*", "*", "0", "7", "1-5", "MON#1", "5L", "0-7", "*/2", "1,MON#2"),
)
"""Values of each field, with several forms of the same ones."""


def test_schedules_with_the_same_text_have_the_same_ticks():
    chance = random.Random("schedules in words")
    ticks_by_text, repeated = {}, 0
    for _ in range(examples(2000)):
        try:
            schedule = Schedule.of(" ".join(map(chance.choice, FIELDS)), "UTC")
        except InvalidCron:  # a day that never comes
            continue
        ticks = list(islice(schedule.ticks(datetime(2026, 1, 30, 8, 59, tzinfo=UTC)), 20))
        repeated += describe(schedule) in ticks_by_text
        assert ticks_by_text.setdefault(describe(schedule), ticks) == ticks, describe(schedule)
    assert repeated > 5
