"""Backends for TASKS in tests: `DummyBackend` keeps jobs in memory, `ImmediateBackend` runs them as they are enqueued.

Both are `FaktoryBackend` but for where jobs go: the same options, checks, arguments, signals and errors. Built while
apps still load: imports no model.
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

from .. import brokers, jsontext
from ..backend import FaktoryBackend
from ..batching import Kind
from ..brokers.base import Broker, Transaction
from ..compat import Task, TaskResult, TaskResultDoesNotExist, TaskResultStatus
from ..errors import FaktoryError, NotUnique
from ..lifecycle import State
from ..payloads import Ack, Failure, JobPayload, Reservation, rfc3339
from ..results import Attempt, JobResult, call_of
from ..tasks import FaktoryTask, P, R, lookup
from .batches import MemoryBatches
from .watching import Watched

MOST_ATTEMPTS = 100
"""An immediate job that failed so often is left alone, READY: with the backoff of real life that is years away."""

_TOLD = ("status", "started_at", "finished_at", "last_attempted_at", "errors", "worker_ids", "_return_value")


class _TestBackend(FaktoryBackend):
    """What the two have in common: jobs have no table, and locks of `unique_for` are in this thread's memory."""

    supports_get_result = False

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._locks: dict[str, tuple[str, datetime]] = {}
        self.batches = MemoryBatches(fire=self._fire, forget=self._forget)

    def batch_keeper(self) -> MemoryBatches:
        """This backend itself, as it keeps the jobs."""
        return self.batches

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """See FaktoryBackend; its jobs need no table."""
        return [message for message in super().check(**kwargs) if message.id != "django_faktory.E010"]

    def _fire(self, job: JobPayload, bid: str, kind: Kind) -> None:
        """Enqueue a batch's callback."""
        raise NotImplementedError

    def _forget(self, bids: Collection[str]) -> None:
        """An exception took these batches back."""

    def _admit(self, job: JobPayload) -> FaktoryError | None:
        """Let a job join its batch and take its lock, or say why not."""
        refusal = self.batches.refusal(job) or self._lock(job)
        if refusal is None:
            self.batches.joined(job)
        return refusal

    def _lock(self, job: JobPayload) -> FaktoryError | None:
        """Take the lock a job asks for; NotUnique where another job has it (W27)."""
        now = timezone.now()
        begins = max(job.at, now) if job.at else now
        ends = job.options and job.options.lock_ends(begins)
        if not job.options or not job.options.unique_key or not ends:
            return None
        jid, until = self._locks.get(job.options.unique_key, ("", now))
        if until > now and jid != job.jid:
            return NotUnique(job.jid)
        self._locks[job.options.unique_key] = job.jid, ends
        return None

    def _unlock(self, job: JobPayload) -> None:
        self._locks = {key: held for key, held in self._locks.items() if held[0] != job.jid}


class DummyBackend(_TestBackend):
    """`"django_faktory.testing.backends.DummyBackend"`: nothing is run; `results` holds what was enqueued.

    Transactions mean nothing to it, as to Django's: what is enqueued in one that rolls back stays.
    """

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.results: list[TaskResult[..., Any]] = []
        self._bids: dict[str, str] = {}

    def clear(self) -> None:
        """Forget all jobs and batches, and the locks they hold."""
        self.results.clear()
        self._locks.clear()
        self._bids.clear()
        self.batches.kept.clear()

    def bid_of(self, result: TaskResult[..., Any]) -> str:
        """The batch that this one of `results` is a member of; "" for none."""
        return self._bids.get(result.id, "")

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """One of `results`. Raises TaskResultDoesNotExist."""
        for result in self.results:
            if result.id == result_id:
                return result
        raise TaskResultDoesNotExist(result_id)

    async def aget_result(self, result_id: str) -> TaskResult[..., Any]:
        """See `get_result`: in another thread there would be another backend."""
        return self.get_result(result_id)

    def _hand_over(
        self, jobs: Sequence[JobPayload], results: Sequence[TaskResult[..., Any]]
    ) -> Sequence[FaktoryError | None]:
        refusals = [self._admit(job) for job in jobs]
        for job, result, refusal in zip(jobs, results, refusals, strict=True):
            if not refusal:
                self.results.append(_copied(result))
                self._bids[result.id] = (job.options and job.options.bid) or ""
        return refusals

    def _fire(self, job: JobPayload, bid: str, kind: Kind) -> None:  # noqa: ARG002
        self.results.append(_result_of(job, backend=self.alias))

    def _forget(self, bids: Collection[str]) -> None:
        self.results = [result for result in self.results if self.bid_of(result) not in bids]


class ImmediateBackend(_TestBackend):
    """`"django_faktory.testing.backends.ImmediateBackend"`: a job runs at once, in enqueue, in a transaction too.

    Retries follow without waiting, until the job has succeeded or failed for good: `errors` has every attempt's.
    A job with a `run_after` to come is not run: it stays READY.
    """

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._taken: dict[str, JobPayload] = {}

    def enqueue_many(
        self, task: Task[P, R], calls: Iterable[tuple[Sequence[Any], Mapping[str, Any]]]
    ) -> list[TaskResult[P, R]]:
        """See FaktoryBackend; all are enqueued before the first runs."""
        try:
            results = super().enqueue_many(task, calls)
        except NotUnique as error:
            self._run_all([result for result in error.results if result])
            raise
        self._run_all(results)
        return results

    def get_result(self, result_id: str) -> NoReturn:
        """Raise NotImplementedError, as Django's: results are not kept."""
        raise NotImplementedError("This backend does not support retrieving or refreshing results.")

    async def aget_result(self, result_id: str) -> NoReturn:
        """See `get_result`."""
        self.get_result(result_id)

    def _hand_over(
        self,
        jobs: Sequence[JobPayload],
        results: Sequence[TaskResult[..., Any]],  # noqa: ARG002
    ) -> Sequence[FaktoryError | None]:
        refusals = [self._admit(job) for job in jobs]
        self._taken |= {job.jid: job for job, refusal in zip(jobs, refusals, strict=True) if not refusal}
        return refusals

    def _run_all(self, results: Sequence[TaskResult[..., Any]]) -> None:
        for result in results:
            job = self._taken.pop(result.id)
            try:
                if job.at is None or job.at <= timezone.now():
                    self.batches.ended(job, self._run(result, job))
            finally:
                self._unlock(job)  # a dead job too: it must not stand in the next test's way

    def _fire(self, job: JobPayload, bid: str, kind: Kind) -> None:
        text = jsontext.members(job.text)
        custom = jsontext.last_members(text["custom"]) if "custom" in text else {}
        custom |= {"_bid": jsontext.encode(bid), "_cb": jsontext.encode(str(kind))}
        if parent_bid := self.batches.kept[bid].made.parent_bid:
            custom["_pbid"] = jsontext.encode(parent_bid)
        told = structs.replace(job, text=jsontext.join({**text, "custom": jsontext.join(custom.items())}.items()))
        self.batches.callback_ended(bid, kind, self._run(_result_of(told, backend=self.alias), told, bid))

    def _run(self, result: TaskResult[..., Any], job: JobPayload, callback_of: str = "") -> State:
        """Attempt it until it has ended; returns how."""
        attempts: list[Attempt] = []
        verdict = ""
        if job.options and job.options.unique_until_start:
            self._unlock(job)
        while not result.is_finished and len(attempts) < MOST_ATTEMPTS:
            reservation = _reserved(job, attempts)
            # The registry's task has its own backend's alias; this one was enqueued here.
            task = cast("FaktoryTask[..., Any]", result.task)
            execution = Watched(reservation, call_of(job.text), replace(task, backend=self.alias))
            with self.batches.running(job, callback_of):
                report = execution.perform(_no_store)
            for name in _TOLD:
                object.__setattr__(result, name, getattr(execution.result, name))
            if isinstance(report, Failure):
                attempts.append(_attempt(reservation, report))
                verdict = report.verdict
                if not result.is_finished:
                    object.__setattr__(result, "status", TaskResultStatus.READY)
        if result.status is TaskResultStatus.SUCCESSFUL:
            return State.SUCCEEDED
        return State.DISCARDED if verdict == "discard" else State.DEAD


@dataclass(frozen=True, slots=True)
class _NoStore:
    """What a run needs of a broker: a transaction for atomic tasks, in which there is no job to end."""

    def atomic(self) -> AbstractContextManager[Transaction]:
        return brokers.get_broker().atomic()

    def ack(self, acks: Sequence[Ack]) -> list[bool]:
        return [True for _ in acks]

    def ack_last(self, ack: Ack, job: Reservation) -> bool:  # noqa: ARG002
        return True


_no_store = cast("Broker", _NoStore())  # a run asks nothing else of it


def _reserved(job: JobPayload, attempts: Sequence[Attempt]) -> Reservation:
    now = timezone.now()
    return Reservation(
        jid=job.jid,
        queue=job.queue,
        text=job.text,
        wid="immediate",
        attempt=len(attempts) + 1,
        enqueued_at=now,
        started_at=now,
        failure=msgspec.json.encode({"retry_count": len(attempts) - 1}).decode() if attempts else "",
        history=msgspec.json.encode(attempts).decode() if attempts else "",
        reserve_for=job.reserve_for,
        result_ttl=job.result_ttl,
    )


def _attempt(reservation: Reservation, failure: Failure) -> Attempt:
    return Attempt(
        wid=reservation.wid,
        errtype=failure.errtype,
        message=failure.message,
        backtrace=list(failure.backtrace),
        started_at=rfc3339(reservation.started_at) if reservation.started_at else "",
        failed_at=rfc3339(timezone.now()),
    )


def _result_of(job: JobPayload, *, backend: str) -> TaskResult[..., Any]:
    """Of a callback that is enqueued just now."""
    call = call_of(job.text).opened()
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


def _copied(result: TaskResult[..., Any]) -> TaskResult[..., Any]:
    """The same with lists of its own: what a test changes in one is not changed in the other."""
    return replace(result, args=deepcopy(result.args), kwargs=deepcopy(result.kwargs), errors=[], worker_ids=[])
