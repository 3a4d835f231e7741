"""GearMonkey as a broker: our worker above it runs jobs straight from Redis ("direct").

Knows no thread and no task's code. A worker's verbs are a station's; what the text has no word for is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .. import conf
from ..brokers.base import Broker
from ..errors import FaktoryError, InvalidPayload
from ..mutations import Mutation
from ..payloads import (
    Ack,
    BatchStatus,
    Beat,
    Failure,
    FetchRequest,
    JobPayload,
    NewBatch,
    Reservation,
    Tracked,
    TrackUpdate,
    WorkerIdentity,
    new_job,
)
from .functions import call_of, output_of
from .station import Station, Taken
from .wire import Status

QUEUE = "gearmonkey"
"""What the worker above calls all functions together: their order is the text's."""

GIVEN_UP = "WorkerShutdown"
"""How a worker that has to stop names jobs that did not end in time."""


class GearMonkeyBroker(Broker):
    """`jobtypes` says which task serves which function of the station."""

    def __init__(self, station: Station, jobtypes: dict[str, str]) -> None:
        self._station = station
        self._jobtypes = jobtypes
        self._held: dict[tuple[str, int | None], Taken] = {}

    # --- a worker's verbs ---

    def hello(self, worker: WorkerIdentity) -> None:  # noqa: ARG002
        """See Broker. Raises UnusableServer."""
        self._station.open()
        self._station.register()

    def beat(self, beats: Sequence[Beat]) -> list[FaktoryError | str]:
        """See Broker. A station has no way to give orders, and who was silent too long is counted again."""
        self._station.register()
        self._station.extend(list(self._held.values()))  # where one is no longer ours, its end will say so
        return [""] * len(beats)

    def bye(self, wids: Sequence[str]) -> None:
        """See Broker."""
        self._station.dismiss(wids)
        self._held.clear()

    def lost(self, wids: Sequence[str], *, reason: str = "") -> int:  # noqa: ARG002  (there is no place to keep it)
        """See Broker."""
        self._station.dismiss(wids, have_died=True)
        swept = self._station.sweep()
        return len(swept.back) + len(swept.given_up)

    def fetch(self, requests: Sequence[FetchRequest]) -> list[list[Reservation]]:
        """See Broker. Whatever queues are asked for: all functions."""
        answers = []
        for request in requests:
            taken = self._station.take(request.count)
            self._held.update((_place(job), job) for job in taken)
            answers.append([job for job in map(self._reservation, taken) if job is not None])
        return answers

    def ack(self, acks: Sequence[Ack]) -> list[bool]:
        """See Broker."""
        return self._end([(ack, Status.SUCCESS, output_of(ack.result)) for ack in acks])

    def fail(self, failures: Sequence[Failure]) -> list[FaktoryError | bool]:
        """See Broker. A failure is an end, but for that of a worker which had to stop: such a job is given back."""
        answers: list[FaktoryError | bool] = []
        for failure in failures:
            job = self._held.get((failure.jid, failure.attempt))
            if failure.errtype == GIVEN_UP and job is not None:
                answers.append(self._station.release(job))
                self._held.pop(_place(job), None)
                continue
            kind = failure.errtype.rpartition(".")[2]
            told = failure.message if failure.message.startswith(f"{kind}: ") else f"{kind}: {failure.message}"
            answers += self._end([(failure, Status.ERROR, told.encode("utf-8", "replace"))])
        return answers

    def release(self, reservations: Sequence[Reservation]) -> int:
        """See Broker."""
        count = 0
        for reservation in reservations:
            job = self._held.get((reservation.jid, reservation.attempt))
            if job is not None:
                count += self._station.release(job)
                self._held.pop(_place(job), None)
        return count

    def track_set(self, updates: Sequence[TrackUpdate]) -> None:
        """See Broker. The note has no place in the text."""
        held = {jid: job for (jid, _), job in list(self._held.items())}
        for update in updates:
            job = held.get(update.jid)
            if job is not None and update.percent is not None:
                self._station.update(job, *(update.part or (update.percent, 100)))

    def close(self) -> None:
        """See Broker. Connections are a pool's, for all threads."""

    def _reservation(self, job: Taken) -> Reservation | None:
        """The job as a worker of ours reads it; None where its input cannot be: then it has ended as an error."""
        try:
            args, kwargs = call_of(job.input, max_bytes=conf.get("GEARMONKEY_MAX_INPUT_BYTES"))
            jid = _place(job)[0]
            made = new_job(jid=jid, jobtype=self._jobtypes[job.fn], args=args, kwargs=kwargs, retry=0)
        except InvalidPayload as error:
            self._station.finish(job, Status.ERROR, f"InvalidInput: {error}".encode())
            self._held.pop(_place(job), None)
            return None
        return Reservation(jid=jid, queue=QUEUE, text=made.text, wid=self._station.wid, attempt=job.attempt)

    def _end(self, ends: Sequence[tuple[Ack | Failure, Status, bytes]]) -> list[Any]:
        jobs = [self._held.get((report.jid, report.attempt)) for report, _, _ in ends]
        known = [(job, status, output) for job, (_, status, output) in zip(jobs, ends, strict=True) if job is not None]
        answers = iter(self._station.finish_many(known) if known else [])
        for job, _, _ in known:
            self._held.pop(_place(job), None)
        return [next(answers) if job is not None else False for job in jobs]

    # --- what the text has no word for ---

    def push(self, jobs: Sequence[JobPayload]) -> list[FaktoryError | None]:  # noqa: ARG002
        """Refused, as all that follows."""
        _refuse("push")

    def mutate(self, mutation: Mutation, *, go_on: Callable[[], bool] = lambda: True) -> None:  # noqa: ARG002
        """Refused."""
        _refuse("mutate")

    def pause(self, queues: Sequence[str] | None) -> None:  # noqa: ARG002
        """Refused."""
        _refuse("pause")

    def resume(self, queues: Sequence[str] | None) -> None:  # noqa: ARG002
        """Refused."""
        _refuse("resume")

    def remove(self, queues: Sequence[str] | None, *, go_on: Callable[[], bool] = lambda: True) -> None:  # noqa: ARG002
        """Refused."""
        _refuse("remove")

    def latency(self, queues: Sequence[str]) -> dict[str, float]:  # noqa: ARG002
        """Refused."""
        _refuse("latency")

    def flush(self, *, go_on: Callable[[], bool] = lambda: True) -> None:  # noqa: ARG002
        """Refused."""
        _refuse("flush")

    def track_get(self, jids: Sequence[str]) -> list[Tracked]:  # noqa: ARG002
        """Refused."""
        _refuse("track_get")

    def new_batch(self, batch: NewBatch, *, by: str = "") -> str:  # noqa: ARG002
        """Refused."""
        _refuse("new_batch")

    def check_batch(self, bid: str, *, by: str = "") -> None:  # noqa: ARG002
        """Refused."""
        _refuse("check_batch")

    def open_batch(self, bid: str, *, by: str = "") -> str:  # noqa: ARG002
        """Refused."""
        _refuse("open_batch")

    def commit_batch(self, bid: str) -> None:  # noqa: ARG002
        """Refused."""
        _refuse("commit_batch")

    def batch_status(self, bid: str) -> BatchStatus:  # noqa: ARG002
        """Refused."""
        _refuse("batch_status")

    def info(self) -> dict[str, Any]:
        """Refused."""
        _refuse("info")


def _place(job: Taken) -> tuple[str, int | None]:
    name = f"{job.fn}:{job.id}".encode("utf-8", "backslashreplace").decode()
    return f"gearmonkey:{name}", job.attempt


def _refuse(verb: str) -> NoReturn:
    raise FaktoryError(f"{verb}: GearMonkey has no such thing; its jobs are made by a GearMonkey client")
