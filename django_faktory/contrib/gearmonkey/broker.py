"""GearMonkey as a broker, the "direct" mode: our worker runs jobs straight from Redis.

`GearMonkeyBroker` maps the broker methods of a worker to a `RedisWorker`. Knows no thread and no task code (ADR 0013).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import conf
from ...brokers.base import WorkerBroker
from ...core.payloads import (
    Ack,
    Beat,
    Failure,
    FetchRequest,
    Reservation,
    TrackUpdate,
    WorkerIdentity,
    new_job,
)
from ...errors import FaktoryError, InvalidPayload
from .protocol import Status
from .redis_worker import RedisWorker, ReservedJob
from .registry import call_of, output_of

QUEUE = "gearmonkey"
"""Queue name reported to the worker for all functions: the specification defines their order, not queues."""

WORKER_SHUTDOWN = "WorkerShutdown"
"""Error type with which `interrupt` fails the jobs that a stopping worker could not finish."""


class GearMonkeyBroker(WorkerBroker):
    """Broker over a Redis worker; `jobtypes` maps its functions to jobtypes."""

    def __init__(self, redis_worker: RedisWorker, jobtypes: dict[str, str]) -> None:
        self._redis_worker = redis_worker
        self._jobtypes = jobtypes
        # By jid and attempt: a job taken again after a lost lease is another entry.
        self._held_jobs: dict[tuple[str, int | None], ReservedJob] = {}

    def hello(self, worker: WorkerIdentity) -> None:  # noqa: ARG002
        """Check the server and register the worker. Raises UnusableServer."""
        self._redis_worker.open()
        self._redis_worker.register()

    def beat(self, beats: Sequence[Beat]) -> list[FaktoryError | str]:
        """Renew the registration and the leases of all held jobs.

        The replies are empty, because GearMonkey cannot send a state to a worker. A worker whose registration has
        expired is registered again.
        """
        self._redis_worker.register()
        self._redis_worker.extend(list(self._held_jobs.values()))  # a job lost meanwhile is noticed when it ends
        return [""] * len(beats)

    def bye(self, wids: Sequence[str]) -> None:
        """Unregister the workers and release their jobs."""
        self._redis_worker.dismiss(wids)
        self._held_jobs.clear()

    # The specification has no place to store the reason.
    def lost(self, wids: Sequence[str], *, reason: str = "") -> int:  # noqa: ARG002
        """Dismiss workers that died and sweep their jobs; return the number of jobs swept."""
        self._redis_worker.dismiss(wids, have_died=True)
        swept = self._redis_worker.sweep()
        return len(swept.requeued) + len(swept.given_up)

    def fetch(self, requests: Sequence[FetchRequest]) -> list[list[Reservation]]:
        """Take jobs of all functions, whatever queues are requested."""
        reservations = []
        for request in requests:
            jobs = self._redis_worker.take(request.count)
            self._held_jobs.update((_key_of(job), job) for job in jobs)
            reservations.append([built for built in map(self._to_reservation, jobs) if built is not None])
        return reservations

    def ack(self, acks: Sequence[Ack]) -> list[bool]:
        """End jobs with success; False for a job that is no longer this worker's."""
        return self._finish([(ack, Status.SUCCESS, output_of(ack.result)) for ack in acks])

    def fail(self, failures: Sequence[Failure]) -> list[FaktoryError | bool]:
        """End jobs with an error; a job of a stopping worker is released instead.

        A failure is final, because the specification knows no second attempt.
        """
        results: list[FaktoryError | bool] = []
        for failure in failures:
            job = self._held_jobs.get((failure.jid, failure.attempt))
            if failure.errtype == WORKER_SHUTDOWN and job is not None:
                results.append(self._redis_worker.release(job))
                self._held_jobs.pop(_key_of(job), None)
                continue
            error_type = failure.errtype.rpartition(".")[2]
            # The message is sent as "Type: text"; avoid the prefix twice.
            prefix = f"{error_type}: "
            error_text = failure.message if failure.message.startswith(prefix) else f"{prefix}{failure.message}"
            results += self._finish([(failure, Status.ERROR, error_text.encode("utf-8", "replace"))])
        return results

    def release(self, reservations: Sequence[Reservation]) -> int:
        """Release jobs to the head of their queues; return how many were still this worker's."""
        count = 0
        for reservation in reservations:
            job = self._held_jobs.get((reservation.jid, reservation.attempt))
            if job is not None:
                count += self._redis_worker.release(job)
                self._held_jobs.pop(_key_of(job), None)
        return count

    def track_set(self, updates: Sequence[TrackUpdate]) -> None:
        """Store the progress of jobs. The description is dropped: the specification has no field for it."""
        # A copy: other threads add and remove jobs meanwhile.
        jobs_by_jid = {jid: job for (jid, _), job in list(self._held_jobs.items())}
        for update in updates:
            job = jobs_by_jid.get(update.jid)
            if job is not None and update.percent is not None:
                self._redis_worker.update(job, *(update.part or (update.percent, 100)))

    def close(self) -> None:
        """Do nothing: the connections belong to a pool shared by all threads."""

    def _to_reservation(self, job: ReservedJob) -> Reservation | None:
        """Return the job as our worker reads it.

        A job with invalid input is ended as an error; the result is None.
        """
        try:
            args, kwargs = call_of(job.input, max_bytes=conf.get("GEARMONKEY_MAX_INPUT_BYTES"))
            jid = _key_of(job)[0]
            # No retry: in direct mode the specification applies, which has no second attempt.
            payload = new_job(jid=jid, jobtype=self._jobtypes[job.fn], args=args, kwargs=kwargs, retry=0)
        except InvalidPayload as error:
            self._redis_worker.finish(job, Status.ERROR, f"InvalidInput: {error}".encode())
            self._held_jobs.pop(_key_of(job), None)
            return None
        return Reservation(jid=jid, queue=QUEUE, text=payload.text, wid=self._redis_worker.wid, attempt=job.attempt)

    def _finish(self, ends: Sequence[tuple[Ack | Failure, Status, bytes]]) -> list[Any]:
        jobs = [self._held_jobs.get((report.jid, report.attempt)) for report, _, _ in ends]
        held = [(job, status, output) for job, (_, status, output) in zip(jobs, ends, strict=True) if job is not None]
        results = iter(self._redis_worker.finish_many(held))
        for job, _, _ in held:
            self._held_jobs.pop(_key_of(job), None)
        return [next(results) if job is not None else False for job in jobs]


def _key_of(job: ReservedJob) -> tuple[str, int | None]:
    # A peer's id may be invalid UTF-8, but a jid has to be text that can be encoded.
    name = f"{job.fn}:{job.id}".encode("utf-8", "backslashreplace").decode()
    return f"gearmonkey:{name}", job.attempt
