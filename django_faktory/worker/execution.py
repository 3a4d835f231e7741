"""Run one reserved job: parse it, look up its task, call it, and build the report of its end.

`prepare` returns an `Execution`; `Execution.run` and `Execution.arun` run it. Every exception of a task becomes a
report (Failure or Interruption); none leaves this module, except cancellations of a coroutine from outside. Independent
of SQL and FWP. The store applies the retry rules of `lifecycle`; `reporter` sends the report to the broker.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import os
import threading
import traceback
from contextlib import suppress
from math import isnan
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

from asgiref.sync import sync_to_async
from django.core.cache import caches
from django.db import Error
from django.db.transaction import TransactionManagementError
from django.utils import timezone

from .. import conf
from ..brokers.base import Transaction, WorkerBroker
from ..core import payloads
from ..core.lifecycle import State, outcome_of_failure
from ..core.logs import get_logger
from ..core.payloads import Ack, Failure, Interruption, Reservation
from ..core.steps import parking
from ..errors import (
    LONGEST_WAIT_S,
    Cancelled,
    CannotDecrypt,
    ConnectionLost,
    Discard,
    FaktoryError,
    InvalidArgument,
    InvalidPayload,
    InvalidResult,
    Kill,
    Later,
    MissingObject,
    ReservationLost,
    Retry,
    TaskTimeout,
    UnknownJobType,
    WorkerShutdown,
    WorkerTrouble,
)
from ..store import sharing
from ..store.database_errors import first_line, lacks_connections
from ..tasks import encryption
from ..tasks.base import FaktoryTask, lookup
from ..tasks.batch import enter_job
from ..tasks.compat import TaskResult, TaskResultStatus, task_backends, task_finished, task_started
from ..tasks.json_values import encode_json, normalize_result
from ..tasks.results import Attempt, ParsedCall, call_of, failures_of, running_result, task_error
from ..tasks.steps import Steps
from . import invocation
from .db_cleanup import drop_connections, in_transaction, reset_connections, reset_connections_async
from .interrupt import InterruptibleControl
from .job_buffer import Report
from .job_log import lines_of, running_control
from .suspects import has_often_met
from .unknown_jobs import defer_to_newer_worker

logger = get_logger(__name__)

_IMPOSED = (Cancelled, InvalidArgument, InvalidResult, MissingObject, TaskTimeout)
"""Errors that the worker raises in a task: reported without a module name, as the broker reports its own."""

_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"

_rng = Random()
_thread = threading.local()
_is_async = functools.cache(inspect.iscoroutinefunction)


def prepare(reservation: Reservation) -> Execution | Failure:
    """Parse the job and find its task; return a Failure if either fails."""
    try:
        call = call_of(reservation.text)
        return Execution(reservation, call, lookup(call.jobtype))
    except InvalidPayload as error:  # the stored text stays invalid at every retry
        return _build_refusal(reservation, error, verdict="kill")
    except CannotDecrypt as error:  # a worker with the key may run it at a retry; a job without retries is kept as dead
        return _build_refusal(reservation, error, verdict="kill" if call.retry == 0 else "")
    except UnknownJobType as error:
        return defer_to_newer_worker(reservation, call.at, error) or _build_refusal(reservation, error)


class Execution:
    """One attempt at one job: its parsed call, its task, and its result object."""

    __slots__ = (
        "_call",
        "_failures",
        "_has_invalid_result",
        "_is_encrypted",
        "_is_last_attempt",
        "_sender",
        "_value",
        "control",
        "reservation",
        "result",
        "task",
    )  # fmt: skip

    def __init__(self, reservation: Reservation, call: ParsedCall, task: FaktoryTask[..., Any]) -> None:
        self._is_encrypted = call.is_encrypted
        if self._is_encrypted:
            # Raises CannotDecrypt, which `prepare` turns into a Failure.
            call = call.decrypt_arguments()
        self.reservation = reservation
        self.task = task
        self._call = call
        self._failures = failures_of(reservation.failure)
        self._sender = type(task_backends[task.backend])
        self._has_invalid_result = False
        self._value: Any = None
        self._is_last_attempt = True
        self.control = InterruptibleControl()
        self.control.wid, self.control.bid = reservation.wid, call.bid
        # Few jobs have a timeout of their own, and a call of the property for each job would cost more than this test.
        has_timeout = call.custom is not None and call.custom.timeout is not None
        self.control.timeout_s = (call.timeout if has_timeout else None) or task.timeout
        self.result = running_result(reservation, task, call, failures=self._failures)

    @property
    def is_async(self) -> bool:
        """True if the task is an `async def`, which `arun` runs on an event loop."""
        return _is_async(self.task.func)

    @property
    def has_succeeded(self) -> bool:
        """True once the task has succeeded; its report may not have been sent yet."""
        return self.result.status is TaskResultStatus.SUCCESSFUL

    @property
    def runs_again(self) -> bool:
        """True once this attempt has failed or was interrupted, and the job has another one."""
        return not self._is_last_attempt

    def run(self, broker: WorkerBroker, *, outer_aliases: frozenset[str] | None = None) -> Report | None:
        """Run the job in this thread, in a copy of the context variables.

        Returns the report to send, or None if an atomic task has already reported its end or the reservation was lost.
        `outer_aliases` names the connections that are in a transaction already, if the caller knows them.
        """
        _warm_up()
        if outer_aliases is None:
            outer_aliases = in_transaction()
        # A copy: a context variable that a task sets must not reach the next job of this thread.
        return contextvars.copy_context().run(self._run, broker, outer_aliases)

    def _run(self, broker: WorkerBroker, outer_aliases: frozenset[str]) -> Report | None:
        report: Report | None = None
        self._prepare(broker)
        try:
            task_started.send_robust(self._sender, task_result=self.result)
            try:
                if self.task.atomic:
                    report = self._run_atomically(broker)
                else:
                    value = self._call_task()
                    _refuse_open_transactions(reset_connections(outer_aliases))
                    report = self._build_ack(value)
                self._set_succeeded()
            # Another worker may be running the job, so neither report nor signal describes its end.
            except ReservationLost as error:
                self._log_lost(error)
                return None
            except BaseException as error:  # noqa: BLE001  (SystemExit ends a task, not the worker)
                report = self._report_error(error)
                # Signals report final ends only: an attempt that is retried or interrupted sends none.
                if self._is_last_attempt:  # inside the except block: receivers read sys.exc_info()
                    task_finished.send_robust(self._sender, task_result=self.result)
            else:
                task_finished.send_robust(self._sender, task_result=self.result)
            return report
        except SystemExit as error:  # a receiver's: it would end the thread, and the job would never be reported
            logger.exception("a receiver of a signal exited jid=%s", self.reservation.jid)
            return report or self._report_error(error)
        finally:
            # An interrupted driver call may leave a connection unusable although it looks healthy.
            if self.control.was_interrupted:
                drop_connections(outer_aliases)
            reset_connections(outer_aliases)

    def _run_atomically(self, broker: WorkerBroker) -> Ack | None:
        """Commit the writes of the task and the end of its job in one transaction (ADR 0007).

        Returns the report of a task that wrote nothing: it needs no commit of its own and is sent in a set with other
        reports.
        """
        aliases_before = in_transaction()
        job_transaction: Transaction | None = None
        report: Ack | None = None
        try:
            with broker.atomic() as job_transaction:
                aliases_inside = in_transaction()
                report = self._build_ack(self._call_task())
                _refuse_open_transactions(reset_connections(aliases_inside))
                # The latest progress first: after the ACK the broker would refuse it as late.
                if not job_transaction.is_untouched():
                    if progress := self.control.take_progress():
                        broker.track_set([progress])
                    _commit_end(report, self.reservation, broker)
                    report = None
        except Exception:
            # Once committed, the error came from an on_commit hook and the job is done.
            if job_transaction is None or not job_transaction.is_committed:
                raise
            logger.exception("job is done, but a hook that ran after its commit failed jid=%s", self.reservation.jid)
        # The task left an atomic block open: the exit above ended that block instead of the one opened here.
        if job_transaction and not (job_transaction.is_committed or job_transaction.is_nested):
            _refuse_open_transactions(reset_connections(aliases_before))
        return report

    def _prepare(self, broker: WorkerBroker) -> None:
        if self.control.bid:  # nearly all jobs have none, and would pay for the context variable
            enter_job(self.control.bid, self.control.wid)
        if self.task.takes_context:
            self.control.steps = Steps(
                broker,
                self.reservation,
                self.control,
                is_encrypted=self._is_encrypted,
                is_atomic=self.task.atomic,
            )

    async def arun(self, broker: WorkerBroker) -> Report | None:
        """Run the job on this event loop and return its report, or None if the reservation was lost.

        Run it as an asyncio task of its own, which bounds its context variables. If cancelled from outside, it raises
        the cancellation; the caller then decides what happens to the job.
        """
        report: Report
        self._prepare(broker)
        await task_started.asend_robust(self._sender, task_result=self.result)
        if not self._is_encrypted:
            running_control.set(self.control)
        try:
            value = await invocation.acall(self.task, self.result, self.reservation.text, self.control)
            _refuse_open_transactions(await reset_connections_async())
            report = self._build_ack(value)
            self._set_succeeded()
        except ReservationLost as error:
            self._log_lost(error)
            return None
        except BaseException as error:
            if _is_cancellation(error):
                raise
            report = self._report_error(error)
            # Async tasks use the ORM in asgiref's thread. Its connections are reset after errors only: a switch of
            # threads costs more than a short task takes.
            await sync_to_async(_reset_async_connections)()
            if self._is_last_attempt:
                await task_finished.asend_robust(self._sender, task_result=self.result)
        else:
            await task_finished.asend_robust(self._sender, task_result=self.result)
        return report

    def _log_lost(self, error: ReservationLost) -> None:
        logger.warning("%s jid=%s jobtype=%s", error, self.reservation.jid, self.task.jobtype)

    def build_stuck_report(self, reason: FaktoryError) -> Report:
        """Return the report for a task that was stopped and does not end. Sends no signal."""
        return self._report_error(reason)

    def _call_task(self) -> Any:
        if not self._is_encrypted:  # a line may quote the arguments, which must not be stored in plain text
            running_control.set(self.control)
        return invocation.call(self.task, self.result, self.reservation.text, self.control)

    def _build_ack(self, value: Any) -> Ack:
        # Until the result is encoded, an error comes from its value and not from the task's code.
        self._has_invalid_result = True
        job, self._value = self.reservation, normalize_result(value)
        # Without a result the row is deleted, and its lines with it.
        log = lines_of(self.control) if job.result_ttl else ()
        report = Ack(jid=job.jid, wid=job.wid, attempt=job.attempt, result=self._encode_result(), log=log)
        self._has_invalid_result = False
        return report

    def _encode_result(self) -> str:
        """Return the result as it is stored: encrypted if the arguments are."""
        text = encode_json(self._value)
        return encode_json(encryption.encrypt_value(self._value)) if self._is_encrypted else text

    def _set_succeeded(self) -> None:
        self._set_ended(TaskResultStatus.SUCCESSFUL)
        object.__setattr__(self.result, "_return_value", self._value)

    def _report_error(self, error: BaseException) -> Failure | Interruption:
        if isinstance(error, Error) and lacks_connections(error):  # of any database: the task is not at fault
            sharing.record(error)
            error = ConnectionLost(first_line(error)).with_traceback(error.__traceback__)
        if isinstance(error, WorkerTrouble) and not self._may_cause(error):
            report = payloads.trouble(self.reservation, error)
        elif isinstance(self.control.reason, WorkerShutdown):
            report = payloads.interruption(self.reservation, str(self.control.reason))
        elif isinstance(error, Later):
            report = parking(self.reservation, error, lines_of(self.control))
        else:
            return self._build_failure(error)
        # The result object stays unfinished: an interrupted job runs again (ADR 0025).
        self._is_last_attempt = False
        return report

    def _may_cause(self, error: WorkerTrouble) -> bool:
        return isinstance(error, ConnectionLost) and has_often_met(self.reservation, ConnectionLost)

    def _build_failure(self, error: BaseException) -> Failure:
        job = self.reservation
        log = lines_of(self.control)  # before this worker logs the failure
        errtype = _get_error_name(error)
        message, lines = _describe_error(error), _format_backtrace(error, self._call.backtrace or 0)
        if self.control.has_progressed:  # earlier runs no longer count, and `attempts` is the number of worker ids
            self._failures = 0
            del self.result.worker_ids[:-1]
        # Before `_choose_verdict` and `_choose_delay_s`: a backoff function sees this error among the result's errors.
        self.result.errors.append(task_error(Attempt(job.wid, errtype, message, lines)))
        verdict = self._choose_verdict(error)
        self._is_last_attempt = self._ends_job(verdict)
        if self._is_last_attempt:
            self._set_ended(TaskResultStatus.FAILED)
            _log_final_failure(self.task, self.result, error, verdict)
        else:
            _log_retry(self.task, self.result, error)
        return payloads.failure_of(
            job,
            errtype=errtype,
            message=message,
            backtrace=lines,
            retry_in_s=None if self._is_last_attempt else self._choose_delay_s(error),
            verdict=verdict,
            log=log,
            release=conf.get("RELEASE"),
            has_progressed=self.control.has_progressed,
        )

    def _choose_verdict(self, error: BaseException) -> str:
        """Return the verdict on this error: "kill" and "discard" end the job, "" leaves it to its retries."""
        # An exception that the task raises on purpose takes precedence over its options.
        if self._has_invalid_result or isinstance(error, Kill):
            return "kill"  # JSON cannot encode the result, and a second run would return the same type
        if isinstance(error, Discard) or self.control.is_cancelled:
            return "discard"
        if isinstance(error, Retry):
            return ""
        if isinstance(error, self.task.discard_on):
            return "discard"
        retry_on = self.task.retry_on
        return "" if retry_on is None or isinstance(error, retry_on) else "kill"

    def _ends_job(self, verdict: str) -> bool:
        retry = payloads.DEFAULT_RETRY if self._call.retry is None else self._call.retry
        outcome = outcome_of_failure(
            retry=retry, failures=self._failures, keep=True, verdict=verdict, delay_s=0.0, rng=_rng
        )
        return outcome.state is not State.RETRIES

    def _choose_delay_s(self, error: BaseException) -> float | None:
        """Return the seconds until the next attempt that the task requests; None for the protocol's backoff."""
        try:
            if isinstance(error, Retry) and error.in_s is not None:
                return _clamp_delay(error.in_s)
            delay_s = self.task.backoff and self.task.backoff(error, self.result)
            return None if delay_s is None else _clamp_delay(delay_s)
        except BaseException:  # a bug in a backoff function must not lose the job
            logger.exception("backoff of a task failed, using the usual one jobtype=%s", self.task.jobtype)
            return None

    def _set_ended(self, status: TaskResultStatus) -> None:
        # TaskResult is frozen; Django's own backends set its fields in this way.
        object.__setattr__(self.result, "status", status)
        object.__setattr__(self.result, "finished_at", timezone.now())


def _build_refusal(job: Reservation, error: Exception, *, verdict: str = "") -> Failure:
    """Log that the job cannot run here and return the Failure, with an error name without a module."""
    logger.error("job cannot run jid=%s error=%s", job.jid, error)
    return payloads.failure_of(job, errtype=type(error).__name__, message=str(error), verdict=verdict)


def _warm_up() -> None:
    """Create this thread's cache and task backends once, outside of any job's context.

    A backend created inside a job's copy of the context ends with it, so each job would open its own cache connection.
    """
    if not hasattr(_thread, "is_warm"):
        _thread.is_warm = True
        for backends in (caches, task_backends):
            with suppress(Exception):  # a wrong setting raises where a task uses the backend
                backends.all()


def _commit_end(report: Ack, job: Reservation, broker: WorkerBroker) -> None:
    """Report the end inside the open transaction, or raise to roll it back.

    Raises ReservationLost if the job is no longer this worker's, and EndRolledBack if the end collided with another
    transaction.
    """
    with suppress(ReservationLost):
        if broker.ack_last(report, job):
            return
    raise ReservationLost("the job was no longer this worker's when its task ended: rolled back")


def _refuse_open_transactions(aliases: list[str]) -> None:
    if aliases:
        raise TransactionManagementError(
            f"the task left a transaction open on {', '.join(map(repr, aliases))}; it was rolled back: "
            "use `with transaction.atomic():`, which ends by itself, or commit after `set_autocommit(False)`"
        )


def _reset_async_connections() -> None:
    # Atomic blocks found here belong to the owner of this thread: the blocks of async tasks end within one call.
    reset_connections(in_transaction())


def _is_cancellation(error: BaseException) -> bool:
    """Return whether the runner ended the job, rather than the task itself."""
    # `cancelling()` distinguishes the runner's cancellation from a CancelledError that the task raised itself.
    # GeneratorExit means that the loop closed a coroutine that had not ended.
    current = asyncio.current_task()
    is_cancelled = isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling() > 0
    return is_cancelled or isinstance(error, GeneratorExit)


def _get_error_name(error: BaseException) -> str:
    """Return the error's qualified class name; a name without module for errors the worker imposes."""
    error_class = type(error)
    if error_class in _IMPOSED:
        return error_class.__name__
    return f"{error_class.__module__}.{error_class.__qualname__}"


def _describe_error(error: BaseException) -> str:
    try:
        return str(error) or type(error).__qualname__
    except BaseException:  # noqa: BLE001  (its __str__ is user code)
        return "<its str() failed>"


def _format_backtrace(error: BaseException, max_lines: int) -> list[str]:
    """Format the traceback without the frames above the task; drop its middle if it exceeds the limit."""
    if max_lines < 0:
        return []
    # A negative limit keeps the innermost frames: a RecursionError has thousands of outer ones.
    chunks = traceback.format_exception(
        type(error), error, _skip_own_frames(error), limit=-payloads.MAX_BACKTRACE_LINES
    )
    lines = "".join(chunks).splitlines()  # a chunk may have several lines
    kept_count = len(payloads.limit_backtrace(lines, max_lines))
    if kept_count == len(lines) or kept_count < 3:
        return lines[len(lines) - kept_count :]
    return [lines[0], f"  … {len(lines) - kept_count + 1} lines left out", *lines[len(lines) - kept_count + 2 :]]


def _skip_own_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback from the task's own first frame on."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.tb_next
    return frame


def _clamp_delay(delay_s: float) -> float:
    seconds = float(delay_s)
    # `min` and `max` would pass NaN on.
    if isnan(seconds):
        raise ValueError(f"expected a number of seconds, got {delay_s!r}")
    return min(max(seconds, 0.0), LONGEST_WAIT_S)


def _log_retry(task: FaktoryTask[..., Any], result: TaskResult[..., Any], error: BaseException) -> None:
    # A requested retry is no error, so it is logged without a traceback.
    is_requested = isinstance(error, Retry)
    logger.log(
        logging.INFO if is_requested else logging.WARNING,
        "job failed, runs again jid=%s jobtype=%s attempt=%d error=%s",
        result.id,
        task.jobtype,
        # Not the attempt of the reservation, which also counts claims that were released.
        result.attempts,
        ascii(_describe_error(error)[:200]),
        exc_info=None if is_requested else (type(error), error, _skip_own_frames(error)),
    )


def _log_final_failure(
    task: FaktoryTask[..., Any], result: TaskResult[..., Any], error: BaseException, verdict: str
) -> None:
    """Log the final end of a job, with its attempt.

    Django's own task logger logs this too, but by default nothing shows its records while DEBUG is off.
    """
    is_discarded = verdict == "discard"
    logger.log(
        logging.INFO if is_discarded else logging.ERROR,
        "job %s jid=%s jobtype=%s attempt=%d error=%s",
        "discarded" if is_discarded else "dead",
        result.id,
        task.jobtype,
        result.attempts,
        ascii(_describe_error(error)[:200]),
        exc_info=None if isinstance(error, Discard | Kill) else (type(error), error, _skip_own_frames(error)),
    )
