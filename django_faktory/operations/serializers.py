"""Serializers of rows to JSON types, shared by the command line and the API: stable formats.

Times are RFC 3339, in UTC. Long texts of a job stay JSON (`Verbatim`): parsing 15 MiB of small values takes seconds and
hundreds of megabytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from itertools import islice
from math import isfinite
from typing import Any

from django.utils import timezone

from .. import conf
from ..core.cron import Schedule
from ..core.json import jsontext
from ..core.limits import rate_text
from ..core.payloads import BatchStatus, rfc3339
from ..errors import InvalidCron, InvalidPayload
from ..models import Batch, Job, JobLock, Limit, WorkerProcess
from ..models.cron import CronEntry, CronRun
from ..models.pausable import Pausable
from ..tasks import redaction
from ..tasks.results import log_of_success, runs_of
from . import waiting
from .alarms import Alarm

SHORT = (
    "id", "jid", "jobtype", "queue", "state", "sort_priority", "retry", "failures", "losses", "interruptions",
    "errtype", "about", "bid", "wid", "created_at", "run_at", "enqueued_at", "started_at", "finished_at",
    "failed_at",
)  # fmt: skip
"""Columns that `job_of` reads, so that lists do not load long texts."""


_not_ascii = re.compile(r"[^\x00-\x7f]+")


class Verbatim(str):
    """Valid JSON text, which a document contains as it is stored."""

    __slots__ = ()

    def decode_json(self) -> Any:
        """Return the value; a number too large for a float becomes text."""
        return _decode(self)


def encode_document(document: Mapping[str, Any]) -> str:
    """Encode a document, its `Verbatim` members unchanged, as JSON on one line of ASCII."""
    members = (
        f"{json.dumps(name)}: {_to_ascii(value) if isinstance(value, Verbatim) else json.dumps(value)}"
        for name, value in document.items()
    )
    return f"{{{', '.join(members)}}}"


def _to_ascii(text: str) -> str:
    # Strings contain these characters as escapes only, so they are space between tokens.
    for space in "\t\n\r":
        text = text.replace(space, " ")
    # Other characters occur in strings only.
    return text if text.isascii() else _not_ascii.sub(lambda match: json.dumps(match[0])[1:-1], text)


def job_of(job: Job) -> dict[str, Any]:
    """Serialize a job for a list."""
    return {
        "jid": job.jid,
        "jobtype": job.jobtype,
        "queue": job.queue,
        "state": str(job.state),
        "priority": job.priority,
        "attempt": job.attempts,
        "max_attempts": job.max_attempts,
        "failures": job.failures,
        "interruptions": job.interruptions,
        # The columns are empty texts where the API has null.
        "errtype": job.errtype or None,
        "about": job.about,
        "batch": job.bid,
        "worker": job.wid or None,
        "created_at": time_of(job.created_at),
        "run_at": time_of(job.run_at),
        "enqueued_at": time_of(job.enqueued_at),
        "started_at": time_of(job.started_at),
        "finished_at": time_of(job.finished_at),
        "failed_at": time_of(job.failed_at),
    }


def whole_job_of(job: Job) -> dict[str, Any]:
    """Serialize a job with the reason why it waits, its payload, attempts, interrupted runs and result."""
    runs = runs_of(job.history)
    attempts = [
        {
            "worker": attempt.wid,
            "errtype": attempt.errtype,
            "message": attempt.message,
            "started_at": attempt.started_at or None,
            "failed_at": attempt.failed_at or None,
            "backtrace": attempt.backtrace,
            "log": redaction.redact_log(job.jobtype, attempt.log),
            "release": attempt.release,
        }
        for attempt in runs
        if attempt.has_failed
    ]
    # Separate from the attempts: an interruption is not a failure and uses no retry.
    interrupted = [
        {
            "worker": run.wid,
            "message": run.message,
            "started_at": run.started_at or None,
            "interrupted_at": run.failed_at or None,
        }
        for run in runs
        if run.is_interruption
    ]
    # Results and errors are not arguments, so `REDACT` does not apply to them (docs/security.md).
    payload = redaction.redact_job(job.jobtype, job.payload)
    reason = waiting.read_reason(job, using=job._state.db or conf.get("DATABASE"))  # noqa: SLF001  (documented)
    return {
        **job_of(job),
        "waiting_reason": reason and {"kind": reason.kind, "text": reason.text, "at": time_of(reason.at)},
        "job": _verbatim(payload),
        "attempts": attempts,
        "interrupted": interrupted,
        "result": None if job.result is None else _verbatim(job.result),
        "log": redaction.redact_log(job.jobtype, log_of_success(job, runs)),
    }


def _verbatim(text: str) -> str:
    try:
        jsontext.check_value(text)
    except InvalidPayload:  # a row that was edited manually: a plain text
        return text
    return Verbatim(text)


def _decode(text: str) -> Any:
    try:
        return _replace_infinity(jsontext.decode(text))
    except InvalidPayload:  # a row that was edited manually: shown unchanged
        return text


def _replace_infinity(value: Any) -> Any:
    """Convert numbers too large for a float to text, because JSON writers reject infinity."""
    match value:
        case float() if not isfinite(value):
            return str(value)
        case list():
            return [_replace_infinity(item) for item in value]
        case dict():
            return {key: _replace_infinity(item) for key, item in value.items()}
    return value


def worker_of(worker: WorkerProcess, *, jobs: int) -> dict[str, Any]:
    """Serialize a worker process, with the number of its jobs."""
    return {
        "wid": worker.wid,
        "hostname": worker.hostname,
        "pid": worker.pid,
        "labels": worker.labels,
        "queues": worker.queues,
        "threads": worker.threads,
        "state": str(worker.state),
        "rss_kb": worker.rss_kb,
        # A parameter, because lists count the jobs of all their workers in one query.
        "jobs": jobs,
        "started_at": time_of(worker.started_at),
        "beat_at": time_of(worker.beat_at),
    }


def batch_of(batch: Batch | BatchStatus) -> dict[str, Any]:
    """Serialize a batch. `complete` and `success` are the progress of its callbacks."""
    # The keys are the values of BATCH STATUS, see `batch_rules.CallbackProgress`.
    callback_words = {"": "not yet", "1": "enqueued", "2": "done"}
    return {
        "bid": batch.bid,
        "description": batch.description,
        "parent": batch.parent_bid or None,
        "total": batch.total,
        "pending": batch.pending,
        "failed": batch.failed,
        "complete": callback_words.get(batch.complete_st, batch.complete_st),
        "success": callback_words.get(batch.success_st, batch.success_st),
        "is_broken": batch.is_broken,
        "created_at": time_of(batch.created_at),
    }


def cron_entry_of(entry: CronEntry, run: CronRun | None) -> dict[str, Any]:
    """Serialize a cron entry with its latest run."""
    return {
        "name": entry.name,
        "schedule": entry.schedule,
        "zone": entry.zone,
        "jobtype": entry.jobtype,
        "queue": entry.queue or None,
        "origin": str(entry.origin),
        "state": entry.state,
        "problem": entry.problem or None,
        "next_at": time_of(entry.next_at),
        "latest": run and cron_run_of(run),
    }


def next_times_of(entry: CronEntry, count: int) -> list[str]:
    """Return the next times of an entry, as if it were not paused; none if its schedule is invalid or has none."""
    try:
        ticks = Schedule.of(entry.schedule, entry.zone).ticks(timezone.now())
    # `problem` of the entry says why.
    except InvalidCron:
        return []
    return [rfc3339(tick) for tick in islice(ticks, count)]


def cron_call_of(entry: CronEntry) -> dict[str, Any]:
    """Serialize the arguments and options of a cron entry's jobs, redacted."""
    members = {field: _decode(getattr(entry, field)) for field in ("args", "kwargs", "job")}
    # Arguments occur twice, as columns and in the job's options, so both are redacted.
    members |= {field: redaction.redact_arguments(entry.jobtype, members[field]) for field in ("args", "kwargs")}
    job = members["job"]
    if isinstance(job, dict) and isinstance(custom := job.get("custom"), dict) and "kwargs" in custom:
        kwargs = redaction.redact_arguments(entry.jobtype, custom["kwargs"])
        members["job"] = {**job, "custom": {**custom, "kwargs": kwargs}}
    return members


def cron_run_of(run: CronRun) -> dict[str, Any]:
    """Serialize a cron run; a manual run has no tick."""
    return {
        "tick": time_of(run.tick),
        "at": time_of(run.at),
        "outcome": str(run.outcome),
        "jid": run.jid or None,
        "note": run.note or None,
    }


# The defaults are those of a limit without a limiter: no job with its key has run.
def limit_of(limit: Limit, in_use: int = 0, opens_at: datetime | None = None) -> dict[str, Any]:
    """Serialize a limit and its usage."""
    return {
        "id": limit.pk,
        "scope": limit.scope,
        "name": limit.name,
        "concurrency": limit.concurrency,
        "rate": None if limit.rate is None else rate_text(limit.rate, limit.per),
        "burst": limit.burst,
        **pause_of(limit),
        "origin": limit.origin,
        "in_use": in_use,
        "opens_at": time_of(opens_at),
    }


def pause_of(row: Pausable) -> dict[str, Any]:
    """Serialize the pause of a queue or a task."""
    return {
        "is_paused": row.paused_at is not None,
        "paused_at": time_of(row.paused_at),
        "paused_by": row.paused_by if row.paused_at else None,
        "pause_reason": row.pause_reason if row.paused_at else None,
    }


def lock_of(lock: JobLock) -> dict[str, Any]:
    """Serialize a lock: a key and the running job that has it."""
    return {
        "token": lock.pk,
        "key": lock.key,
        "jid": lock.jid,
        "attempt": lock.attempt,
        "worker": lock.wid or None,
        "acquired_at": time_of(lock.acquired_at),
        "expires_at": time_of(lock.expires_at),
    }


def alarm_of(alarm: Alarm) -> dict[str, Any]:
    """Serialize an alarm with its text and its advice."""
    return {
        "kind": alarm.kind,
        "subject": alarm.subject,
        "is_critical": alarm.is_critical,
        "text": alarm.text,
        "advice": alarm.advice,
        "since": time_of(alarm.since),
        "affected": alarm.affected,
        "note": alarm.note,
    }


def time_of(moment: datetime | None) -> str | None:
    """Serialize a time as RFC 3339 in UTC."""
    if moment is None:
        return None
    # Without USE_TZ, Django's times are naive and local.
    return rfc3339(timezone.make_aware(moment) if timezone.is_naive(moment) else moment)
