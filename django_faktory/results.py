"""A job as Django's TaskResult: what a stored job, or one that runs now, says in the words of Django's Tasks.

Reads rows it is given, and imports no model: backends are built while apps still load. Statuses: `docs/tasks.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from . import brokers, errors, jsontext, redaction, sealing
from .compat import GenericResult, InvalidTask, TaskError, TaskResult, TaskResultStatus
from .errors import InvalidPayload
from .lifecycle import State
from .payloads import DEFAULT_RETRY, INTERRUPTED, Tracked, parse_instant

if TYPE_CHECKING:
    from .models import Job
    from .payloads import Reservation
    from .tasks import FaktoryTask

P = ParamSpec("P")
R = TypeVar("R")

STATUSES = {
    State.SCHEDULED: TaskResultStatus.READY,
    State.ENQUEUED: TaskResultStatus.READY,
    State.BLOCKED: TaskResultStatus.READY,
    State.RETRIES: TaskResultStatus.READY,
    State.WORKING: TaskResultStatus.RUNNING,
    State.SUCCEEDED: TaskResultStatus.SUCCESSFUL,
    State.DEAD: TaskResultStatus.FAILED,
    State.DISCARDED: TaskResultStatus.FAILED,
    State.EXPIRED: TaskResultStatus.FAILED,
}


class Custom(msgspec.Struct):
    """What a call needs of a job's `custom`."""

    kwargs: dict[str, Any] | None = None
    bid: Any = None
    callback_of: Any = msgspec.field(name="_bid", default=None)


class Call(msgspec.Struct):
    """What a worker needs of a job's JSON: which task, its arguments, and how its failures are told."""

    jobtype: str
    args: list[Any]
    retry: int | None = DEFAULT_RETRY
    backtrace: int | None = 0
    at: str | None = None
    created_at: str | None = None
    custom: Custom | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments; protocol clients that have none send none."""
        return (self.custom and self.custom.kwargs) or {}

    @property
    def is_sealed(self) -> bool:
        """Whether its arguments are encrypted."""
        return sealing.is_sealed(self.args)

    def opened(self) -> Call:
        """The same with its arguments as they were given. Raises CannotDecrypt, InvalidPayload."""
        if not self.is_sealed:
            return self
        args, kwargs = sealing.opened(self.jobtype, self.args)
        custom = msgspec.structs.replace(self.custom or Custom(), kwargs=kwargs)
        return msgspec.structs.replace(self, args=args, custom=custom)

    @property
    def bid(self) -> str:
        """The batch it is a member of, or whose callback it is; "" for a job of none."""
        found = self.custom and (self.custom.bid or self.custom.callback_of)
        return found if isinstance(found, str) else ""


class Attempt(msgspec.Struct):
    """One failed attempt in a job's history, or an interrupted one."""

    wid: str = ""
    errtype: str = ""
    message: str = ""
    backtrace: list[str] = []
    started_at: str = ""
    failed_at: str = ""
    kind: str = ""

    @property
    def is_interruption(self) -> bool:
        """Whether its worker was shut down: no failure, and not counted as an attempt."""
        return self.kind == INTERRUPTED


_EXPIRED = {str(State.EXPIRED): (Attempt(errtype="JobExpired", message="no worker took this job in time"),)}


class _LatestFailure(msgspec.Struct):
    retry_count: int = 0


_calls = msgspec.json.Decoder(Call)
_histories = msgspec.json.Decoder(list[Attempt])
_failures = msgspec.json.Decoder(_LatestFailure)


def call_of(text: str) -> Call:
    """Read a job's JSON. Raises InvalidPayload where it is no job."""
    try:
        return _calls.decode(text)
    except msgspec.MsgspecError:
        # JSON has lone surrogates and numbers beyond a float, msgspec refuses them. For others this says what is wrong.
        decoded = jsontext.decode(text)
    try:
        return msgspec.convert(decoded, Call)
    except msgspec.ValidationError as error:
        raise InvalidPayload(f"invalid job: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class JobResult(GenericResult[P, R]):  # type: ignore[misc]  # frozen in Django, not in its stubs
    """Django's TaskResult, of a job. Who makes one gives it arguments in JSON's types only, and nobody else's lists."""

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)

        def __post_init__(self):
            """Instead of Django's, which copies the arguments into JSON's types a second time."""

    def __repr__(self) -> str:
        """Without its errors and, where the project hides arguments, with what may be seen of them only."""
        jobtype = getattr(self.task, "jobtype", self.task.module_path)
        args, kwargs = redaction.shown(jobtype, self.args), redaction.shown(jobtype, self.kwargs)
        if sealing.is_wanted(getattr(self.task, "encrypt", False)):
            args = kwargs = redaction.HIDDEN
        return f"JobResult(id={self.id!r}, task={jobtype!r}, status={self.status!s}, args={args!r}, kwargs={kwargs!r})"

    @property
    def progress(self) -> Tracked:
        """How far the job is, by its own account: `percent`, `desc`, `state`, `updated_at`. Asks at each look."""
        [tracked] = brokers.get_broker().track_get([self.id])
        return tracked


def result_of(job: Job, task: FaktoryTask[..., Any], *, backend: str) -> TaskResult[..., Any]:
    """What a stored job says. Raises InvalidPayload where its JSON is no job any more."""
    call = call_of(job.payload)
    runs = runs_of(job.history)
    history = _failed(runs)
    status = STATUSES[State(job.state)]
    wids = [attempt.wid for attempt in history]
    if job.wid and job.state in (State.WORKING, State.SUCCEEDED):  # the others' last attempt is in the history
        wids.append(job.wid)
    result: JobResult[..., Any] = JobResult(
        task=_as_enqueued(task, job, call, backend),
        id=job.jid,
        status=status,
        enqueued_at=_instant(call.created_at) or job.created_at,
        started_at=_first_start(runs) or job.started_at,
        finished_at=job.finished_at if status in (TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL) else None,
        last_attempted_at=job.started_at or (_instant(runs[-1].failed_at) if runs else None),
        args=call.args,
        kwargs=call.kwargs,
        backend=backend,
        errors=[task_error(attempt) for attempt in [*history, *_EXPIRED.get(job.state, ())]],
        worker_ids=wids,
    )
    if job.result is not None:
        value = jsontext.decode(job.result)
        object.__setattr__(result, "_return_value", sealing.opened_value(value) if call.is_sealed else value)
    return result


def running(
    reservation: Reservation, task: FaktoryTask[..., Any], call: Call, *, failures: int
) -> TaskResult[..., Any]:
    """What a job that begins now says of itself; `failures` counts those before this attempt."""
    runs = runs_of(reservation.history) if reservation.history else []
    history = _failed(runs) if runs else []
    # A Faktory server elsewhere tells how often a job failed, not where; and histories have an end.
    unknown = [""] * (failures - len(history))
    return JobResult(
        task=task,
        id=reservation.jid,
        status=TaskResultStatus.RUNNING,
        enqueued_at=_instant(call.created_at) or reservation.created_at,
        started_at=(_first_start(runs) if runs else None) or reservation.started_at,
        finished_at=None,
        last_attempted_at=reservation.started_at,
        args=call.args,
        kwargs=call.kwargs,
        backend=task.backend,
        errors=[task_error(attempt) for attempt in history],
        worker_ids=[*unknown, *(attempt.wid for attempt in history), reservation.wid],
    )


def runs_of(history: str) -> list[Attempt]:
    """Return the failed and the interrupted runs in a history's text, oldest first; none if it cannot be read."""
    try:
        return _histories.decode(history) if history else []
    except msgspec.MsgspecError:
        return []


def attempts_of(history: str) -> list[Attempt]:
    """Return the failed attempts in a history's text, without interrupted runs; none if it cannot be read."""
    return _failed(runs_of(history))


def failures_of(failure: str) -> int:
    """How often a job has failed, by the text of its latest failure: `retry_count` counts from 0."""
    try:
        return _failures.decode(failure).retry_count + 1 if failure else 0
    except msgspec.MsgspecError:
        return 0


def task_error(attempt: Attempt) -> TaskError:
    """A failed attempt in Django's words."""
    told = "\n".join(attempt.backtrace)
    if attempt.message not in told or not told:
        told = f"{attempt.errtype}: {attempt.message}\n{told}".rstrip("\n")
    # What the broker itself reports ("ReservationExpired") has no module on the wire.
    is_ours = "." not in attempt.errtype and hasattr(errors, attempt.errtype)
    path = f"{errors.__name__}.{attempt.errtype}" if is_ours else attempt.errtype
    return TaskError(exception_class_path=path, traceback=f"{told}\n")


def _as_enqueued(task: FaktoryTask[..., Any], job: Job, call: Call, backend: str) -> FaktoryTask[..., Any]:
    """The task with what `using` changed for this job; without, where the backend allows that no longer."""
    changes: dict[str, Any] = {"priority": job.priority, "queue_name": job.queue, "backend": backend}
    changes |= {"run_after": _instant(call.at), "about": job.about or ""}
    try:
        return replace(task, **changes)
    except InvalidTask:
        return task


def _failed(runs: list[Attempt]) -> list[Attempt]:
    return [run for run in runs if not run.is_interruption]


def _first_start(history: list[Attempt]) -> datetime | None:
    """When the first run began, by a history's text; None where it does not say."""
    return _instant(history[0].started_at) if history else None


def _instant(text: str | None) -> datetime | None:
    try:
        return parse_instant("at", text) if text else None
    except InvalidPayload:
        return None
