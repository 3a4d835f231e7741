"""`doctor`: print the alarms, and exit with a code by which a script notices them."""

from __future__ import annotations

from datetime import datetime

from django.utils import timezone

from ....operations import alarms
from ....operations.serializers import alarm_of
from ..subcommand import OK, PARTLY, Invocation, Subcommand


def _doctor(call: Invocation) -> int:
    found = alarms.read(using=call.database())
    if call.screen.is_json:
        call.screen.json({"alarms": [alarm_of(alarm) for alarm in found]})
    for alarm in () if call.screen.is_json else found:
        level = "CRITICAL" if alarm.is_critical else "WARNING "
        call.screen.line(f"{level}  {alarm.text}{_since(alarm.since)}")
        call.screen.line(f"          {alarm.advice}")
    if not found and not call.screen.is_json:
        call.screen.line("No problems found.")
    return PARTLY if any(alarm.is_critical for alarm in found) else OK


def _since(moment: datetime | None) -> str:
    return "" if moment is None else f" (since {timezone.localtime(moment):%Y-%m-%d %H:%M:%S %Z})"


SUBCOMMANDS = (Subcommand("doctor", "Report what needs attention: no workers, failing tasks, late queues.", _doctor),)
