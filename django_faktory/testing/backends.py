"""Test backends for TASKS: `DummyBackend` keeps jobs in memory, `ImmediateBackend` runs them in enqueue.

Both differ from `FaktoryBackend` only in where jobs are sent: options, checks, arguments, signals and errors are the
same. They are built while apps are loading, so this module imports no model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NoReturn, cast

import msgspec
from django.core.checks import CheckMessage
from django.utils import timezone
from msgspec import structs

from .. import brokers
from ..backend import FaktoryBackend
from ..brokers.base import Broker, Transaction
from ..core.batch_rules import Kind
from ..core.json import jsontext
from ..core.lifecycle import State
from ..core.payloads import Ack, Failure, JobPayload, Reservation, rfc3339
from ..errors import FaktoryError, NotUnique
from ..tasks.base import FaktoryTask, P, R, lookup
from ..tasks.compat import Task, TaskResult, TaskResultDoesNotExist, TaskResultStatus
from ..tasks.results import Attempt, JobResult, call_of
from .memory_batches import MemoryBatchStore
from .recorded_execution import RecordedExecution

MAX_ATTEMPTS = 100
"""Attempts after which an immediate job is left READY: with the real backoff they would take years."""

_RESULT_FIELDS = ("status", "started_at", "finished_at", "last_attempted_at", "errors", "worker_ids", "_return_value")


class _TestBackend(FaktoryBackend):
    """Common base: jobs have no table, and locks of `unique_for` are in this thread's memory."""

    supports_get_result = False

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._locks: dict[str, tuple[str, datetime]] = {}
        self.batches = MemoryBatchStore(fire=self._fire, forget=self._forget)

    def batch_store(self) -> MemoryBatchStore:
        """Return the batches of this backend, because its jobs are in memory."""
        return self.batches

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Run the checks of FaktoryBackend, except the one for its table."""
        return [message for message in super().check(**kwargs) if message.id != "django_faktory.E010"]

    def _fire(self, job: JobPayload, bid: str, kind: Kind) -> None:
        """Enqueue a batch's callback."""
        raise NotImplementedError

    def _forget(self, bids: Collection[str]) -> None:
        """Drop the jobs of batches that an exception rolled back."""

    def _admit(self, job: JobPayload) -> FaktoryError | None:
        """Add a job to its batch and acquire its unique lock, or return the error."""
        # The batch is checked first: a rejected job must not keep a lock.
        refusal = self.batches.refusal(job) or self._lock(job)
        if refusal is None:
            self.batches.record_member(job)
        return refusal

    def _lock(self, job: JobPayload) -> FaktoryError | None:
        """Acquire the unique lock of a job; return NotUnique if another job has it (W27)."""
        now = timezone.now()
        starts_at = max(job.at, now) if job.at else now
        expires_at = job.options and job.options.unique_ends(starts_at)
        if not job.options or not job.options.unique_key or not expires_at:
            return None
        holder_jid, held_until = self._locks.get(job.options.unique_key, ("", now))
        # A repeated push of the same jid has the lock already.
        if held_until > now and holder_jid != job.jid:
            return NotUnique(job.jid)
        self._locks[job.options.unique_key] = job.jid, expires_at
        return None

    def _unlock(self, job: JobPayload) -> None:
        self._locks = {key: lock for key, lock in self._locks.items() if lock[0] != job.jid}


class DummyBackend(_TestBackend):
    """`"django_faktory.testing.backends.DummyBackend"`: runs nothing; `results` has the enqueued jobs.

    It ignores transactions, like Django's: a job enqueued in a transaction that rolls back stays.
    """

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.results: list[TaskResult[..., Any]] = []
        self._bids: dict[str, str] = {}

    def clear(self) -> None:
        """Remove all jobs, batches and locks."""
        self.results.clear()
        self._locks.clear()
        self._bids.clear()
        self.batches.by_bid.clear()

    def bid_of(self, result: TaskResult[..., Any]) -> str:
        """Return the batch that this member of `results` belongs to; "" for none."""
        return self._bids.get(result.id, "")

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """Return one of `results`. Raises TaskResultDoesNotExist."""
        for result in self.results:
            if result.id == result_id:
                return result
        raise TaskResultDoesNotExist(result_id)

    async def aget_result(self, result_id: str) -> TaskResult[..., Any]:
        """Return one of `results`; runs in this thread, because another thread would have another backend."""
        return self.get_result(result_id)

    def _hand_over(
        self, jobs: Sequence[JobPayload], results: Sequence[TaskResult[..., Any]]
    ) -> Sequence[FaktoryError | None]:
        refusals = [self._admit(job) for job in jobs]
        for job, result, refusal in zip(jobs, results, refusals, strict=True):
            if not refusal:
                self.results.append(_copy_result(result))
                self._bids[result.id] = (job.options and job.options.bid) or ""
        return refusals

    def _fire(self, job: JobPayload, bid: str, kind: Kind) -> None:  # noqa: ARG002
        self.results.append(_make_callback_result(job, backend=self.alias))

    def _forget(self, bids: Collection[str]) -> None:
        self.results = [result for result in self.results if self.bid_of(result) not in bids]


class ImmediateBackend(_TestBackend):
    """`"django_faktory.testing.backends.ImmediateBackend"`: runs a job in enqueue, also inside a transaction.

    Retries follow without delay until the job has succeeded or finally failed: `errors` has those of every attempt. A
    job with a future `run_after` is not run: it stays READY.
    """

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._accepted: dict[str, JobPayload] = {}

    def enqueue_many(
        self, task: Task[P, R], calls: Iterable[tuple[Sequence[Any], Mapping[str, Any]]]
    ) -> list[TaskResult[P, R]]:
        """Enqueue all jobs, then run them; see FaktoryBackend."""
        try:
            results = super().enqueue_many(task, calls)
        except NotUnique as error:
            # The accepted jobs of a partly rejected call run too, as with a worker.
            self._run_all([result for result in error.results if result])
            raise
        self._run_all(results)
        return results

    def get_result(self, result_id: str) -> NoReturn:
        """Raise NotImplementedError, like Django's: results are not stored."""
        raise NotImplementedError("This backend does not support retrieving or refreshing results.")

    async def aget_result(self, result_id: str) -> NoReturn:
        """Raise NotImplementedError, see `get_result`."""
        self.get_result(result_id)

    def _hand_over(
        self,
        jobs: Sequence[JobPayload],
        results: Sequence[TaskResult[..., Any]],  # noqa: ARG002
    ) -> Sequence[FaktoryError | None]:
        refusals = [self._admit(job) for job in jobs]
        self._accepted |= {job.jid: job for job, refusal in zip(jobs, refusals, strict=True) if not refusal}
        return refusals

    def _run_all(self, results: Sequence[TaskResult[..., Any]]) -> None:
        for result in results:
            job = self._accepted.pop(result.id)
            try:
                if job.at is None or job.at <= timezone.now():
                    self.batches.record_end(job, self._run(result, job))
            finally:
                self._unlock(job)  # a dead job too: its lock must not affect the next test

    def _fire(self, job: JobPayload, bid: str, kind: Kind) -> None:
        # The store adds these members when it enqueues a callback (W26).
        members = jsontext.members(job.text)
        custom = jsontext.last_members(members["custom"]) if "custom" in members else {}
        custom |= {"_bid": jsontext.encode(bid), "_cb": jsontext.encode(str(kind))}
        if parent_bid := self.batches.by_bid[bid].definition.parent_bid:
            custom["_pbid"] = jsontext.encode(parent_bid)
        payload = structs.replace(job, text=jsontext.join({**members, "custom": jsontext.join(custom.items())}.items()))
        result = _make_callback_result(payload, backend=self.alias)
        self.batches.record_callback_end(bid, kind, self._run(result, payload, bid))

    def _run(self, result: TaskResult[..., Any], job: JobPayload, callback_of: str = "") -> State:
        """Run attempts until the job has ended; return its final state.

        `callback_of` is the bid of the batch whose callback this is, "" for any other job.
        """
        attempts: list[Attempt] = []
        verdict = ""
        # A worker's claim releases this lock too (W27).
        if job.options and job.options.unique_until_start:
            self._unlock(job)
        while not result.is_finished and len(attempts) < MAX_ATTEMPTS:
            reservation = _make_reservation(job, attempts)
            # The registered task has the alias of its own backend; this job was enqueued to this one.
            task = cast("FaktoryTask[..., Any]", result.task)
            execution = RecordedExecution(reservation, call_of(job.text), replace(task, backend=self.alias))
            with self.batches.running(job, callback_of):
                report = execution.perform(_no_store)
            # The caller has this result object already, so its fields are updated in place; it is frozen.
            for name in _RESULT_FIELDS:
                object.__setattr__(result, name, getattr(execution.result, name))
            if isinstance(report, Failure):
                attempts.append(_make_attempt(reservation, report))
                verdict = report.verdict
                if not result.is_finished:
                    object.__setattr__(result, "status", TaskResultStatus.READY)
        if result.status is TaskResultStatus.SUCCESSFUL:
            return State.SUCCEEDED
        return State.DISCARDED if verdict == "discard" else State.DEAD


@dataclass(frozen=True, slots=True)
class _NoStore:
    """Minimal broker for a run: a transaction for atomic tasks, without a stored job to finish."""

    def atomic(self) -> AbstractContextManager[Transaction]:
        return brokers.get_broker().atomic()

    def ack(self, acks: Sequence[Ack]) -> list[bool]:
        return [True for _ in acks]

    def ack_last(self, ack: Ack, job: Reservation) -> bool:  # noqa: ARG002
        return True


_no_store = cast("Broker", _NoStore())  # a run calls no other method


def _make_reservation(job: JobPayload, attempts: Sequence[Attempt]) -> Reservation:
    now = timezone.now()
    return Reservation(
        jid=job.jid,
        queue=job.queue,
        text=job.text,
        wid="immediate",
        attempt=len(attempts) + 1,
        enqueued_at=now,
        started_at=now,
        # In the form of the store: `retry_count` counts from 0.
        failure=msgspec.json.encode({"retry_count": len(attempts) - 1}).decode() if attempts else "",
        history=msgspec.json.encode(attempts).decode() if attempts else "",
        reserve_for=job.reserve_for,
        result_ttl=job.result_ttl,
    )


def _make_attempt(reservation: Reservation, failure: Failure) -> Attempt:
    return Attempt(
        wid=reservation.wid,
        errtype=failure.errtype,
        message=failure.message,
        backtrace=list(failure.backtrace),
        started_at=rfc3339(reservation.started_at) if reservation.started_at else "",
        failed_at=rfc3339(timezone.now()),
    )


def _make_callback_result(job: JobPayload, *, backend: str) -> TaskResult[..., Any]:
    """Return the result of a callback that is enqueued now."""
    call = call_of(job.text).decrypt_arguments()
    task = replace(lookup(job.jobtype), backend=backend, queue_name=job.queue, priority=job.priority)
    return JobResult(
        task=task,
        id=job.jid,
        status=TaskResultStatus.READY,
        enqueued_at=timezone.now(),
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=call.args,
        kwargs=call.kwargs,
        backend=backend,
        errors=[],
        worker_ids=[],
    )


def _copy_result(result: TaskResult[..., Any]) -> TaskResult[..., Any]:
    """Return a copy with lists of its own: a test's change to one must not affect the other."""
    return replace(result, args=deepcopy(result.args), kwargs=deepcopy(result.kwargs), errors=[], worker_ids=[])
