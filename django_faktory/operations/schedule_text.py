"""Describe a cron schedule in words, in the active language."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date

from django.utils.dates import MONTHS, WEEKDAYS
from django.utils.formats import date_format
from django.utils.text import capfirst, get_text_list
from django.utils.translation import gettext, gettext_lazy, ngettext

from ..core.cron import LAST_DAY, LAST_WORKDAY, CronFields, Schedule

MAX_TIMES = 4
"""Maximum number of times of day that are listed; more are described by their hours and minutes."""

_SECONDS = _MINUTES = range(60)
_HOURS, _DAYS, _MONTHS, _WEEKDAYS = range(24), range(1, 32), range(1, 13), range(7)
_LEAP_YEAR = 2024

_NTH_WEEKDAYS = {
    1: gettext_lazy("the first %(weekday)s of the month"),
    2: gettext_lazy("the second %(weekday)s of the month"),
    3: gettext_lazy("the third %(weekday)s of the month"),
    4: gettext_lazy("the fourth %(weekday)s of the month"),
    5: gettext_lazy("the fifth %(weekday)s of the month"),
    0: gettext_lazy("the last %(weekday)s of the month"),
}


def describe(schedule: Schedule) -> str:
    """Return text such as "At 02:30, on Monday to Friday, in January"."""
    fields = schedule.fields
    return capfirst(", ".join([*_times(fields), *_dates(fields)]))


def _times(fields: CronFields) -> list[str]:
    seconds, minutes, hours = sorted(fields.seconds), sorted(fields.minutes), sorted(fields.hours)
    if len(seconds) * len(minutes) * len(hours) <= MAX_TIMES:
        times = [
            f"{hour:02}:{minute:02}" + (f":{second:02}" if seconds != [0] else "")
            for hour in hours for minute in minutes for second in seconds
        ]  # fmt: skip
        return [gettext("at %(times)s") % {"times": _join(times)}]
    parts = [_describe_hours(hours), _describe_minutes(minutes), _describe_seconds(seconds)]
    if not parts[0] and _is_listed(minutes, _MINUTES):
        parts[0] = gettext("every hour")
    if not parts[1] and _is_listed(seconds, _SECONDS):
        parts[1] = gettext("every minute")
    return [part for part in parts if part]


def _describe_hours(hours: Sequence[int]) -> str:
    if step := _find_step(hours, _HOURS):
        return gettext("every %(count)s hours") % {"count": step}
    if _is_listed(hours, _HOURS):
        return ngettext("in hour %(hours)s", "in hours %(hours)s", len(hours)) % {"hours": _list(hours)}
    return ""


def _describe_minutes(minutes: Sequence[int]) -> str:
    if step := _find_step(minutes, _MINUTES):
        return gettext("every %(count)s minutes") % {"count": step}
    if _is_listed(minutes, _MINUTES):
        return ngettext("at minute %(minutes)s", "at minutes %(minutes)s", len(minutes)) % {"minutes": _list(minutes)}
    return ""


def _describe_seconds(seconds: Sequence[int]) -> str:
    if seconds == [0]:
        return ""
    if step := _find_step(seconds, _SECONDS):
        return gettext("every %(count)s seconds") % {"count": step}
    if _is_listed(seconds, _SECONDS):
        return ngettext("at second %(seconds)s", "at seconds %(seconds)s", len(seconds)) % {"seconds": _list(seconds)}
    return gettext("every second")


def _dates(fields: CronFields) -> Iterator[str]:
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
        case _ if len(fields.hours) < len(_HOURS):
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
    for day, nth in sorted(fields.nth_weekdays, key=lambda found: (found[1] or len(_NTH_WEEKDAYS), found[0])):
        parts.append(str(_NTH_WEEKDAYS[nth]) % {"weekday": WEEKDAYS[(day - 1) % 7]})
    return _join(parts)


def _find_step(values: Sequence[int], all_values: range) -> int:
    """Return n if the values are each n-th one and n divides their range, as of `*/15`; otherwise 0."""
    step = len(all_values) // len(values)
    return step if 1 < step < len(all_values) and list(all_values[::step]) == list(values) else 0


def _is_listed(values: Sequence[int], all_values: range) -> bool:
    """Return True if neither "every" nor "every n" describes the values."""
    return len(values) < len(all_values) and not _find_step(values, all_values)


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
