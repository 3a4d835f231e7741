"""Convert jobs, stored or running, to Django's TaskResult: `result_of` and `running_result`.

Reads rows it receives and imports no model, because backends are built while apps are loading. Statuses:
`docs/tasks.md`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import msgspec
from asgiref.sync import sync_to_async
from django.db import connections

from .. import brokers, conf, errors
from ..core.json import jsontext
from ..core.lifecycle import State
from ..core.payloads import DEFAULT_RETRY, INTERRUPTED, LOGGED, Tracked, parse_instant
from ..errors import FaktoryError, InvalidPayload, ResultTimeout
from . import encryption, redaction
from .compat import GenericResult, InvalidTask, Task, TaskError, TaskResult, TaskResultDoesNotExist, TaskResultStatus
from .coroutines import names_awaitable
from .options import is_timeout
from .steps import encode_payload

if TYPE_CHECKING:
    from ..core.payloads import Reservation
    from ..models import Job

FIRST_POLL_S, LONGEST_POLL_S = 0.02, 1.0
"""Bounds of the pause between two reads of `JobResult.wait`; each pause is 1.5 times the previous one."""

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
"""Django's status for each state of a job."""


class Custom(msgspec.Struct):
    """The members of a job's `custom` that a call needs."""

    kwargs: dict[str, Any] | None = None
    bid: Any = None
    timeout: Any = None
    callback_of: Any = msgspec.field(name="_bid", default=None)


class ParsedCall(msgspec.Struct):
    """The members of a job's JSON that a worker needs: the task, its arguments, and how to report failures."""

    jobtype: str
    args: list[Any]
    retry: int | None = DEFAULT_RETRY
    backtrace: int | None = 0
    at: str | None = None
    created_at: str | None = None
    custom: Custom | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments; empty for protocol clients that do not support them."""
        return (self.custom and self.custom.kwargs) or {}

    @property
    def is_encrypted(self) -> bool:
        """True if the arguments are encrypted."""
        return encryption.is_encrypted(self.args)

    def decrypt_arguments(self) -> ParsedCall:
        """Return the call with decrypted arguments. Raises CannotDecrypt, InvalidPayload."""
        if not self.is_encrypted:
            return self
        args, kwargs = encryption.decrypt_arguments(self.jobtype, self.args)
        custom = msgspec.structs.replace(self.custom or Custom(), kwargs=kwargs)
        return msgspec.structs.replace(self, args=args, custom=custom)

    @property
    def bid(self) -> str:
        """The batch that it is a member or callback of; "" for none."""
        bid = self.custom and (self.custom.bid or self.custom.callback_of)
        return bid if isinstance(bid, str) else ""

    @property
    def timeout(self) -> float | None:
        """The timeout that was set for this job alone; None also for an invalid value of another client."""
        seconds: Any = self.custom and self.custom.timeout
        return seconds if is_timeout(seconds) else None


class Attempt(msgspec.Struct):
    """One run in a job's history: failed, interrupted, or the log lines of one that reported success."""

    wid: str = ""
    errtype: str = ""
    message: str = ""
    # msgspec copies mutable defaults for each instance.
    backtrace: list[str] = []
    started_at: str = ""
    failed_at: str = ""
    kind: str = ""
    log: list[str] = []
    """The latest lines that its task logged."""
    release: str = ""
    """The project's release that its worker ran, if known."""
    progressed: bool = False
    """True if it committed a step."""

    @property
    def is_interruption(self) -> bool:
        """True if its worker was shut down: neither a failure nor counted as an attempt."""
        return self.kind == INTERRUPTED

    @property
    def has_failed(self) -> bool:
        """True if it counts as a failed attempt."""
        return self.kind not in (INTERRUPTED, LOGGED)


# The history has attempts only, so none of its errors explains the status FAILED of an expired job.
_EXPIRED = {str(State.EXPIRED): (Attempt(errtype="JobExpired", message=errors.JobExpired.REASON),)}


class _LatestFailure(msgspec.Struct):
    retry_count: int = 0


_call_decoder = msgspec.json.Decoder(ParsedCall)
_history_decoder = msgspec.json.Decoder(list[Attempt])
_failure_decoder = msgspec.json.Decoder(_LatestFailure)


def call_of(text: str) -> ParsedCall:
    """Parse a job's JSON. Raises InvalidPayload if it is not a job."""
    try:
        return _call_decoder.decode(text)
    except msgspec.MsgspecError:
        # JSON allows lone surrogates and numbers beyond a float, which msgspec rejects. For invalid JSON this raises a
        # message that names the error.
        decoded = jsontext.decode(text)
    try:
        return msgspec.convert(decoded, ParsedCall)
    except msgspec.ValidationError as error:
        raise InvalidPayload(f"invalid job: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class JobResult(GenericResult[P, R]):  # type: ignore[misc]  # frozen in Django, not in its stubs
    """A job as it was when it was enqueued or last read: Django's TaskResult, with more methods."""

    # The creator passes arguments in JSON types, in lists that no other object uses, because they are not copied.

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)

        def __post_init__(self):
            """Replace Django's method, which would convert the arguments to JSON types a second time."""

    def __repr__(self) -> str:
        """Return a repr without errors, with redacted arguments if the project redacts them."""
        jobtype = getattr(self.task, "jobtype", self.task.module_path)
        args, kwargs = redaction.redact_arguments(jobtype, self.args), redaction.redact_arguments(jobtype, self.kwargs)
        if encryption.is_enabled(getattr(self.task, "encrypt", False)):
            args = kwargs = redaction.HIDDEN
        return f"JobResult(id={self.id!r}, task={jobtype!r}, status={self.status!s}, args={args!r}, kwargs={kwargs!r})"

    @property
    def return_value(self) -> R:
        """What the task returned, in JSON types. Raises ValueError if the job has not ended, or has failed."""
        if self.status == TaskResultStatus.SUCCESSFUL:
            value: R = self._return_value  # type: ignore[attr-defined]  # not in the stubs
            return value
        if self.status == TaskResultStatus.FAILED:
            cause = f": {self.errors[-1].exception_class_path}" if self.errors else ""
            raise ValueError(f"Task failed{cause}; see .errors")
        raise ValueError("Task has not finished yet: call .wait(timeout=…) first, or .refresh() later")

    @names_awaitable("refresh", "await result.arefresh()")
    def refresh(self) -> None:
        """Read the job again. Raises TaskResultDoesNotExist if its row is gone."""
        TaskResult.refresh(self)

    @property
    @names_awaitable("progress", "await sync_to_async(lambda: result.progress)()")
    def progress(self) -> Tracked:
        """Progress that the job reported. Each access is a query."""
        [tracked] = brokers.get_broker().track_get([self.id])
        return tracked

    @names_awaitable("cancel", "await result.acancel()")
    def cancel(self) -> bool:
        """Drop the job if it waits, or ask its worker to stop it; return False if it has ended already.

        Raises FaktoryError if the jobs are on a Faktory server, which has no such command.
        """
        return brokers.get_broker().cancel([self.id]) > 0

    async def acancel(self) -> bool:
        """Cancel the job from async code; see `cancel`."""
        return await sync_to_async(self.cancel)()

    @names_awaitable("signal", "await result.asignal(…)")
    def signal(self, name: str, payload: Any = None) -> None:
        """Send a signal to the job, for its `context.wait_for(name)`, in the transaction of the caller.

        `payload`: a value that JSON can represent, at most 1 MB. A signal that no wait takes yet is kept. Raises
        JobNotFound, InvalidTransition if the job has ended, InvalidPayload, and FaktoryError if the jobs are on a
        Faktory server.
        """
        is_encrypted = encryption.is_enabled(getattr(self.task, "encrypt", False))
        brokers.get_broker().signal(self.id, name, encode_payload(payload, is_encrypted=is_encrypted))

    async def asignal(self, name: str, payload: Any = None) -> None:
        """Send a signal from async code; see `signal`."""
        await sync_to_async(self.signal)(name, payload)

    @names_awaitable("wait", "await result.wait_async(…)")
    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the job has ended, successfully or not; update this result and return it.

        `timeout` is in seconds; None waits without a limit, 0 reads once. Raises ResultTimeout if the job has not ended
        by then, TaskResultDoesNotExist if its row is gone, and FaktoryError inside a transaction. A job in the outbox
        has not ended.
        """
        for pause_s in self._poll(timeout):
            if pause_s:
                _refuse_open_transaction([conf.get("DATABASE")])
                time.sleep(pause_s)
            self._refresh_if_sent()
        return self

    async def wait_async(self, timeout: float | None = None) -> Self:  # noqa: ASYNC109  (as in `wait`)
        """Wait from async code; see `wait`."""
        for pause_s in self._poll(timeout):
            if pause_s:
                # In the thread that the ORM uses for async code: transactions belong to a thread.
                await sync_to_async(_refuse_open_transaction)([conf.get("DATABASE")])
                await asyncio.sleep(pause_s)
            await sync_to_async(self._refresh_if_sent)()
        return self

    def _refresh_if_sent(self) -> None:
        try:
            self.refresh()
        except TaskResultDoesNotExist:
            if not conf.outbox():
                raise
            # The outbox sends a job of these transactions after the commit, so it is not stored yet.
            _refuse_open_transaction(conf.outbox())
            if not brokers.is_in_outbox(self.id):
                self.refresh()  # it may have been sent after the first read

    def _poll(self, timeout_s: float | None) -> Iterator[float]:
        """Yield the pause before each read, until the job has ended. Raises ResultTimeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = 0.0  # before the first read: the caller may have had this object for a long time
        while not self.is_finished:
            yield pause_s
            pause_s = min(max(pause_s * 1.5, FIRST_POLL_S), LONGEST_POLL_S)
            if deadline is not None and not self.is_finished:
                pause_s = min(pause_s, deadline - time.monotonic())
                if pause_s <= 0:
                    raise ResultTimeout(f"the job has not ended within {timeout_s:g} s: {self.status} id={self.id}")


def result_of(job: Job, task: Task[..., Any], *, backend: str) -> TaskResult[..., Any]:
    """Return the result of a stored job.

    Raises InvalidPayload if its JSON is not a valid job, CannotDecrypt for an encrypted result without its key.
    """
    call = call_of(job.payload)
    runs = runs_of(job.history)
    failed_runs = _failed_runs(runs)
    status = STATUSES[State(job.state)]
    wids = [attempt.wid for attempt in _failed_runs(since_progress(runs))]
    if job.wid and job.state in (State.WORKING, State.SUCCEEDED):  # in other states the last attempt is in the history
        wids.append(job.wid)
    result: JobResult[..., Any] = JobResult(
        task=_restore_options(task, job, call, backend),
        id=job.jid,
        status=status,
        enqueued_at=_parse_instant_or_none(call.created_at) or job.created_at,
        started_at=_first_start(runs) or job.started_at,
        finished_at=job.finished_at if status in (TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL) else None,
        last_attempted_at=job.started_at or (_parse_instant_or_none(runs[-1].failed_at) if runs else None),
        args=call.args,
        kwargs=call.kwargs,
        backend=backend,
        errors=[task_error(attempt) for attempt in [*failed_runs, *_EXPIRED.get(job.state, ())]],
        worker_ids=wids,
    )
    if job.result is not None:
        value = jsontext.decode(job.result)
        # The dataclass is frozen, and Django sets the value in the same way.
        object.__setattr__(result, "_return_value", encryption.decrypt_value(value) if call.is_encrypted else value)
    return result


def running_result(
    reservation: Reservation, task: Task[..., Any], call: ParsedCall, *, failures: int
) -> TaskResult[..., Any]:
    """Return the result of a job that starts now; `failures` counts failures before this attempt."""
    runs = runs_of(reservation.history) if reservation.history else []
    failed_runs = _failed_runs(runs) if runs else []
    # A remote Faktory server reports how often a job failed, not on which worker; and histories have a maximum length.
    # Django derives the attempt from the number of worker ids, so unknown ones are filled in.
    known_wids = [attempt.wid for attempt in _failed_runs(since_progress(runs))] if runs else []
    unknown_wids = [""] * (failures - len(known_wids))
    return JobResult(
        task=task,
        id=reservation.jid,
        status=TaskResultStatus.RUNNING,
        enqueued_at=_parse_instant_or_none(call.created_at) or reservation.created_at,
        started_at=(_first_start(runs) if runs else None) or reservation.started_at,
        finished_at=None,
        last_attempted_at=reservation.started_at,
        args=call.args,
        kwargs=call.kwargs,
        backend=task.backend,
        errors=[task_error(attempt) for attempt in failed_runs],
        worker_ids=[*unknown_wids, *known_wids, reservation.wid],
    )


def runs_of(history: str) -> list[Attempt]:
    """Return the runs of a history, oldest first; none if it cannot be parsed."""
    try:
        return _history_decoder.decode(history) if history else []
    except msgspec.MsgspecError:
        return []


def since_progress(runs: Sequence[Attempt]) -> Sequence[Attempt]:
    """Return the runs from the latest one on that committed a step: attempts are counted from there (ADR 0051)."""
    return runs[max((place for place, run in enumerate(runs) if run.progressed), default=0) :]


def attempts_of(history: str) -> list[Attempt]:
    """Return the runs of a history that count as failed attempts; none if it cannot be parsed."""
    return _failed_runs(since_progress(runs_of(history)))


def log_of_success(job: Job, runs: Sequence[Attempt]) -> list[str]:
    """Return the log lines of the run that succeeded, given the runs of the job's history."""
    is_kept = job.state == State.SUCCEEDED and runs and runs[-1].kind == LOGGED
    return runs[-1].log if is_kept else []


def failures_of(failure: str) -> int:
    """Return how often a job has failed, from its latest failure: `retry_count` counts from 0."""
    try:
        return _failure_decoder.decode(failure).retry_count + 1 if failure else 0
    except msgspec.MsgspecError:
        return 0


def task_error(attempt: Attempt) -> TaskError:
    """Convert a failed attempt to Django's TaskError."""
    trace = "\n".join(attempt.backtrace)
    # A backtrace need not contain the message: clients in other languages send frames only.
    if attempt.message not in trace or not trace:
        trace = f"{attempt.errtype}: {attempt.message}\n{trace}".rstrip("\n")
    # Errors of the broker itself ("ReservationExpired") have no module on the wire.
    is_own = "." not in attempt.errtype and hasattr(errors, attempt.errtype)
    path = f"{errors.__name__}.{attempt.errtype}" if is_own else attempt.errtype
    return TaskError(exception_class_path=path, traceback=f"{trace}\n")


def _refuse_open_transaction(aliases: Iterable[str]) -> None:
    # No worker can see a job before its transaction commits, so the wait would never end.
    for alias in aliases:
        if connections[alias].in_atomic_block:
            raise FaktoryError(
                f"wait: expected no open transaction of {alias!r}, got one: no worker sees its jobs before it commits"
            )


def _restore_options(task: Task[..., Any], job: Job, call: ParsedCall, backend: str) -> Task[..., Any]:
    """Return the task with the options that `using` set for this job; unchanged if the backend rejects them."""
    changes: dict[str, Any] = {"priority": job.priority, "queue_name": job.queue, "backend": backend}
    changes |= {"run_after": _parse_instant_or_none(call.at), "about": job.about or ""}
    try:
        return replace(task, **changes)
    # The queue may have been removed from the settings since the job was enqueued.
    except InvalidTask:
        return task


def _failed_runs(runs: Sequence[Attempt]) -> list[Attempt]:
    return [run for run in runs if run.has_failed]


def _first_start(runs: list[Attempt]) -> datetime | None:
    """Return when the first of these runs started; None if its time is unknown."""
    return _parse_instant_or_none(runs[0].started_at) if runs else None


def _parse_instant_or_none(text: str | None) -> datetime | None:
    try:
        return parse_instant("at", text) if text else None
    except InvalidPayload:
        return None
