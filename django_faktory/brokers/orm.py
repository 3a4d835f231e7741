"""Implement `Broker` on this Django database: the broker is a `Store`, and functions of the store are its verbs.

`OrmBroker` adds lock keys, and the notification of pushed jobs; all rules are in `store`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from django.db import DatabaseError, Error, transaction

from ..core.locket import Locket
from ..core.logs import get_logger
from ..core.loop_connection import InThread, LoopConnection
from ..core.mutation import Mutation
from ..core.payloads import Ack, ExchangeReply, FetchRequest, JobPayload, Reservation, WorkerIdentity
from ..core.steps import StepRecord
from ..errors import BrokerUnavailable, EndRolledBack, FaktoryError, InvalidPayload
from ..store import queues, workers
from ..store.batches import batches
from ..store.database_errors import ErrorKind, first_line, is_collision, kind_of, refused_data
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
    steps,
    tracking,
    transitions,
    waits,
)
from ..store.locks import locks
from ..store.notifier.base import ANY_QUEUE
from ..store.statistics import counts
from ..store.store import Store
from ..store.transactions import limited_lock_wait
from .atomic_tasks import atomic
from .base import Broker, Transaction

logger = get_logger(__name__)

_NO_LOCKET = Locket({})

REMEMBER_QUEUE_S = 10.0
"""Seconds for which a broker assumes that a queue still has its row: another node may have deleted it."""

MOST_KNOWN_QUEUES = 10_000
"""Maximum number of queues that a broker remembers; beyond it, all are forgotten."""


class OrmBroker(Store, Broker):
    """Broker that stores jobs as rows of the database `alias`. Options other than these are those of `Store`.

    Each verb runs in a transaction of its own, or joins the caller's transaction.
    """

    transactional = True
    keeps_results = True
    cancels = True
    supports_interrupt = True

    ack = acknowledgements.ack
    batch_status = batches.status
    beat = workers.beat
    bye = workers.unregister
    cancel = transitions.cancel
    cancelled = transitions.find_cancelled
    check_batch = batches.check_open
    commit_batch = batches.commit
    confirm = prefetch.confirm
    extend_locks = locks.extend_held
    fail = failures.fail
    find_signal = waits.find_signal
    info = counts.snapshot
    interrupt = failures.interrupt
    keep_logs = run_logs.keep_logs
    latency = queues.latency
    lost = failures.reclaim_lost
    new_batch = batches.new
    open_batch = batches.reopen
    register = workers.register
    read_step_result = steps.read_step_result
    read_steps = steps.read_steps
    release = releases.release
    signal = waits.signal
    take_signal = waits.take_signal
    track_get = tracking.track_get
    track_set = tracking.track_set
    withdraw_batches = batches.withdraw

    def __init__(
        self,
        alias: str = "default",
        *,
        announces_in_thread: bool = False,
        remember_queue_s: float = REMEMBER_QUEUE_S,
        locket: Locket = _NO_LOCKET,
        **options: Any,
    ) -> None:
        super().__init__(alias, lock_lease_s=locket.lease_s, **options)
        self.locket = locket
        self.lock_heartbeat_s = locket.heartbeat_s
        self._announces_in_thread = announces_in_thread  # in a thread of its own: no caller waits for it
        self._remember_queue_s = remember_queue_s
        self._known_queues: set[str] = set()
        self._known_until = 0.0

    @property
    def has_single_writer(self) -> bool:
        return self.dialect.has_single_writer

    @property
    def supports_lock_handoff(self) -> bool:
        return self.dialect.supports_lock_handoff

    def limited_lock_wait(self, seconds: float) -> AbstractContextManager[None]:
        return limited_lock_wait(seconds)

    def atomic(self) -> AbstractContextManager[Transaction]:
        return atomic(self.alias)

    def ack_last(self, ack: Ack, job: Reservation) -> bool:
        with self._last_statement():
            if ack.log:
                self._keep_last_log(ack)
            # A subclass may have overridden `ack`; the statement for the last acknowledgement would bypass it.
            if type(self).ack is not OrmBroker.ack:
                return super().ack_last(ack, job)
            return acknowledgements.ack_last(self, ack, job)

    def record_step(self, job: Reservation, step: StepRecord) -> None:
        with self._last_statement():
            steps.record_step(self, job, step)

    @contextmanager
    def _last_statement(self) -> Iterator[None]:
        """Raise what an error of the last statement of a task's transaction means."""
        try:
            yield
        except InvalidPayload as error:
            raise acknowledgements.invalid_result(error) from error
        except (Error, UnicodeEncodeError) as error:
            kind = kind_of(error)
            if kind is ErrorKind.DATA:
                raise acknowledgements.invalid_result(refused_data(error)) from error
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
        pushed = pushes.push(self, stored)
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

    def exchange(
        self, jobs_: Sequence[JobPayload], acks: Sequence[Ack], requests: Sequence[FetchRequest]
    ) -> ExchangeReply:
        """Run `ack`, `push` and `fetch` in one transaction if the dialect and the jobs allow it."""
        if requests:  # pushes and acks alone need not fail because of wrong lock settings
            self.locket.raise_if_invalid()
        stored, refused = self._with_lock_keys(jobs_) if self.locket.is_enabled else (jobs_, [])
        reply = exchanges.exchange(self, stored, acks, requests)
        self._notify_after_commit(stored)
        return reply._replace(pushed=_merge_answers(refused, reply.pushed)) if refused else reply

    def ack_and_fetch(
        self, acks: Sequence[Ack], request: FetchRequest
    ) -> tuple[Sequence[FaktoryError | bool], list[Reservation]]:
        reply = self.exchange([], acks, [request])
        return reply.acked, reply.fetched[0]

    @property
    def can_use_loop(self) -> bool:
        return not self._overrides_protocol_methods() and self.dialect.can_use_loop(self.connection)

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
            or (requests and self.claim_numbers.has_checks_left())
            or (queues_ and not self._needs_only_notification(queues_))
        ):
            return None
        # Ends are recorded at once: Django's commit hooks do not know this transaction.
        work = exchanges.Exchange(self, jobs_, acks, requests, self.record_ended_now)
        reply = await async_exchange.exchange(connection, work, in_thread)
        if reply is not None:
            if queues_:
                self._announce(self.alias, queues_)
            self.record_started(reply.fetched)
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
        self.locket.raise_if_invalid()
        return claims.fetch(self, requests)

    @property
    def supports_prefetch(self) -> bool:
        return self.dialect.supports_prefetch and not self._overrides_protocol_methods()

    def assign_prefetched(self, job: Reservation, wid: str) -> Reservation:
        self.record_started([[job]], from_buffer=True)
        return super().assign_prefetched(job, wid)

    def hello(self, worker: WorkerIdentity) -> None:
        [refusal] = self.register([worker])
        if refusal is not None:
            raise refusal

    def mutate(self, mutation: Mutation, *, should_continue: Callable[[], bool] = lambda: True) -> None:
        """Change the matching jobs step by step; after each step of a requeue, workers are notified.

        Workers thus start the first jobs while later steps run.
        """
        for changed in bulk.execute_steps(bulk.mutate(self, mutation), should_continue):
            # The other commands make no job ready.
            if changed and mutation.command == "requeue":
                self.announce({ANY_QUEUE})

    def pause(self, queues_: Sequence[str] | None, *, by: str = "", reason: str = "") -> None:
        queues.pause(self, queues_, by=by, reason=reason)

    def resume(self, queues_: Sequence[str] | None) -> None:
        queues.resume(self, queues_)

    def remove(self, queues_: Sequence[str] | None, *, should_continue: Callable[[], bool] = lambda: True) -> None:
        for _ in bulk.execute_steps(bulk.remove_queues(self, queues_), should_continue):
            # The next push must insert the rows of deleted queues again.
            self._known_queues.clear()

    def flush(self, *, should_continue: Callable[[], bool] = lambda: True) -> None:
        for _ in bulk.execute_steps(bulk.flush(self), should_continue):
            self._known_queues.clear()

    def close(self) -> None:
        self.connection.close()


def _merge_answers(
    refused: Sequence[FaktoryError | None], pushed: Sequence[FaktoryError | None]
) -> list[FaktoryError | None]:
    """Return one answer per job: the error of its lock key, or the answer of the store."""
    # `pushed` has answers only for the jobs without an error.
    answers = iter(pushed)
    return [error or next(answers) for error in refused]
