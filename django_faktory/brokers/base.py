"""The port: one method for each verb of the protocol, all of them set-based.

The FWP server, the worker and the producers speak to a Broker and to nothing below it. Two stand
behind it: this Django database (`orm`) and a Faktory server elsewhere (`remote`). It knows neither.
A single job is a set of one. Answers come in the order of what was asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from ..errors import FaktoryError
from ..mutations import Mutation
from ..payloads import (
    Ack,
    BatchStatus,
    Beat,
    Failure,
    FetchRequest,
    HandedOut,
    Interruption,
    JobPayload,
    NewBatch,
    Reservation,
    Tracked,
    TrackUpdate,
    WorkerIdentity,
    shutdown_failure,
)

Told = TypeVar("Told")
Told_co = TypeVar("Told_co", covariant=True)


class Exchanged(NamedTuple):
    """The answers of `push`, `ack` and `fetch`."""

    pushed: list[FaktoryError | None]
    acked: list[FaktoryError | bool]
    fetched: list[list[Reservation]]


class Transaction:
    """One that `Broker.atomic` opened. Hooks that run after a commit may fail: it was committed all the same."""

    is_committed = False
    is_nested = False
    """Whether it is part of a larger one, and so committed with that."""
    is_untouched: Callable[[], bool] = staticmethod(lambda: False)
    """Asked inside of it: whether nothing at all has been done there, as far as that can be told."""


class InFlight(Protocol[Told_co]):
    """An exchange that was sent on a lent connection, see `Broker.lend`."""

    @property
    def fd(self) -> int:
        """Readable when something came of the answer."""

    @property
    def is_sent(self) -> bool:
        """Whether all was sent; else call `send` when `fd` is writable, and `read` after it."""

    def send(self) -> None:
        """Send more of it; never raises."""

    def read(self) -> Told_co | Callable[[], Told_co] | None:
        """What is made of the answer, or what is left to do for it in the thread of the connection: that may wait, and
        raises what `exchange` raises. None while more is to come. Never raises."""

    @property
    def is_last(self) -> bool:
        """When it was read: whether something came behind the answer, such as the connection's end. It is to be left to
        its thread then."""


class Lent(Protocol):
    """A connection that a thread has lent."""

    def __call__(
        self,
        jobs: Sequence[JobPayload],
        acks: Sequence[Ack],
        requests: Sequence[FetchRequest],
        then: Callable[[Exchanged], Told],
        /,
    ) -> InFlight[Told] | None:
        """Send an exchange, of whose answer `then` makes what is told; None where it must go by `exchange`, in the
        thread: nothing was done then."""


class Broker(ABC):
    """What every store of jobs can do. Safe to call from several threads at once.

    Every verb raises BrokerUnavailable when the store cannot be reached: then nothing was changed,
    or (a connection lost while it committed) what was sent may be sent again without harm.
    """

    transactional = False
    """Whether push takes part in the caller's database transaction."""

    blocking = False
    """Whether fetch itself waits (up to 2 s) for a job; otherwise it answers at once and the caller
    waits for a wake-up hint."""

    keeps_results = False
    """Whether Ack.result is stored."""

    def atomic(self) -> AbstractContextManager[Transaction]:
        """A transaction that push and ack of this thread take part in. Raises FaktoryError where there is none."""
        raise FaktoryError(
            'tasks with atomic=True need their jobs in this project\'s database: FAKTORY["BROKER"] = "orm"'
        )

    def ack_last(self, ack: Ack, job: Reservation) -> bool:  # noqa: ARG002
        """`ack` the end of this job, as the last thing inside of `atomic`: it may be committed then, together with all
        else. False, or ReservationLost: it was not this worker's any more, and nothing must be committed."""
        return self.ack([ack]) == [True]

    cancels = False
    """Whether jobs that run can be cancelled."""

    @property
    def hands_over(self) -> bool:
        """Whether `exchange` gives the lock of a job it ends to the next of its key, in the same transaction."""
        return False

    def cancel(self, jids: Sequence[str]) -> int:  # noqa: ARG002
        """Drop jobs that wait, and have those that run cancelled by their workers; returns how many it was."""
        raise FaktoryError(
            'jobs can be cancelled in this project\'s database only: FAKTORY["BROKER"] = "orm"; a Faktory server '
            "knows no such command"
        )

    def cancelled(self, jids: Sequence[str]) -> list[str]:  # noqa: ARG002
        """Those of these running jobs that somebody cancelled."""
        return []

    lock_heartbeat_s = 30.0
    """Between two calls of `extend_locks`, for who holds locks."""

    def extend_locks(self, tokens: Collection[int]) -> set[int]:  # noqa: ARG002
        """Let the locks of running jobs live on; returns those that are lost: others may have them by now."""
        return set()

    def limited_lock_wait(self, seconds: float) -> AbstractContextManager[None]:  # noqa: ARG002
        """Limit how long the verbs of this thread wait for other transactions' locks: then they raise LockTimeout."""
        return nullcontext()

    @abstractmethod
    def push(self, jobs: Sequence[JobPayload]) -> list[FaktoryError | None]:
        """Store jobs. One answer a job: None, or why it was refused; the others are stored all the same.

        A jid that is still stored and not finished is accepted and changes nothing, so that a sender may
        repeat itself after a lost connection (W10). A finished one is replaced.
        """

    @abstractmethod
    def fetch(self, requests: Sequence[FetchRequest]) -> list[list[Reservation]]:
        """Reserve jobs: for each request up to `count`, in the order of its queues, then priority, then age (W13).

        A request whose wid is quiet or terminating, and a paused queue, get none.
        """

    def exchange(self, jobs: Sequence[JobPayload], acks: Sequence[Ack], requests: Sequence[FetchRequest]) -> Exchanged:
        """`ack`, `push` and `fetch` in this order, as one where the store can: one round trip, one commit.

        Raises what they raise; where they are one nothing was done then.
        """
        acked = self.ack(acks)
        return Exchanged(self.push(jobs), [*acked], self.fetch(requests))

    def lend(self) -> Lent | None:
        """A way for an event loop to exchange on this thread's connection, as long as the thread does nothing with it
        and after it has done something; None where there is none (ADR 0021)."""
        return None

    @property
    def reads_ahead(self) -> bool:
        """Whether `exchange` may answer with jobs read ahead, which are to be handed out or released (ADR 0022)."""
        return False

    def hand_out(self, job: Reservation, wid: str) -> Reservation:
        """Somebody gets a job that was read ahead: as his. Costs nothing, and is to be confirmed within a minute of the
        exchange, if the job is not ended by then."""
        return msgspec.structs.replace(job, wid=wid)

    def confirm(self, handed: Sequence[HandedOut]) -> set[str]:  # noqa: ARG002  (there is none)
        """Let the reservations of jobs that were read ahead begin when these were handed out; ended ones stay so.

        Waits for nobody: the jids it returns are in a transaction that runs, and to be confirmed again.
        """
        return set()

    @abstractmethod
    def ack(self, acks: Sequence[Ack]) -> Sequence[FaktoryError | bool]:
        """End jobs successfully; one answer for each ack.

        False: nothing was changed, since the job is not stored, not working, or held by another (W16).
        BrokerUnavailable as an answer: this job was not ended, others of the set were; send this ack again.
        """

    @abstractmethod
    def fail(self, failures: Sequence[Failure]) -> list[FaktoryError | bool]:
        """Report failures. True where it had effect, False for a stranger's, JobNotFound for an unknown jid (W17)."""

    @abstractmethod
    def release(self, reservations: Sequence[Reservation]) -> int:
        """Give back jobs that nobody began, each to its old place in its queue; returns how many were (W14)."""

    gives_back_begun = False
    """Whether `interrupt` gives jobs back without counting a failure."""

    def interrupt(self, interruptions: Sequence[Interruption]) -> list[FaktoryError | bool]:
        """Give back jobs that a stopping worker began: no attempt, error or loss is counted. Answers like `fail`.

        A store that cannot do this is sent failures with the error type `WorkerShutdown`.
        """
        return self.fail([shutdown_failure(one) for one in interruptions])

    @abstractmethod
    def hello(self, worker: WorkerIdentity) -> None:
        """Register a worker process, or see it again; its state is not reset."""

    def register(self, identities: Sequence[WorkerIdentity]) -> Sequence[FaktoryError | None]:
        """`hello` for a set of worker processes; one answer for each: None, or why it is not registered."""
        for identity in identities:
            self.hello(identity)
        return [None] * len(identities)

    @abstractmethod
    def beat(self, beats: Sequence[Beat]) -> list[FaktoryError | str]:
        """Take signs of life. Answers "", or the state to enter ("quiet", "terminate"), or UnknownWorker."""

    @abstractmethod
    def bye(self, wids: Sequence[str]) -> None:
        """Forget worker processes that ended well; what they still hold goes back to its old place."""

    @abstractmethod
    def lost(self, wids: Sequence[str], *, reason: str = "") -> int:
        """Give up worker processes known to be dead: their jobs go back, or to dead at the third loss (W20).

        `reason` is how they died; it becomes part of the loss in each job's history.
        """

    @abstractmethod
    def mutate(self, mutation: Mutation, *, go_on: Callable[[], bool] = lambda: True) -> None:
        """Change all jobs of a set that a filter describes, in short steps (W23).

        Asked between two steps, `go_on` may end it: FaktoryError, with the steps so far done. As in `remove` and
        `flush`, the same call again does the rest.
        """

    @abstractmethod
    def pause(self, queues: Sequence[str] | None) -> None:
        """Give out no job of these queues, or of all there are; a name never used becomes a queue (W24)."""

    @abstractmethod
    def resume(self, queues: Sequence[str] | None) -> None:
        """Give out jobs of these queues, or of all, again (W24)."""

    @abstractmethod
    def remove(self, queues: Sequence[str] | None, *, go_on: Callable[[], bool] = lambda: True) -> None:
        """Drop what is enqueued in these queues, or in all, and forget them and their pauses (W24)."""

    @abstractmethod
    def latency(self, queues: Sequence[str]) -> dict[str, float]:
        """Seconds the oldest enqueued job of each queue has waited; 0.0 where none waits (W24)."""

    @abstractmethod
    def flush(self, *, go_on: Callable[[], bool] = lambda: True) -> None:
        """Forget all jobs, queues, pauses and totals; worker processes stay (W25).

        A Faktory server may refuse it (CommandRefused); this database never does.
        """

    @abstractmethod
    def track_set(self, updates: Sequence[TrackUpdate]) -> None:
        """Keep what is said of stored jobs, and lengthen reservations, to 24 h from now at most (W27)."""

    @abstractmethod
    def track_get(self, jids: Sequence[str]) -> list[Tracked]:
        """How jobs are doing, whether they asked to be tracked or not (W27)."""

    @abstractmethod
    def new_batch(self, batch: NewBatch, *, by: str = "") -> str:
        """Make a batch; returns its bid. `by` is the wid of who asks: as a child it is added to its parent (W26).

        Raises UnknownBatch, BatchClosed.
        """

    def withdraw_batches(self, bids: Collection[str]) -> None:  # noqa: B027  (a store without batches has none)
        """Remove those of these batches that are stored, empty and not committed: their makers got an error."""

    @abstractmethod
    def check_batch(self, bid: str, *, by: str = "") -> None:
        """Raise UnknownBatch or BatchClosed when it is known that `by` cannot add to this batch now."""

    @abstractmethod
    def open_batch(self, bid: str, *, by: str = "") -> str:
        """Open a committed batch again and return its bid: no callback comes until it is committed once more (W26).

        An uncommitted one stays as it is. Raises UnknownBatch, BatchClosed.
        """

    @abstractmethod
    def commit_batch(self, bid: str) -> None:
        """The batch's definition is complete; twice is once (W26). Raises UnknownBatch, BatchClosed."""

    @abstractmethod
    def batch_status(self, bid: str) -> BatchStatus:
        """How a batch is doing (W26). Raises UnknownBatch."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """The numbers of INFO, without the part about the server process (W22); `workers` are those that live."""

    @abstractmethod
    def close(self) -> None:
        """Let go of this thread's connection; the broker stays usable."""
