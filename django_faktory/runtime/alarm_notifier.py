"""Send alarms by e-mail and to a webhook (`AlarmNotifier`): one message for all new alarms, one when they have ended.

Every node runs the loop; a claim ensures that only one node sends each message (`store.alarm_records`). The ways are
independent: each has its own records, claims and repetitions.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from django.core.mail import send_mail
from django.db import connections

from .. import conf
from ..core.logs import get_logger
from ..errors import BrokerUnavailable
from ..operations import alarms
from ..operations.alarms import Alarm
from ..operations.rows import AlarmRow
from ..store import alarm_records, sharing
from ..store.outages import of_this_node
from .background_loops import Loop

logger = get_logger(__name__)

EVERY_S = 30.0
"""Seconds between two reads of the alarms."""
CONFIRM_S = 60.0
"""Seconds that an alarm must last before it is sent: a deploy causes short ones."""
PAUSE_S = 300.0
"""Seconds between two messages."""
WEBHOOK_TIMEOUT_S = 10.0
SHOWN = 20
"""Alarms that one message lists."""


class AlarmNotifier(Loop):
    """The loop that sends messages."""

    def __init__(
        self, alias: str, *, confirm_s: float = CONFIRM_S, pause_s: float = PAUSE_S, slow_s: float = alarms.SLOW_S
    ) -> None:
        super().__init__()
        self._alias = alias
        self._confirm_s, self._pause_s, self._slow_s = confirm_s, pause_s, slow_s

    def run(self) -> None:
        """Check for alarms every `EVERY_S` seconds until stopped."""
        while not self._stopping.is_set():
            try:
                self.run_once()
            except BrokerUnavailable as error:
                of_this_node.record_failure("alarms", error)
            except Exception:  # the loop must survive: log and continue
                logger.exception("alarms cannot be sent")
                connections[self._alias].close()
            sharing.give_back()
            self._stopping.wait(EVERY_S)
        connections[self._alias].close()

    def run_once(self) -> bool:
        """Send a message in each way in which one is due; return whether any was sent."""
        found = {
            (alarm.kind, alarm.subject): alarm for alarm in alarms.read_now(using=self._alias, slow_s=self._slow_s)
        }
        ways: dict[str, Callable[[Sequence[Alarm], Sequence[str]], object]] = {}
        if recipients := conf.get("ALARM_EMAILS"):
            ways["e-mail"] = partial(_mail, list(recipients))
        if url := conf.get("ALARM_WEBHOOK"):
            ways["webhook"] = partial(_post, url)
        results = [self._send(way, send, found) for way, send in ways.items()]  # a list: none is skipped
        return any(results)

    def _send(
        self,
        way: str,
        send: Callable[[Sequence[Alarm], Sequence[str]], object],
        found: Mapping[alarm_records.Key, Alarm],
    ) -> bool:
        texts = {key: alarm.text for key, alarm in found.items()}
        message = alarm_records.claim_message(
            texts,
            way,
            using=self._alias,
            confirm_s=self._confirm_s,
            repeat_s=conf.get("ALARM_REPEAT"),
            pause_s=self._pause_s,
        )
        if message is None:
            return False
        due = sorted((found[key] for key in message.due), key=lambda alarm: not alarm.is_critical)
        is_sent = True
        try:
            send(due, list(message.ended.values()))
        except Exception as error:  # noqa: BLE001  (of a mail backend, or of a server that speaks no HTTP)
            is_sent = False
            logger.warning(
                "alarms could not be sent, they are sent again way=%s error=%s: %s", way, type(error).__name__, error
            )
        else:
            logger.info("alarms sent way=%s", way)
        alarm_records.settle_message(message, texts, using=self._alias, is_sent=is_sent)
        return is_sent


def build_subject(due: Sequence[Alarm], resolved: Sequence[str]) -> str:
    """Return the subject: the worst alarm, and how many more there are."""
    if not due:
        return f"Resolved: {_one_line(resolved[0])}" + (f" and {len(resolved) - 1} more" if len(resolved) > 1 else "")
    level = "CRITICAL" if due[0].is_critical else "WARNING"
    return f"{level}: {_one_line(due[0].text)}" + (f" and {len(due) - 1} more" if len(due) > 1 else "")


def build_body(due: Sequence[Alarm], resolved: Sequence[str]) -> str:
    """Return the message: each alarm with its advice, then the alarms that have ended."""
    lines: list[str] = []
    for alarm in due[:SHOWN]:
        since = f" (since {alarm.since:%Y-%m-%d %H:%M:%S %Z})" if alarm.since else ""
        lines += [
            f"{'CRITICAL' if alarm.is_critical else 'WARNING'}: {_one_line(alarm.text)}{since}",
            alarm.explanation,
            "",
        ]
    if len(due) > SHOWN:
        lines += [f"{len(due) - SHOWN} more alarms: see manage.py faktory doctor", ""]
    lines += [f"Resolved: {_one_line(text)}" for text in resolved[:SHOWN]]
    return "\n".join(lines).strip()


def _one_line(text: str) -> str:
    # Clients choose the names of queues and tasks: a line break in one would end the header of an e-mail.
    return "".join(char if char.isprintable() else "\ufffd" for char in text)[:200]


def _mail(recipients: list[str], due: Sequence[Alarm], resolved: Sequence[str]) -> None:
    send_mail(f"[Faktory] {build_subject(due, resolved)}", build_body(due, resolved), None, recipients)


def _post(url: str, due: Sequence[Alarm], resolved: Sequence[str]) -> None:
    document: dict[str, object] = {
        "text": f"{build_subject(due, resolved)}\n{build_body(due, resolved)}",
        "alarms": [AlarmRow.read(alarm) for alarm in due[:SHOWN]],
        "resolved": list(resolved[:SHOWN]),
    }
    request = urllib.request.Request(  # noqa: S310  (the setting allows http and https only)
        url, json.dumps(document).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_S) as response:  # noqa: S310
        response.read()


def make_alarm_notifier(alias: str) -> AlarmNotifier | None:
    """Return the loop, or None if neither ALARM_EMAILS nor ALARM_WEBHOOK is set."""
    return AlarmNotifier(alias) if conf.get("ALARM_EMAILS") or conf.get("ALARM_WEBHOOK") else None
