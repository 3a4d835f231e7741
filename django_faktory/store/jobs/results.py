"""Read the outcome and progress of jobs, for the GearMonkey gateway. Reads only, outside a transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from django.db.models import QuerySet

from ...core.json import jsontext
from ...core.lifecycle import State
from ...errors import InvalidPayload
from ...models import Job, Tracking
from ..transactions import run

CHUNK = 500

ENDS = (State.SUCCEEDED, State.DEAD, State.DISCARDED, State.EXPIRED)


class JobStatus(NamedTuple):
    """Outcome and progress of a job. `error` is "Type: message", or "" unless the job ended without success."""

    jid: str
    is_over: bool
    result: str | None
    error: str
    percent: int | None


def read_statuses(jids: Collection[str], *, using: str) -> list[JobStatus]:
    """Return the outcomes of the stored jobs among `jids`, in no defined order."""
    found = []
    for chunk in _chunks(jids):
        tracked = Tracking.objects.using(using).filter(jid__in=chunk).values_list("jid", "percent")
        percents = dict(_rows(tracked))
        rows = Job.objects.using(using).filter(jid__in=chunk)
        stored = rows.values_list("jid", "state", "result", "errtype", "failure")
        for jid, state, result, errtype, failure in _rows(stored):
            has_failed = state in ENDS and state != State.SUCCEEDED
            error = _error(State(state), errtype, failure) if has_failed else ""
            found.append(JobStatus(jid, state in ENDS, result, error, percents.get(jid)))
    return found


def _rows(found: QuerySet[Any, tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return run(found.db, lambda _: list(found), atomic=False)


def _error(state: State, errtype: str, failure: str) -> str:
    if state == State.EXPIRED:
        return "JobExpired: no worker took this job in time"
    try:
        message = jsontext.decode(failure).get("message", "") if failure else ""
    except InvalidPayload:  # an unreadable text must not hide the outcome of this job, or of the whole set
        message = ""
    # The class name without its module, as the history shows it; jobs that were killed by hand have no error type.
    kind = errtype.rpartition(".")[2] or str(state).capitalize()
    return f"{kind}: {message or 'the job was dropped'}"


def _chunks(jids: Collection[str]) -> Iterator[list[str]]:
    every = list(jids)
    for start in range(0, len(every), CHUNK):
        yield every[start : start + CHUNK]
