"""Test backends for TASKS: `DummyBackend` keeps jobs in memory, `ImmediateBackend` runs them in enqueue.

Both differ from `FaktoryBackend` only in where jobs are sent: options, checks, arguments, signals and errors are the
same. They are built while apps are loading, so this module imports no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

import msgspec
from django.core.checks import CheckMessage
from django.utils import timezone

from .. import brokers
from ..backend import FaktoryBackend
from ..brokers.base import Broker, Transaction
from ..core.payloads import Ack, Failure, JobPayload, Reservation, rfc3339
from ..core.steps import Parking, StepRecord
from ..errors import FaktoryError
from ..tasks.base import FaktoryTask, P, R
from ..tasks.compat import Task, TaskResult, TaskResultDoesNotExist, TaskResultStatus
from ..tasks.results import Attempt, call_of
from .recorded_execution import RecordedExecution

MAX_ATTEMPTS = 100
"""Attempts after which an immediate job is left READY: with the real backoff they would take years."""

_RESULT_FIELDS = ("status", "started_at", "finished_at", "last_attempted_at", "errors", "worker_ids", "_return_value")


class _TestBackend(FaktoryBackend):
    """Common base: no database, so nothing is compared with stored jobs, and there are no batches."""

    supports_get_result = False
    stores_batches = False

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Run the checks of FaktoryBackend, except the one for its table."""
        return [message for message in super().check(**kwargs) if message.id != "django_faktory.E010"]


class DummyBackend(_TestBackend):
    """Backend that runs nothing; `results` has the enqueued jobs of this thread.

    It ignores transactions, like Django's: a job enqueued in a transaction that rolls back stays.
    """

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.results: list[TaskResult[..., Any]] = []

    def clear(self) -> None:
        """Remove the recorded jobs."""
        self.results.clear()

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
        self.results += map(_copy_result, results)
        return [None for _ in jobs]


class ImmediateBackend(_TestBackend):
    """Backend that runs a job in enqueue, also inside a transaction.

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
        results = super().enqueue_many(task, calls)
        for result in results:
            job = self._accepted.pop(result.id)
            if job.at is None or job.at <= timezone.now():
                self._run(result, job)
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
        self._accepted |= {job.jid: job for job in jobs}
        return [None for _ in jobs]

    def _run(self, result: TaskResult[..., Any], job: JobPayload) -> None:
        """Run attempts until the job has ended."""
        attempts: list[Attempt] = []
        store = cast("Broker", _RunStore())  # a run calls no other method
        while not result.is_finished and len(attempts) < MAX_ATTEMPTS:
            reservation = _make_reservation(job, attempts)
            # The registered task has the alias of its own backend; this job was enqueued to this one.
            task = cast("FaktoryTask[..., Any]", result.task)
            execution = RecordedExecution(reservation, call_of(job.text), replace(task, backend=self.alias))
            report = execution.perform(store)
            # The caller has this result object already, so its fields are updated in place; it is frozen.
            for name in _RESULT_FIELDS:
                object.__setattr__(result, name, getattr(execution.result, name))
            if isinstance(report, Parking):  # as a job with a future `run_after`
                object.__setattr__(result, "status", TaskResultStatus.READY)
                break
            if isinstance(report, Failure):
                attempts.append(_make_attempt(reservation, report))
                if not result.is_finished:
                    object.__setattr__(result, "status", TaskResultStatus.READY)


@dataclass(frozen=True, slots=True)
class _RunStore:
    """Minimal broker for a job that is not stored: transactions, and a memory of its steps."""

    steps: dict[tuple[str, str], StepRecord] = field(default_factory=dict)

    @contextmanager
    def atomic(self) -> Iterator[Transaction]:
        with brokers.get_broker().atomic() as transaction:
            transaction.is_in_test = True  # the enqueue of the job may be part of a transaction
            yield transaction

    def read_steps(self, job: Reservation) -> dict[tuple[str, str], StepRecord]:  # noqa: ARG002
        return dict(self.steps)

    def find_signal(self, job: Reservation, name: str) -> None:  # noqa: ARG002
        return None

    def read_step_result(self, job: Reservation, name: str, key: str) -> str | None:  # noqa: ARG002
        return self.steps[name, key].result

    def record_step(self, job: Reservation, step: StepRecord) -> None:  # noqa: ARG002
        self.steps[step.name, step.key] = step

    def ack(self, acks: Sequence[Ack]) -> list[bool]:
        return [True for _ in acks]

    def ack_last(self, ack: Ack, job: Reservation) -> bool:  # noqa: ARG002
        return True


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


def _copy_result(result: TaskResult[..., Any]) -> TaskResult[..., Any]:
    """Return a copy with lists of its own: a test's change to one must not affect the other."""
    return replace(result, args=deepcopy(result.args), kwargs=deepcopy(result.kwargs), errors=[], worker_ids=[])
