"""Define `Broker`, the interface to the job store: one method for each verb of the protocol, for a set of items.

The FWP server, the worker and the producers use a Broker, and below it only `store.notifier`; a worker needs only a
`WorkerBroker`. There are two implementations: this Django database (`orm`) and a remote Faktory server (`remote`); this
module depends on neither. Answers have the order of the arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from ..core.loop_connection import InThread, LoopConnection
from ..core.mutation import Mutation
from ..core.payloads import (
    Ack,
    BatchStatus,
    Beat,
    Delivery,
    ExchangeReply,
    Failure,
    FetchRequest,
    Interruption,
    JobPayload,
    NewBatch,
    Reservation,
    Tracked,
    TrackUpdate,
    WorkerIdentity,
    interruption_failure,
)
from ..core.steps import StepRecord
from ..errors import FaktoryError


class Transaction:
    """A transaction that `Broker.atomic` opened.

    Hooks that run after the commit may raise an exception although the transaction is committed: check `is_committed`.
    """

    is_committed = False
    is_nested = False
    """Whether it is part of an outer transaction, and is committed only with the outer one."""
    is_in_test = False
    """Whether that outer transaction is the one that Django's TestCase opens around a test."""
    # `staticmethod`, because a plain function in the class body would be called with the instance.
    is_untouched: Callable[[], bool] = staticmethod(lambda: False)
    """Return whether nothing has been done in the transaction yet; False if unknown. Call it inside the transaction."""


class WorkerBroker(ABC):
    """The verbs of a process that runs jobs. Safe to call from several threads.

    Every verb raises BrokerUnavailable if the store is unreachable. Then either nothing was changed, or (if the
    connection was lost during the commit) the same call may be repeated without harm. Inside a transaction of the
    caller, the caller gets Django's error instead.
    """

    blocking = False
    """Whether fetch itself waits (up to 2 s) for a job.

    If not, it returns at once, and the caller waits for a notification.
    """

    keeps_results = False
    """Whether `Ack.result` is stored."""

    cancels = False
    """Whether running jobs can be cancelled."""

    supports_interrupt = False
    """Whether `interrupt` releases jobs without counting a failure."""

    lock_heartbeat_s = 30.0
    """Interval between two calls of `extend_locks`, in seconds."""

    # Properties, because they depend on the database.
    @property
    def has_single_writer(self) -> bool:
        """Return whether the store admits one write transaction at a time, so that a long one delays all others."""
        return False

    @property
    def supports_lock_handoff(self) -> bool:
        """Return whether `ack_and_fetch` passes a lock from an ended job to the next one without freeing its key."""
        return False

    @abstractmethod
    def hello(self, worker: WorkerIdentity) -> None:
        """Register a worker process, or refresh its registration; its state is not reset."""

    # A set: one statement serves all waiting BEATs, so that a large number of clients delays none of them (ADR 0005).
    @abstractmethod
    def beat(self, beats: Sequence[Beat]) -> list[FaktoryError | str]:
        """Record heartbeats. Answers: "", the state to enter ("quiet", "terminate"), or UnknownWorker."""

    @abstractmethod
    def bye(self, wids: Sequence[str]) -> None:
        """Unregister worker processes that ended properly; jobs that they still hold return to their old places."""

    # Only if the parent process saw the exit: all other losses are detected by missing BEATs (ADR 0017).
    @abstractmethod
    def lost(self, wids: Sequence[str], *, reason: str = "") -> int:
        """Reclaim the jobs of dead worker processes: they are enqueued again, or dead at the third loss (W20).

        `reason` is how the processes died; it is recorded with the loss in each job's history. Returns the number of
        jobs.
        """

    @abstractmethod
    def fetch(self, requests: Sequence[FetchRequest]) -> list[list[Reservation]]:
        """Reserve jobs: up to `count` for each request, in the order of its queues, then priority, then age (W13).

        A request of a quiet or terminating worker gets no job, and paused queues give out none.
        """

    # One answer per ack: batch members are ended in a separate transaction, which may fail alone (ADR 0011).
    @abstractmethod
    def ack(self, acks: Sequence[Ack]) -> Sequence[FaktoryError | bool]:
        """End jobs successfully; return one answer for each ack.

        False: nothing was changed, because the job is not stored, not working, or held by another worker (W16).
        BrokerUnavailable as an answer: this job was not ended, although other jobs of the set were; send this ack
        again.
        """

    def ack_and_fetch(
        self, acks: Sequence[Ack], request: FetchRequest
    ) -> tuple[Sequence[FaktoryError | bool], list[Reservation]]:
        """End jobs and reserve others; one transaction if `supports_lock_handoff`. Answers are those of both verbs."""
        acked = self.ack(acks)
        [reservations] = self.fetch([request])
        return acked, reservations

    @abstractmethod
    def fail(self, failures: Sequence[Failure]) -> list[FaktoryError | bool]:
        """Report failures. True: recorded; False: the job has another holder; JobNotFound: the jid is unknown (W17)."""

    # Not a failure: the job was never started, so no attempt is used up.
    @abstractmethod
    def release(self, reservations: Sequence[Reservation]) -> int:
        """Return reserved jobs that were not started to their old places in their queues (W14).

        Returns the number of released jobs.
        """

    def interrupt(self, interruptions: Sequence[Interruption]) -> list[FaktoryError | bool]:
        """Release jobs that a stopping worker has started, without counting an attempt, an error or a loss.

        Answers have the form of `fail`. A store that cannot do this receives failures with the error type
        `WorkerShutdown`.
        """
        # The protocol has no verb to give a started job back; the error type at least names the reason in its history.
        return self.fail([interruption_failure(interruption) for interruption in interruptions])

    @abstractmethod
    def track_set(self, updates: Sequence[TrackUpdate]) -> None:
        """Store the progress of jobs, and extend their reservations, to at most 24 h from now (W27)."""

    def cancelled(self, jids: Sequence[str]) -> list[str]:  # noqa: ARG002
        """Return the jids of these running jobs that have been cancelled."""
        return []

    def extend_locks(self, tokens: Collection[int]) -> set[int]:  # noqa: ARG002
        """Extend the locks of running jobs; return the tokens of lost locks.

        Other jobs may have acquired the lost locks by now.
        """
        # The protocol has no verb for locks: a server extends those of a wid with its BEAT (ADR 0015).
        return set()

    def atomic(self) -> AbstractContextManager[Transaction]:
        """Open a transaction that includes this thread's pushes and acks.

        Raises FaktoryError if the store has no transactions.
        """
        raise FaktoryError(
            'atomic tasks and steps need their jobs in this project\'s database: FAKTORY["BROKER"] = "orm"'
        )

    def ack_last(self, ack: Ack, job: Reservation) -> bool:  # noqa: ARG002
        """Acknowledge this job as the last operation inside `atomic`; the transaction may be committed at once with it.

        Returns False, or raises ReservationLost, if the job is no longer this worker's: then the transaction must not
        be committed.
        """
        # The COMMIT follows as a message of its own; a store may override this to send both in one (ADR 0007).
        return self.ack([ack]) == [True]

    def read_steps(self, job: Reservation) -> dict[tuple[str, str], StepRecord]:
        """Return what earlier runs of this job have committed, by name and key, without results."""
        raise NotImplementedError

    def read_step_result(self, job: Reservation, name: str, key: str) -> str | None:
        """Return the result of a step that is among `read_steps`."""
        raise NotImplementedError

    def record_step(self, job: Reservation, step: StepRecord) -> None:
        """Record a step as the last operation inside `atomic`; the transaction may be committed at once with it.

        Raises ReservationLost if the job is no longer this worker's: then the transaction must not be committed.
        """
        raise NotImplementedError

    def find_signal(self, job: Reservation, name: str) -> tuple[int, str] | None:
        """Return id and payload, JSON, of the oldest signal of this name to the job; None if there is none."""
        raise NotImplementedError

    def take_signal(self, signal_id: int) -> None:
        """Delete a signal inside `atomic`, before its payload is recorded as a step."""
        raise NotImplementedError

    def keep_logs(self, acks: Sequence[Ack]) -> None:  # noqa: B027  (optional)
        """Store the log lines of these runs, before their jobs end. Does nothing if the store has no place for them."""

    @abstractmethod
    def close(self) -> None:
        """Close this thread's connection; the broker remains usable."""


class BatchBroker(ABC):
    """The verbs of batches (W26)."""

    @abstractmethod
    def new_batch(self, batch: NewBatch, *, caller_wid: str = "") -> str:
        """Create a batch; return its bid. `caller_wid` is the caller's wid: a child batch is added to its parent (W26).

        A batch that already has a bid is stored only once, however often it is sent. Raises UnknownBatch, BatchClosed.
        """

    @abstractmethod
    def check_batch(self, bid: str, *, caller_wid: str = "") -> None:
        """Raise UnknownBatch or BatchClosed if it is known that `caller_wid` cannot add to this batch now."""

    @abstractmethod
    def open_batch(self, bid: str, *, caller_wid: str = "") -> str:
        """Reopen a committed batch and return its bid: no callback runs until it is committed again (W26).

        An uncommitted batch stays unchanged. Raises UnknownBatch, BatchClosed.
        """

    @abstractmethod
    def commit_batch(self, bid: str) -> None:
        """Close the batch's definition; idempotent (W26). Raises UnknownBatch, BatchClosed."""

    @abstractmethod
    def batch_status(self, bid: str) -> BatchStatus:
        """Return the status of a batch (W26). Raises UnknownBatch."""


class ManagementBroker(ABC):
    """The verbs of people and tools: numbers, queues, and changes of many jobs."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return the numbers of INFO without those of the server process (W22); `workers` counts live workers."""

    @abstractmethod
    def latency(self, queues: Sequence[str]) -> dict[str, float]:
        """Return how many seconds the oldest enqueued job of each queue has waited; 0.0 for an empty queue (W24)."""

    @abstractmethod
    def pause(self, queues: Sequence[str] | None, *, by: str = "", reason: str = "") -> None:
        """Stop delivering jobs of these queues, or of all existing ones; an unknown name becomes a queue (W24).

        `by` and `reason` are shown; `by` is this host and process if it is empty.
        """

    @abstractmethod
    def resume(self, queues: Sequence[str] | None) -> None:
        """Deliver jobs of these queues, or of all, again (W24)."""

    @abstractmethod
    def remove(self, queues: Sequence[str] | None, *, should_continue: Callable[[], bool] = lambda: True) -> None:
        """Delete the enqueued jobs of these queues, or of all, and the queues with their pauses (W24)."""

    # In steps, so that neither the rows' locks nor the transaction last as long as the whole command (W23).
    @abstractmethod
    def mutate(self, mutation: Mutation, *, should_continue: Callable[[], bool] = lambda: True) -> None:
        """Change all jobs of a set that match a filter, in short steps (W23).

        `should_continue` is called between two steps; if it returns False, FaktoryError is raised and the finished
        steps remain. As with `remove` and `flush`, the same call again completes the work.
        """

    @abstractmethod
    def flush(self, *, should_continue: Callable[[], bool] = lambda: True) -> None:
        """Delete all jobs, queues, pauses and totals; worker processes stay registered (W25).

        A Faktory server may refuse it (CommandRefused); this database never does.
        """

    @abstractmethod
    def track_get(self, jids: Sequence[str]) -> list[Tracked]:
        """Return the state and progress of jobs, with or without `track` (W27)."""

    def cancel(self, jids: Sequence[str]) -> int:  # noqa: ARG002
        """Delete waiting jobs, and ask the workers of running jobs to cancel them; return the number of jobs.

        Raises FaktoryError if the store cannot cancel jobs.
        """
        raise FaktoryError(
            'jobs can be cancelled in this project\'s database only: FAKTORY["BROKER"] = "orm"; a Faktory server '
            "knows no such command"
        )

    def signal(self, jid: str, name: str, payload: str) -> None:  # noqa: ARG002
        """Send a signal to a job, with JSON, in the caller's transaction if there is one.

        Raises JobNotFound, InvalidTransition if the job has ended, InvalidPayload, and FaktoryError if the store has no
        signals.
        """
        raise FaktoryError('signals need jobs in this project\'s database: FAKTORY["BROKER"] = "orm"')


class Broker(WorkerBroker, BatchBroker, ManagementBroker):
    """Interface of a complete job store: pushes, the server's exchanges, and the verbs of all callers."""

    transactional = False
    """Whether push takes part in the caller's database transaction."""

    @abstractmethod
    def push(self, jobs: Sequence[JobPayload]) -> Sequence[FaktoryError | None]:
        """Store jobs.

        Each job has its own answer: None, or the reason of its refusal; one refusal does not affect other jobs.

        A jid that is stored and not finished is accepted and changes nothing, so that a sender may repeat a push after
        a lost connection (W10). A finished job is replaced.
        """

    def register(self, identities: Sequence[WorkerIdentity]) -> Sequence[FaktoryError | None]:
        """Register a set of worker processes; one answer for each: None, or the reason of its refusal."""
        # The protocol has one HELLO per process; a store with a statement for a set overrides this.
        for identity in identities:
            self.hello(identity)
        return [None] * len(identities)

    def exchange(
        self, jobs: Sequence[JobPayload], acks: Sequence[Ack], requests: Sequence[FetchRequest]
    ) -> ExchangeReply:
        """Run `ack`, `push` and `fetch` in this order, in one round trip and one commit if the store supports that.

        Raises the same errors as these verbs. If the three are one transaction, an error means that nothing was done.
        """
        # Fetch last, so that it finds jobs that the acks made ready or the push has just stored.
        acked = self.ack(acks)
        return ExchangeReply(self.push(jobs), acked, self.fetch(requests))

    @property
    def can_use_loop(self) -> bool:
        """Return whether `take_connection` is likely to succeed, so that few exchanges need a thread."""
        return False

    def take_connection(self) -> LoopConnection | None:
        """Take this thread's connection for an event loop (ADR 0005), after the thread has used it; None if impossible.

        The thread opens another one when it needs one.
        """
        return None

    async def exchange_on_loop(
        self,
        connection: LoopConnection,
        jobs: Sequence[JobPayload],
        acks: Sequence[Ack],
        requests: Sequence[FetchRequest],
        in_thread: InThread,
    ) -> ExchangeReply | None:
        """Run `exchange` on the event loop without blocking it; None, with nothing done, if a thread must run it.

        Its remaining work, such as the lock of a job, is done `in_thread`.
        """
        raise NotImplementedError

    @property
    def supports_prefetch(self) -> bool:
        """Return whether `exchange` may return prefetched jobs, which must be delivered or released (ADR 0026)."""
        return False

    def assign_prefetched(self, job: Reservation, wid: str) -> Reservation:
        """Deliver a prefetched job to a worker; return it with its wid. Writes nothing.

        The delivery must be confirmed within 60 s of the exchange unless the job has ended by then.
        """
        # A write for each delivery would cost the statement that prefetching saves (ADR 0026).
        return msgspec.structs.replace(job, wid=wid)

    def confirm(self, deliveries: Sequence[Delivery]) -> set[str]:  # noqa: ARG002  (there is none)
        """Start the reservations of delivered jobs (`Lease.DELIVERY`) at the time of their delivery; skip ended jobs.

        Waits for no other transaction: returns the jids of locked rows; confirm these again.
        """
        return set()

    # The server generates the bid itself, so it can find the batch of a BATCH NEW that got no answer (ADR 0024).
    def withdraw_batches(self, bids: Collection[str]) -> None:
        """Delete the stored, empty and uncommitted batches among these: their BATCH NEW was answered with an error."""

    def limited_lock_wait(self, seconds: float) -> AbstractContextManager[None]:  # noqa: ARG002
        """Limit how long verbs of this thread wait for other transactions' locks; after that they raise LockTimeout."""
        # A remote server limits its waits for locks itself (ADR 0024).
        return nullcontext()
