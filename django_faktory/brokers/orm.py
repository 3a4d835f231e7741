"""Implement `Broker` on this Django database.

`OrmBroker` adds the alias, the commit hooks and the notifications; all rules are in `store`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from typing import Any

from django.db import DatabaseError, Error, connections, transaction

from ..core.histograms import JobTiming, Recorder
from ..core.locket import Locket
from ..core.logs import get_logger
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
    failure,
)
from ..errors import BrokerUnavailable, EndRolledBack, FaktoryError, InvalidPayload, InvalidResult
from ..store import notifier, queues, workers
from ..store.batches import batches
from ..store.database_errors import ErrorKind, first_line, is_collision, kind_of, refused_data
from ..store.dialects import dialect_of
from ..store.dialects.values import EndedRun
from ..store.jobs import (
    acknowledgements,
    async_exchange,
    bulk,
    claims,
    exchanges,
    failures,
    prefetch,
    pushes,
    releases,
    run_logs,
    tracking,
    transitions,
)
from ..store.jobs.unanswered_claims import ClaimNumbers
from ..store.locks import locks
from ..store.notifier.base import ANY_QUEUE
from ..store.outages import of_this_node
from ..store.statistics import counts
from ..store.transactions import limited_lock_wait
from .base import Broker, Transaction
from .transactions import atomic

logger = get_logger(__name__)

_NO_LOCKET = Locket({})

REMEMBER_QUEUE_S = 10.0
"""Seconds for which a broker assumes that a queue still has its row: another node may have deleted it."""

MOST_KNOWN_QUEUES = 10_000
"""Maximum number of queues that a broker remembers; beyond it, all are forgotten."""


class OrmBroker(Broker):
    """Broker that stores jobs as rows of the database `alias`.

    Each verb runs in a transaction of its own, or joins the caller's transaction.
    """

    transactional = True
    keeps_results = True
    cancels = True
    supports_interrupt = True

    def __init__(
        self,
        alias: str = "default",
        *,
        dead_for_s: int = 180 * 86_400,
        max_interruptions: int | None = None,
        worker_timeout_s: float = 60,
        delivery_lease_s: float = 60,
        commit_within_s: float = batches.COMMIT_WITHIN_S,
        announce: Callable[[str, Collection[str]], None] = notifier.announce,
        announces_in_thread: bool = False,
        remember_queue_s: float = REMEMBER_QUEUE_S,
        locket: Locket = _NO_LOCKET,
        recorder: Recorder | None = None,
    ) -> None:
        self.locket = locket
        self.lock_heartbeat_s = locket.heartbeat_s
        self.clock: Callable[[], datetime | None] = _database_time
        self.alias = alias
        self.dead_for_s = dead_for_s
        self.max_interruptions = max_interruptions
        self.worker_timeout_s = worker_timeout_s
        self.delivery_lease_s = delivery_lease_s
        self.commit_within_s = commit_within_s
        self._announce = announce
        self._announces_in_thread = announces_in_thread  # in a thread of its own: no caller waits for it
        self._remember_queue_s = remember_queue_s
        self._metrics = MetricsHook(recorder, alias)
        self._known_queues: set[str] = set()
        self._known_until = 0.0
        self._claim_numbers = ClaimNumbers()

    @property
    def has_single_writer(self) -> bool:
        return dialect_of(connections[self.alias]).has_single_writer

    @property
    def supports_lock_handoff(self) -> bool:
        return dialect_of(connections[self.alias]).supports_lock_handoff

    def limited_lock_wait(self, seconds: float) -> AbstractContextManager[None]:
        return limited_lock_wait(seconds)

    def atomic(self) -> AbstractContextManager[Transaction]:
        return atomic(self.alias)

    def ack_last(self, ack: Ack, job: Reservation) -> bool:
        try:
            if ack.log:
                self._keep_last_log(ack)
            # A subclass may have overridden `ack`; the statement for the last acknowledgement would bypass it.
            if type(self).ack is not OrmBroker.ack:
                return super().ack_last(ack, job)
            return acknowledgements.ack_last(
                ack, job, using=self.alias, now=self.clock(), on_finished=self._metrics.ended
            )
        except InvalidPayload as error:
            raise invalid_result(error) from error
        except (Error, UnicodeEncodeError) as error:
            kind = kind_of(error)
            if kind is ErrorKind.DATA:
                raise invalid_result(refused_data(error)) from error
            # Not an error of the task: its worker reports an interruption, which uses no attempt.
            if kind is ErrorKind.COLLISION:
                raise EndRolledBack(first_line(error)) from error
            raise

    def _keep_last_log(self, ack: Ack) -> None:
        """Store the log lines of an atomic task in its transaction; an error here must not undo the task."""
        try:
            try:
                with transaction.atomic(using=self.alias):  # a savepoint
                    self.keep_logs([ack])
            except InvalidPayload:
                with transaction.atomic(using=self.alias):
                    self.keep_logs([run_logs.with_log_in_ascii(ack)])
        except (DatabaseError, InvalidPayload) as error:
            if is_collision(error):  # it may have rolled back the whole transaction
                raise
            logger.warning("log lines could not be stored jids=%s error=%s", ack.jid, first_line(error))

    def push(self, jobs_: Sequence[JobPayload]) -> Sequence[FaktoryError | None]:
        """Store jobs; the notification of workers is sent after the commit.

        A NOTIFY inside the transaction would take PostgreSQL's global lock, and so serialize the commits of all pushes.
        """
        stored, refused = self._with_lock_keys(jobs_) if self.locket.is_enabled else (jobs_, [])
        pushed = pushes.push(stored, using=self.alias, now=self.clock())
        self._notify_after_commit(stored)
        return _merge_answers(refused, pushed) if refused else pushed

    def _with_lock_keys(self, jobs_: Sequence[JobPayload]) -> tuple[Sequence[JobPayload], list[FaktoryError | None]]:
        """Return the jobs with their lock keys, and for each given job its error or None.

        A job is left out if its key cannot be computed.
        """
        stored: list[JobPayload] = []
        refused: list[FaktoryError | None] = []
        for job in jobs_:
            try:
                stored.append(self.locket.with_lock_key(job))
                refused.append(None)
            except InvalidPayload as error:
                refused.append(error)
        return stored, refused

    def extend_locks(self, tokens: Collection[int]) -> set[int]:
        return locks.extend_held(tokens, using=self.alias)

    def exchange(
        self, jobs_: Sequence[JobPayload], acks: Sequence[Ack], requests: Sequence[FetchRequest]
    ) -> ExchangeReply:
        """Run `ack`, `push` and `fetch` in one transaction if the dialect and the jobs allow it."""
        # Pushes and acks alone need not wait for the release of unanswered claims, nor fail because of wrong lock
        # settings.
        if requests:
            self._release_unanswered_claims()
            self.locket.raise_if_invalid()
        stored, refused = self._with_lock_keys(jobs_) if self.locket.is_enabled else (jobs_, [])
        dialect, context = dialect_of(connections[self.alias]), self._build_claim_context(requests)
        work = exchanges.Exchange(stored, acks, requests, context, self._metrics.ended, dialect=dialect)
        pushed, acked, fetched = exchanges.execute(work)
        acked = self._fail_refused(acks, acked)
        self._notify_after_commit(stored)
        self._metrics.started(fetched)
        return ExchangeReply(_merge_answers(refused, pushed) if refused else pushed, acked, fetched)

    def ack_and_fetch(
        self, acks: Sequence[Ack], request: FetchRequest
    ) -> tuple[Sequence[FaktoryError | bool], list[Reservation]]:
        reply = self.exchange([], acks, [request])
        return reply.acked, reply.fetched[0]

    def _build_claim_context(self, requests: Sequence[FetchRequest]) -> claims.ClaimContext:
        leases = claims.Leases(self.locket.lease_s, self.worker_timeout_s, self.delivery_lease_s)
        return leases.claim_context(requests, using=self.alias, now=self.clock(), claim_numbers=self._claim_numbers)

    @property
    def can_use_loop(self) -> bool:
        connection = connections[self.alias]
        return not self._overrides_protocol_methods() and dialect_of(connection).can_use_loop(connection)

    def take_connection(self) -> LoopConnection | None:
        return None if self._overrides_protocol_methods() else async_exchange.take_connection(self.alias)

    def _overrides_protocol_methods(self) -> bool:
        """Return whether a subclass overrides verbs, which the event loop or a prefetch would bypass."""
        subclass = type(self)
        inherited = (OrmBroker.push, OrmBroker.ack, OrmBroker.fetch, OrmBroker.exchange)
        return (subclass.push, subclass.ack, subclass.fetch, subclass.exchange) != inherited

    async def exchange_on_loop(
        self,
        connection: LoopConnection,
        jobs_: Sequence[JobPayload],
        acks: Sequence[Ack],
        requests: Sequence[FetchRequest],
        in_thread: InThread,
    ) -> ExchangeReply | None:
        queues_ = {job.queue for job in jobs_} if jobs_ else set()
        # The event loop must not block: the thread computes lock keys, releases unanswered claims and inserts queues.
        if (
            not self.locket.is_inactive
            or (requests and self._claim_numbers.has_checks_left())
            or (queues_ and not self._needs_only_notification(queues_))
        ):
            return None
        # Ends are recorded at once: Django's commit hooks do not know this transaction.
        context, on_finished = self._build_claim_context(requests), self._metrics.record_succeeded_now
        dialect = dialect_of(connection.connection)
        work = exchanges.Exchange(jobs_, acks, requests, context, on_finished, dialect=dialect)
        reply = await async_exchange.exchange(connection, work, in_thread)
        if reply is not None:
            if queues_:
                self._announce(self.alias, queues_)
            if reply.fetched:
                self._metrics.started(reply.fetched)
        return reply

    def _needs_only_notification(self, queues_: Collection[str]) -> bool:
        """Return whether a push to these queues needs only a notification, sent without blocking."""
        is_known = time.monotonic() < self._known_until and self._known_queues.issuperset(queues_)
        return self._announces_in_thread and is_known

    def _notify_after_commit(self, jobs_: Sequence[JobPayload]) -> None:
        queues = {job.queue for job in jobs_}
        if queues:
            # Before the commit a worker that is woken would not find the jobs yet.
            transaction.on_commit(partial(self._notify_pushed, queues), using=self.alias)

    def _notify_pushed(self, names: set[str]) -> None:
        # The notification first: INFO needs the queue's row, workers do not.
        self._announce(self.alias, names)
        now = time.monotonic()
        if now >= self._known_until:
            self._known_queues.clear()
        unknown = names - self._known_queues
        if unknown:
            try:
                queues.add(unknown, using=self.alias)
            except BrokerUnavailable:  # the jobs are stored; an empty queue's line in INFO can wait for the next push
                return
            # A client may invent queue names without end, so the memory is bounded.
            if len(self._known_queues) + len(unknown) > MOST_KNOWN_QUEUES:
                self._known_queues.clear()
            if not self._known_queues:
                self._known_until = now + self._remember_queue_s
            self._known_queues.update(unknown)

    def fetch(self, requests: Sequence[FetchRequest]) -> list[list[Reservation]]:
        self._release_unanswered_claims()
        self.locket.raise_if_invalid()
        fetched = claims.fetch_filtered(
            [*map(claims.drop_unstorable_queues, requests)], self._build_claim_context(requests)
        )
        self._metrics.started(fetched)
        return fetched

    def _release_unanswered_claims(self) -> None:
        """Release jobs of claims that got no answer: these jobs were never delivered (ADR 0017)."""
        # Inside the caller's transaction a failure here would break it, and its rollback would undo the release.
        if connections[self.alias].in_atomic_block:
            return
        due_claims = self._claim_numbers.take_due()
        if not due_claims:
            return
        try:
            returned = releases.release_claims(due_claims, using=self.alias)
        except (BrokerUnavailable, Error) as error:  # the caller's own work may succeed all the same
            self._claim_numbers.retry_checks(due_claims)
            of_this_node.record_failure("claims without an answer", first_line(error))
            return
        if returned:
            logger.warning("jobs were claimed and the answer was lost, released jobs=%d", returned)
            # The release returns only a number, so workers of all queues are woken.
            self._announce(self.alias, {ANY_QUEUE})

    def ack(self, acks: Sequence[Ack]) -> Sequence[FaktoryError | bool]:
        answers = acknowledgements.ack(acks, using=self.alias, now=self.clock(), on_finished=self._metrics.ended)
        return self._fail_refused(acks, answers)

    def _fail_refused(
        self, acks: Sequence[Ack], answers: Sequence[FaktoryError | bool]
    ) -> Sequence[FaktoryError | bool]:
        """End the jobs whose results the database refuses: they fail with the reason, and never run again."""
        refused = {
            ack.jid: invalid_result(answer)
            for ack, answer in zip(acks, answers, strict=True)
            if isinstance(answer, InvalidPayload)
        }
        if not refused:
            return answers
        reports = [
            failure(
                jid=ack.jid,
                wid=ack.wid,
                attempt=ack.attempt,
                errtype=InvalidResult.__name__,
                message=str(refused[ack.jid]),
                verdict="kill",
            )
            for ack in acks
            if ack.jid in refused
        ]
        try:
            failed = self.fail(reports)
        except BrokerUnavailable as error:  # the other jobs have ended: only these reports are sent again
            return [error if ack.jid in refused else answer for ack, answer in zip(acks, answers, strict=True)]
        ended = {report.jid for report, answer in zip(reports, failed, strict=True) if answer is True}
        return [
            answer if ack.jid not in refused else ack.jid in ended and refused[ack.jid]
            for ack, answer in zip(acks, answers, strict=True)
        ]

    def fail(self, failures_: Sequence[Failure]) -> list[FaktoryError | bool]:
        return failures.fail(
            failures_,
            using=self.alias,
            now=self.clock(),
            dead_for_s=self.dead_for_s,
            on_failed=partial(self._metrics.ended, succeeded=False),
        )

    @property
    def supports_prefetch(self) -> bool:
        return prefetch.supports(connections[self.alias]) and not self._overrides_protocol_methods()

    def assign_prefetched(self, job: Reservation, wid: str) -> Reservation:
        self._metrics.started([[job]], from_buffer=True)
        return super().assign_prefetched(job, wid)

    def confirm(self, deliveries: Sequence[Delivery]) -> set[str]:
        return prefetch.confirm(deliveries, using=self.alias, now=self.clock())

    def release(self, reservations: Sequence[Reservation]) -> int:
        released = releases.release(reservations, using=self.alias)
        # An idle worker would otherwise find these jobs only with its next poll.
        if released:
            self._announce(self.alias, {job.queue for job in reservations})
        return released

    def interrupt(self, interruptions: Sequence[Interruption]) -> list[FaktoryError | bool]:
        """Release interrupted jobs; beyond `max_interruptions` of one job, an interruption counts as a failure."""
        answers = failures.interrupt(
            interruptions,
            using=self.alias,
            now=self.clock(),
            dead_for_s=self.dead_for_s,
            limit=self.max_interruptions,
            on_failed=partial(self._metrics.ended, succeeded=False),
        )
        if any(answer is True for answer in answers):
            self._announce(self.alias, {interruption.queue for interruption in interruptions})
        return answers

    def cancel(self, jids: Sequence[str]) -> int:
        return transitions.cancel(jids, using=self.alias)

    def cancelled(self, jids: Sequence[str]) -> list[str]:
        return transitions.find_cancelled(jids, using=self.alias)

    def hello(self, worker: WorkerIdentity) -> None:
        [refusal] = self.register([worker])
        if refusal is not None:
            raise refusal

    def register(self, identities: Sequence[WorkerIdentity]) -> list[FaktoryError | None]:
        return workers.register(identities, using=self.alias)

    def beat(self, beats: Sequence[Beat]) -> list[FaktoryError | str]:
        """Record heartbeats, and extend the reservations of the workers' jobs by at least 2 × `worker_timeout_s`."""
        # An idle worker sends no FETCH, but the jobs of its unanswered claims must not wait until their reservations
        # expire.
        self._release_unanswered_claims()
        # Twice the timeout: a worker counts as lost before any of its reservations ends (ADR 0026).
        return workers.beat(beats, using=self.alias, at_least_s=2 * self.worker_timeout_s, now=self.clock())

    def bye(self, wids: Sequence[str]) -> None:
        # Only if jobs were released. Their queues are not known here, so workers of all queues are woken.
        if workers.unregister(wids, using=self.alias):
            self._announce(self.alias, {ANY_QUEUE})

    def lost(self, wids: Sequence[str], *, reason: str = "") -> int:
        lost = failures.reclaim_lost(wids, using=self.alias, dead_for_s=self.dead_for_s, reason=reason)
        if lost:
            self._announce(self.alias, {ANY_QUEUE})
        return lost

    def mutate(self, mutation: Mutation, *, should_continue: Callable[[], bool] = lambda: True) -> None:
        """Change the matching jobs step by step; after each step of a requeue, workers are notified.

        Workers thus start the first jobs while later steps run.
        """
        for changed in bulk.execute_steps(
            bulk.mutate(mutation, using=self.alias, dead_for_s=self.dead_for_s), should_continue
        ):
            # The other commands make no job ready.
            if changed and mutation.command == "requeue":
                self._announce(self.alias, {ANY_QUEUE})

    def pause(self, queues_: Sequence[str] | None, *, by: str = "", reason: str = "") -> None:
        queues.pause(queues_, using=self.alias, by=by, reason=reason)

    def resume(self, queues_: Sequence[str] | None) -> None:
        resumed = queues.resume(queues_, using=self.alias)
        if resumed:
            self._announce(self.alias, resumed)

    def remove(self, queues_: Sequence[str] | None, *, should_continue: Callable[[], bool] = lambda: True) -> None:
        for _ in bulk.execute_steps(bulk.remove_queues(queues_, using=self.alias), should_continue):
            # The next push must insert the rows of deleted queues again.
            self._known_queues.clear()

    def latency(self, queues_: Sequence[str]) -> dict[str, float]:
        return queues.latency(queues_, using=self.alias)

    def flush(self, *, should_continue: Callable[[], bool] = lambda: True) -> None:
        for _ in bulk.execute_steps(bulk.flush(using=self.alias), should_continue):
            self._known_queues.clear()

    def keep_logs(self, acks: Sequence[Ack]) -> None:
        run_logs.keep_logs(acks, using=self.alias)

    def track_set(self, updates: Sequence[TrackUpdate]) -> None:
        tracking.track_set(updates, using=self.alias)

    def track_get(self, jids: Sequence[str]) -> list[Tracked]:
        return tracking.track_get(jids, using=self.alias)

    def new_batch(self, batch: NewBatch, *, caller_wid: str = "") -> str:
        """Create a batch that must be committed within `commit_within_s`."""
        within_s = self.commit_within_s
        return batches.new(batch, using=self.alias, caller_wid=caller_wid, commit_within_s=within_s, now=self.clock())

    def open_batch(self, bid: str, *, caller_wid: str = "") -> str:
        """Reopen a batch; it must be committed again within `commit_within_s`."""
        within_s = self.commit_within_s
        return batches.reopen(bid, using=self.alias, caller_wid=caller_wid, commit_within_s=within_s, now=self.clock())

    def check_batch(self, bid: str, *, caller_wid: str = "") -> None:
        batches.check_open(bid, using=self.alias, caller_wid=caller_wid, now=self.clock())

    def withdraw_batches(self, bids: Collection[str]) -> None:
        if batches.withdraw(bids, using=self.alias):
            self._announce(self.alias, {ANY_QUEUE})  # a parent's callback may be due

    def commit_batch(self, bid: str) -> None:
        batches.commit(bid, using=self.alias, now=self.clock())
        # In a transaction of the caller, the job of the callback is visible only after its commit.
        transaction.on_commit(partial(self._announce, self.alias, {ANY_QUEUE}), using=self.alias)

    def batch_status(self, bid: str) -> BatchStatus:
        return batches.status(bid, using=self.alias)

    def info(self) -> dict[str, Any]:
        return counts.snapshot(using=self.alias, worker_timeout_s=self.worker_timeout_s)

    def close(self) -> None:
        connections[self.alias].close()


def invalid_result(error: InvalidPayload) -> InvalidResult:
    """Return the error of a job whose result the database refuses."""
    return InvalidResult(f"the result was not stored: {str(error).removeprefix('invalid payload: ')}")


def _database_time() -> None:
    """Return None, which means the database's own clock, shared by all nodes. Tests replace it."""


def _merge_answers(
    refused: Sequence[FaktoryError | None], pushed: Sequence[FaktoryError | None]
) -> list[FaktoryError | None]:
    """Return one answer per job: the error of its lock key, or the answer of the store."""
    # `pushed` has answers only for the jobs without an error.
    answers = iter(pushed)
    return [error or next(answers) for error in refused]


class MetricsHook:
    """Metrics hook of one broker; does nothing without a recorder."""

    def __init__(self, recorder: Recorder | None, alias: str) -> None:
        self._recorder, self._alias = recorder, alias

    def started(self, fetched: Iterable[Iterable[Reservation]], *, from_buffer: bool = False) -> None:
        """Record that the fetched jobs were delivered; prefetched ones start when they leave the buffer."""
        if not self._recorder:
            return
        timings = [
            JobTiming(job.queue, job.jobtype, job.waited_s)
            for jobs in fetched
            for job in jobs
            if from_buffer or not job.is_prefetched
        ]
        if timings:
            self._recorder.started(timings)

    def ended(self, jobs: Collection[EndedRun], *, succeeded: bool = True) -> None:
        """Record that these jobs ended, once the transaction commits; `succeeded` is whether they succeeded."""
        if self._recorder and jobs:
            transaction.on_commit(
                partial(self._recorder.ended, _timings_of(jobs), succeeded=succeeded), using=self._alias
            )

    def record_succeeded_now(self, jobs: Collection[EndedRun]) -> None:
        """Record that these jobs succeeded; for exchanges that committed outside Django's transactions."""
        if self._recorder and jobs:
            self._recorder.ended(_timings_of(jobs), succeeded=True)


def _timings_of(ended: Collection[EndedRun]) -> list[JobTiming]:
    return [JobTiming(job.queue, job.jobtype, job.ran_s) for job in ended]
