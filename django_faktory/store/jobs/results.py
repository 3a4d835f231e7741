"""Read the outcome and progress of jobs, for the GearMonkey gateway. Reads only, outside a transaction."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from django.db.models import QuerySet

from ...core.json import jsontext
from ...core.lifecycle import FINISHED, State
from ...errors import InvalidPayload, JobExpired
from ...models import Job, Tracking
from ..chunks import chunks
from ..transactions import read

CHUNK = 500


class JobStatus(NamedTuple):
    """Outcome and progress of a job. `error` is "Type: message", or "" unless the job ended without success."""

    jid: str
    is_over: bool
    result: str | None
    error: str
    percent: int | None


def read_statuses(jids: Collection[str], *, using: str) -> list[JobStatus]:
    """Return the outcomes of the stored jobs among `jids`, in no defined order."""
    statuses = []
    for chunk in chunks(list(jids), CHUNK):
        tracked = Tracking.objects.using(using).filter(jid__in=chunk).values_list("jid", "percent")
        percents = dict(_fetch(tracked))
        # The last of a jid is its latest run, or the job that has not ended.
        rows = Job.objects.using(using).readable().filter(jid__in=chunk).order_by("pk")
        columns = {row[0]: row for row in _fetch(rows.values_list("jid", "state", "result", "errtype", "failure"))}
        for jid, state, result, errtype, failure in columns.values():
            is_over = state in FINISHED
            has_failed = is_over and state != State.SUCCEEDED
            error = _error(State(state), errtype, failure) if has_failed else ""
            statuses.append(JobStatus(jid, is_over, result, error, percents.get(jid)))
    return statuses


def _fetch(rows: QuerySet[Any, tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return read(rows)


def _error(state: State, errtype: str, failure: str) -> str:
    if state == State.EXPIRED:
        return f"JobExpired: {JobExpired.REASON}"
    try:
        message = jsontext.decode(failure).get("message", "") if failure else ""
    except InvalidPayload:  # an unreadable text must not hide the outcome of this job, or of the whole set
        message = ""
    # The class name without its module, as the history shows it; jobs that were killed manually have no error type.
    error_name = errtype.rpartition(".")[2] or str(state).capitalize()
    return f"{error_name}: {message or 'the job was dropped'}"
