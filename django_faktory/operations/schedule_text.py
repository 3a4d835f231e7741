"""Describe a cron schedule in words, in the active language."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from typing import Any, NamedTuple

from django.utils.dates import MONTHS, WEEKDAYS
from django.utils.formats import date_format
from django.utils.text import capfirst, get_text_list
from django.utils.translation import gettext, gettext_lazy, ngettext, ngettext_lazy

from ..core.cron import LAST_DAY, LAST_WORKDAY, CronFields, Schedule

MAX_TIMES = 4
"""Maximum number of times of day that are listed; more are described by their hours and minutes."""

_DAYS, _MONTHS, _WEEKDAYS = range(1, 32), range(1, 13), range(7)
_LEAP_YEAR = 2024

_NTH_WEEKDAYS = {
    1: gettext_lazy("the first %(weekday)s of the month"),
    2: gettext_lazy("the second %(weekday)s of the month"),
    3: gettext_lazy("the third %(weekday)s of the month"),
    4: gettext_lazy("the fourth %(weekday)s of the month"),
    5: gettext_lazy("the fifth %(weekday)s of the month"),
    0: gettext_lazy("the last %(weekday)s of the month"),
}


class _Unit(NamedTuple):
    """A part of the time of day: all its values, and texts for each n-th and for a list of them."""

    values: range
    every: Any
    listed: Any


_HOURS = _Unit(
    range(24),
    gettext_lazy("every %(count)s hours"),
    ngettext_lazy("in hour %(values)s", "in hours %(values)s", "count"),
)
_MINUTES = _Unit(
    range(60),
    gettext_lazy("every %(count)s minutes"),
    ngettext_lazy("at minute %(values)s", "at minutes %(values)s", "count"),
)
_SECONDS = _Unit(
    range(60),
    gettext_lazy("every %(count)s seconds"),
    ngettext_lazy("at second %(values)s", "at seconds %(values)s", "count"),
)


def describe(schedule: Schedule) -> str:
    """Return text such as "At 02:30, on Monday to Friday, in January"."""
    fields = schedule.fields
    return capfirst(", ".join([*_describe_times(fields), *_describe_dates(fields)]))


def _describe_times(fields: CronFields) -> list[str]:
    seconds, minutes, hours = sorted(fields.seconds), sorted(fields.minutes), sorted(fields.hours)
    if len(seconds) * len(minutes) * len(hours) <= MAX_TIMES:
        times = [
            f"{hour:02}:{minute:02}" + (f":{second:02}" if seconds != [0] else "")
            for hour in hours for minute in minutes for second in seconds
        ]  # fmt: skip
        return [gettext("at %(times)s") % {"times": _join(times)}]
    parts = [_describe_unit(hours, _HOURS), _describe_unit(minutes, _MINUTES)]
    if not parts[0] and _is_listed(minutes, _MINUTES):
        parts[0] = gettext("every hour")
    if not parts[1] and _is_listed(seconds, _SECONDS):
        parts[1] = gettext("every minute")
    if seconds != [0]:
        parts.append(_describe_unit(seconds, _SECONDS) or gettext("every second"))
    return [part for part in parts if part]


def _describe_unit(values: Sequence[int], unit: _Unit) -> str:
    """Return the text of these values; "" if they are all values of the unit."""
    if step := _find_step(values, unit):
        return str(unit.every % {"count": step})
    return str(unit.listed % {"count": len(values), "values": _list(values)}) if _is_listed(values, unit) else ""


def _describe_dates(fields: CronFields) -> Iterator[str]:
    has_days, has_weekdays = not fields.days >= set(_DAYS), not fields.weekdays >= set(_WEEKDAYS)
    if not (has_days and has_weekdays) and not fields.needs_both:
        # One of the two matches each day, and one is enough.
        has_days = has_weekdays = False
    [*days], [*months] = fields.days, fields.months
    if has_days and not has_weekdays and len(days) == len(months) == 1 and days[0] > 0:
        # 29 February exists in a leap year only.
        yield gettext("on %(date)s") % {"date": date_format(date(_LEAP_YEAR, months[0], days[0]), "MONTH_DAY_FORMAT")}
        return
    match has_days, has_weekdays:
        case True, True:
            text = (
                gettext("%(days)s, only on %(weekdays)s")
                if fields.needs_both
                else gettext("%(days)s or on %(weekdays)s")
            )
            yield text % {"days": _describe_days(fields), "weekdays": _describe_weekdays(fields)}
        case True, False:
            yield _describe_days(fields)
        case False, True:
            yield gettext("on %(weekdays)s") % {"weekdays": _describe_weekdays(fields)}
        case _ if len(fields.hours) < len(_HOURS.values):
            yield gettext("every day")
    if len(months) < len(_MONTHS):
        yield gettext("in %(months)s") % {"months": _list(sorted(months), lambda month: str(MONTHS[month]))}


def _describe_days(fields: CronFields) -> str:
    numbers = sorted(fields.days & set(_DAYS))
    parts = []
    if numbers:
        parts.append(ngettext("day %(days)s", "days %(days)s", len(numbers)) % {"days": _list(numbers)})
    if LAST_DAY in fields.days:
        parts.append(gettext("the last day"))
    if LAST_WORKDAY in fields.days:
        parts.append(gettext("the last weekday"))
    return gettext("on %(days)s of the month") % {"days": _join(parts)}


def _describe_weekdays(fields: CronFields) -> str:
    # In the order of Django's names, in which Monday is 0.
    days = sorted((day - 1) % 7 for day in fields.weekdays)
    parts = [_list(days, lambda day: str(WEEKDAYS[day]))] if days else []
    # The last weekday of the month (0) comes after the fifth.
    for day, nth in sorted(fields.nth_weekdays, key=lambda pair: (pair[1] or len(_NTH_WEEKDAYS), pair[0])):
        parts.append(str(_NTH_WEEKDAYS[nth]) % {"weekday": WEEKDAYS[(day - 1) % 7]})
    return _join(parts)


def _find_step(values: Sequence[int], unit: _Unit) -> int:
    """Return n if the values are every n-th one and n divides the range, as in `*/15`; otherwise 0."""
    step = len(unit.values) // len(values)
    return step if 1 < step < len(unit.values) and list(unit.values[::step]) == list(values) else 0


def _is_listed(values: Sequence[int], unit: _Unit) -> bool:
    """Return True if neither "every" nor "every n" describes the values."""
    return len(values) < len(unit.values) and not _find_step(values, unit)


def _list(values: Sequence[int], label: Callable[[int], str] = str) -> str:
    """Return the values as text, three or more consecutive ones as a range."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = []
    for run in runs:
        if len(run) > 2:
            parts.append(gettext("%(first)s to %(last)s") % {"first": label(run[0]), "last": label(run[-1])})
        else:
            parts += map(label, run)
    return _join(parts)


def _join(parts: Sequence[str]) -> str:
    return get_text_list(list(parts), gettext("and"))
