"""`doctor`: print the alarms, and exit with a code by which a script notices them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.utils import timezone

from ....operations import alarms
from ....operations.rows import AlarmRow
from ..subcommand import OK, PARTLY, Invocation, Subcommand

CRITICAL, WARNING = "CRITICAL", "WARNING"


def _doctor(call: Invocation) -> int:
    found = alarms.read(using=call.require_alias())
    documents = list(map(AlarmRow.read, found))
    if call.screen.is_json or not found:
        call.screen.result({"alarms": documents}, "No problems found.")
    else:
        for alarm, document in zip(found, documents, strict=True):
            call.screen.line(format_alarm(document))
            call.screen.line(f"          {alarm.explanation}")
    return PARTLY if any(alarm.is_critical for alarm in found) else OK


def format_alarm(alarm: dict[str, Any]) -> str:
    """Return the first line of an alarm: level, text, and since when."""
    level = CRITICAL if alarm["is_critical"] else WARNING
    since = alarm["since"] and timezone.localtime(datetime.fromisoformat(alarm["since"]))
    return f"{level:<8}  {alarm['text']}{f' (since {since:%Y-%m-%d %H:%M:%S %Z})' if since else ''}"


SUBCOMMANDS = (Subcommand("doctor", "Report what needs attention: no workers, failing tasks, late queues.", _doctor),)
