"""`doctor`: print the alarms, and exit with a code by which a script notices them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.utils import timezone

from ....operations import alarms
from ....operations.serializers import alarm_of
from ..subcommand import OK, PARTLY, Invocation, Subcommand

CRITICAL, WARNING = "CRITICAL", "WARNING"


def _doctor(call: Invocation) -> int:
    found = alarms.read(using=call.database())
    if call.screen.is_json:
        call.screen.json({"alarms": [alarm_of(alarm) for alarm in found]})
    for alarm in () if call.screen.is_json else map(alarm_of, found):
        call.screen.line(format_alarm(alarm))
        call.screen.line(f"          {alarm['advice']}")
    if not found and not call.screen.is_json:
        call.screen.line("No problems found.")
    return PARTLY if any(alarm.is_critical for alarm in found) else OK


def format_alarm(alarm: dict[str, Any]) -> str:
    """Return the first line of an alarm: level, text, and since when."""
    level = CRITICAL if alarm["is_critical"] else WARNING
    since = alarm["since"] and timezone.localtime(datetime.fromisoformat(alarm["since"]))
    return f"{level:<8}  {alarm['text']}{f' (since {since:%Y-%m-%d %H:%M:%S %Z})' if since else ''}"


SUBCOMMANDS = (Subcommand("doctor", "Report what needs attention: no workers, failing tasks, late queues.", _doctor),)
