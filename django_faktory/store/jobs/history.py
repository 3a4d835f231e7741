"""Append runs to the history of a job: failed, interrupted, and the log lines of runs that report success.

The history is a JSON array in the job's row, which each change writes again, so its length is limited.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ...core.json import jsontext
from ...core.payloads import INTERRUPTED, LOGGED, Ack, Failure, Interruption, rfc3339
from ...core.steps import Parking
from ...models import Job

HISTORY_LIMIT = 50
"""Maximum number of runs in a history; older ones are dropped."""
HISTORY_CHARACTERS = 256 * 1024
"""Maximum characters of a history, which one statement writes: servers limit its length, MariaDB's often to 1 MB."""
LOGS_LIMIT = 5
"""Number of the latest runs that keep their log lines."""
INTERRUPTIONS_LIMIT = 10
"""Maximum interrupted runs in a history, so that frequent deployments do not push out the errors (ADR 0025)."""


def append_interruption(job: Job, report: Interruption, now: datetime, *, has_progressed: bool) -> str:
    """Return the job's history with this interrupted run appended and the oldest interruptions dropped."""
    items = _read_items(job)
    interrupted = [item for item in items if _is_interruption(item)]
    superfluous = set(interrupted[: max(0, len(interrupted) - INTERRUPTIONS_LIMIT + 1)])
    entry = {
        "kind": INTERRUPTED,
        **_describe_run(job),
        "failed_at": rfc3339(now),
        "errtype": report.errtype,
        "message": report.summary,
        "backtrace": [],
    }
    if has_progressed:
        entry["progressed"] = True
    if isinstance(report, Parking) and report.log:
        entry["log"] = report.log
    return _append([item for item in items if item not in superfluous], entry)


def append_attempt(job: Job, failure: Failure, lines: Sequence[str], now: datetime) -> str:
    """Return the job's history with this failed attempt appended."""
    entry = {
        **_describe_run(job),
        "failed_at": rfc3339(now),
        "errtype": failure.errtype,
        "message": failure.message,
        "backtrace": lines,
    }
    if failure.has_progressed:
        entry["progressed"] = True
    if failure.log:
        entry["log"] = failure.log
    if failure.release:  # the last member: `error_groups.read_releases` reads the end of the history only
        entry["release"] = failure.release
    return _append(_read_items(job), entry)


def append_log(job: Job, ack: Ack) -> str:
    """Return the job's history with the lines of this run appended."""
    return _append(_read_items(job), {"kind": LOGGED, **_describe_run(job), "log": ack.log})


def _read_items(job: Job) -> list[str]:
    return jsontext.items(job.history) if job.history else []


def _describe_run(job: Job) -> dict[str, Any]:
    """Return the members that every entry has."""
    started_at = rfc3339(job.started_at) if job.started_at else ""
    return {"attempt": job.claims, "wid": job.wid, "started_at": started_at}


def _append(items: Sequence[str], entry: dict[str, Any]) -> str:
    kept = list(items[1 - HISTORY_LIMIT :])  # one less than the limit: `entry` is added
    if "log" in entry and len(kept) >= LOGS_LIMIT:
        kept[: 1 - LOGS_LIMIT] = map(_without_log, kept[: 1 - LOGS_LIMIT])
    text = jsontext.encode(entry)
    size = len(text) + sum(map(len, kept))
    while kept and size > HISTORY_CHARACTERS:
        size -= len(kept.pop(0))
    return f"[{','.join([*kept, text])}]"


def _is_interruption(item: str) -> bool:
    entry = jsontext.decode(item)
    return isinstance(entry, dict) and entry.get("kind") == INTERRUPTED


def _without_log(item: str) -> str:
    # A text search first: nearly all of the older runs have lost their lines before.
    entry = jsontext.decode(item) if '"log"' in item else None
    if not isinstance(entry, dict) or entry.pop("log", None) is None:
        return item
    return jsontext.encode(entry)
