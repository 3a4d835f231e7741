"""Serializers of rows that need more than their columns, shared by the command line and the API.

Long texts of a job stay JSON (`Verbatim`): parsing 15 MiB of small values takes seconds and
hundreds of megabytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import Any

from django.utils import timezone

from .. import conf
from ..core.cron import Schedule
from ..core.json import jsontext
from ..core.payloads import rfc3339
from ..errors import InvalidCron, InvalidPayload
from ..models import Job, Limit, WorkerProcess
from ..models.cron import CronEntry, CronRun
from ..store import workers as store_workers
from ..store.limits import definitions
from ..tasks import redaction
from ..tasks.results import log_of_success, runs_of
from . import rows, waiting
from .rows import Row

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


def whole_job_of(job: Job) -> dict[str, Any]:
    """Serialize a job with the reason why it waits, its payload, attempts, interrupted runs and result."""
    runs = runs_of(job.history)
    reason = waiting.read_reason(job, using=job._state.db or conf.get("DATABASE"))  # noqa: SLF001  (documented)
    return rows.JobDetail.read(
        job,
        waiting_reason=reason and rows.WaitingReason.read(reason),
        # Results and errors are not arguments, so `REDACT` does not apply to them (docs/private-arguments.md).
        job=_verbatim(redaction.redact_job(job.jobtype, job.payload)),
        attempts=[
            rows.FailedAttempt.read(run, log=redaction.redact_log(job.jobtype, run.log))
            for run in runs
            if run.has_failed
        ],
        # Separate from the attempts: an interruption is not a failure and uses no retry.
        interrupted=[rows.InterruptedRun.read(run) for run in runs if run.is_interruption],
        result=None if job.result is None else _verbatim(job.result),
        log=redaction.redact_log(job.jobtype, log_of_success(job, runs)),
    )


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


def read_workers(workers: Iterable[WorkerProcess], *, using: str) -> list[dict[str, Any]]:
    """Serialize worker processes; one query counts the jobs of all of them."""
    workers = list(workers)
    job_counts = store_workers.count_jobs_of([worker.wid for worker in workers], using=using)
    return [rows.WorkerRow.read(worker, jobs=job_counts.get(worker.wid, 0)) for worker in workers]


def read_limits(limits: Sequence[Limit], *, using: str, row: type[Row] = rows.LimitDetail) -> list[dict[str, Any]]:
    """Serialize limits; one query reads the use of all of them."""
    usage = definitions.read_usage([limit.pk for limit in limits], using=using)

    def read(limit: Limit) -> dict[str, Any]:
        in_use, opens_at = usage.get(limit.pk, (0, None))
        given = {"in_use": in_use, "opens_at": rows.time_of(opens_at)}
        if row is rows.LimitDetail:
            given["waiting"] = definitions.count_blocked_jobs(limit, using=using)
        return row.read(limit, **given)

    return list(map(read, limits))


def cron_entry_of(entry: CronEntry, run: CronRun | None) -> dict[str, Any]:
    """Serialize a cron entry with its latest run."""
    return rows.CronSummary.read(entry, latest=run and rows.CronRunRow.read(run))


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
