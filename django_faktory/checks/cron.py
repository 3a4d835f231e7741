"""System checks of cron entries, from tasks and from `FAKTORY["CRON"]`: E040 to E044 and W040.

`check_cron` is the check. Each error names the field; its hint suggests a known name for a misspelt one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zoneinfo import available_timezones

from django.core.checks import CheckMessage, Error, Warning, register  # noqa: A004  (Django's name)
from django.core.exceptions import ImproperlyConfigured

from .. import conf
from ..core.suggestions import find_closest
from ..errors import InvalidCron
from ..tasks import cron
from ..tasks.base import registered
from .tasks import broken_modules

_IDS = {"schedule": "E040", "zone": "E041", "task": "E042", "args": "E043", "kwargs": "E043"}
_OTHER_ID = "E044"  # for fields without an id of their own
_HINTS = {
    "E040": 'minute hour day-of-month month day-of-week, such as "30 2 * * *"; see docs/cron.md',
    "E043": "Pass the arguments that the task takes, in types that docs/arguments.md lists.",
    "E044": "docs/cron.md lists the keys of an entry and their values.",
}


@register
def check_cron(**_: Any) -> list[CheckMessage]:
    """Check that cron entries are valid and that their tasks exist."""
    try:
        broker, settings = conf.get("BROKER"), conf.get("CRON")
    except ImproperlyConfigured:
        return []
    if not isinstance(settings, Mapping) or broken_modules():
        return []  # reported by other checks; an entry whose module fails to import would be a false E042
    entries = list(cron.read_definitions())
    messages: list[CheckMessage] = [_error(place, entry) for place, entry in entries if isinstance(entry, InvalidCron)]
    if entries and broker == "remote":
        messages.append(
            Warning(
                f"{entries[0][0]}: cron entries have no effect: the jobs are on a remote server",
                hint='FAKTORY = {"BROKER": "orm"}, or set the entries on that server.',
                id="django_faktory.W040",
            )
        )
    return messages


def _error(place: str, error: InvalidCron) -> CheckMessage:
    check_id = _IDS.get(error.field, _OTHER_ID)
    return Error(f"{place}: {error}", hint=_hint(check_id, error), id=f"django_faktory.{check_id}")


def _hint(check_id: str, error: InvalidCron) -> str:
    """Return a remedy; for a misspelt name, the closest known name."""
    if check_id == "E041":
        # Not at import: available_timezones() reads the time zone folders of the system.
        return (
            _suggestion(error, sorted(available_timezones()))
            or "Use a name of the IANA database; `pip install tzdata` installs it."
        )
    if check_id == "E042":
        names = [task.jobtype for task in registered()]
        return _suggestion(error, names) or 'Write "jobtype" instead if a worker in another language runs it.'
    return _HINTS[check_id]


def _suggestion(error: InvalidCron, known_names: list[str]) -> str:
    # The message quotes the name; the error has no field for it.
    given_name = error.problem.rpartition("'")[0].rpartition("'")[2]
    closest = find_closest(given_name, known_names)
    return f"Did you mean {closest!r}?" if closest else ""
