"""Push, acknowledge and fetch jobs in one transaction: the hot path of the server. Rules: W10, W13, W14, W16.

`execute` runs an `Exchange` in a thread; `async_exchange` sends one from the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.payloads import Ack, ExchangeReply, FetchRequest, JobPayload, Reservation, is_storable
from ...errors import BrokerUnavailable, FaktoryError, InvalidPayload
from ..dialects.values import AckResult, ClaimPlan, EndedRun
from ..store import Store
from ..transactions import run
from . import acknowledgements, prefetch, releases
from .acknowledgements import ack, make_waiters_ready
from .claims import (
    ClaimContext,
    are_alike,
    distribute,
    drop_unstorable_queues,
    fetch_after_commit,
    fetch_filtered,
    first_plan,
    is_runnable,
    plan_per_request,
)
from .pushes import CHUNK, may_wait, order_jobs, push

NO_CLAIM = ClaimPlan()
"""The plan of an exchange without requests."""


class Exchange:
    """One exchange: the jobs, acks and fetch requests, and the conversion of the database's reply into their results.

    Used by `execute` in a thread and by `store.jobs.async_exchange` on the event loop, so that both paths share one
    implementation.
    """

    def __init__(
        self,
        store: Store,
        jobs: Sequence[JobPayload],
        acks: Sequence[Ack],
        requests: Sequence[FetchRequest],
        record_ended: Callable[[Collection[EndedRun]], None],
    ) -> None:
        self.store, self.jobs, self.acks, self.record_ended = store, jobs, acks, record_ended
        self.context = ClaimContext.of(store, requests)
        self.requests = [drop_unstorable_queues(request) for request in requests] if requests else requests

    def is_one_transaction(self) -> bool:
        """Return True if the database can execute the exchange as one transaction."""
        if max(len(self.jobs), len(self.acks)) > CHUNK:
            return False
        if self.jobs and may_wait(self.jobs, self.store.dialect):
            return False
        return not self.acks or is_storable("".join([ack.jid for ack in self.acks]))

    def may_hand_off_lock(self) -> bool:
        """Return True if a lock handoff (`Dialect.hand_off_lock`, ADR 0015) should be tried first.

        It needs exactly one ack and no push, and the dialect must expect that the ended job has a successor.
        """
        if self.jobs or len(self.acks) != 1 or not self.requests:
            return False
        return self.store.dialect.expects_lock_handoff(self.acks[0].jid) and self.wants_jobs()

    def wants_jobs(self) -> bool:
        """Return True if at least one request asks for a job."""
        return any(request.count for request in self.requests)

    def plan(self, number: int) -> ClaimPlan:
        """Return the claim plan, marked with this claim number. If it has no slots, count the waiting jobs first."""
        plan = (plan_per_request(self.requests) if self.store.dialect.claims_in_turn else None) or first_plan(
            self.requests
        )
        # A plan without slots although a job is requested: `distribute` claims later, without prefetch.
        may_prefetch = plan.slots or not self.wants_jobs()
        prefetch_slots, candidate_wids = prefetch.find_slots(self.requests) if may_prefetch else ((), ())
        context = self.context
        # Built in one step, not with `fill_plan`, which would copy the plan: each exchange of the server needs one.
        return ClaimPlan(
            slots=plan.slots,
            limit=plan.limit,
            lease_s=context.lease_s,
            claim=number,
            at_least_s=context.at_least_s,
            at_most_s=context.at_most_s,
            prefetch_slots=prefetch_slots,
            candidate_wids=candidate_wids,
            bounds=self.store.bounds,
            next_plans=plan.next_plans,
        )

    def needs_no_query(self, plan: ClaimPlan, ending: AckResult, claimed: Sequence[Reservation]) -> bool:
        """Return True if `conclude` needs no further query, so that the event loop can call it."""
        if ending.remaining or ending.has_waiters:
            return False
        if not all(map(is_runnable, claimed)):
            return False
        if not self.requests or plan.next_plans or are_alike(self.requests):
            return True
        # Different requests that got too few jobs need a second plan, by the number of waiting jobs.
        return sum(not job.is_prefetched for job in claimed) >= sum(request.count for request in self.requests)

    def schedule_checks(self, plan: ClaimPlan) -> None:
        """Schedule checks of a claim whose outcome is unknown. Without requests nothing was claimed."""
        if plan.claim is not None and self.requests:
            self.store.claim_numbers.schedule_checks(plan.claim)

    def conclude(self, plan: ClaimPlan, ending: AckResult, claimed: list[Reservation]) -> ExchangeReply:
        """Finish the exchange and return its results. May block on further queries, see `needs_no_query`.

        Ends the jobs that the hot statement left unchanged, acquires locks and permits for the claimed jobs, and
        claims replacements for jobs that lose the race for a lock or permit.
        """
        context = self.context
        make_waiters_ready(self.store, ending)
        acked: Sequence[FaktoryError | bool] = []
        if self.acks:
            acked = acknowledgements.conclude(self.store, ending, self.acks, self.record_ended)
        if not self.requests:
            return ExchangeReply([None] * len(self.jobs), acked, [])
        # Prefetched jobs are always plain: they need neither lock nor permit, and belong to no request yet (ADR 0026).
        requested = [job for job in claimed if not job.is_prefetched] if plan.prefetch_slots else claimed
        runnable = context.acquire_locks_and_permits(plan, requested)
        is_all = len(plan.next_plans) > 0 and len(runnable) == len(requested)
        fetched = distribute(self.requests, runnable, context, has_committed_work=True, is_all=is_all)
        if len(requested) < len(claimed):
            fetched = prefetch.append_prefetched(fetched, self.requests, [job for job in claimed if job.is_prefetched])
        return ExchangeReply([None] * len(self.jobs), acked, fetched)


def exchange(
    store: Store, jobs: Sequence[JobPayload], acks: Sequence[Ack], requests: Sequence[FetchRequest]
) -> ExchangeReply:
    """Run `ack`, `push` and `fetch` in one transaction if the dialect and the jobs allow it; on PostgreSQL in one round
    trip.

    A pushed job may be fetched by a request of the same exchange.
    """
    if requests:  # pushes and acks alone need not wait for it
        releases.release_unanswered(store)
    reply = execute(Exchange(store, jobs, acks, requests, store.record_ended))
    store.record_started(reply.fetched)
    return reply


def execute(work: Exchange) -> ExchangeReply:
    """Execute an exchange, in one transaction if the dialect can; blocks until the database has committed."""
    store = work.store
    if not work.is_one_transaction():
        return _execute_apart(work)
    if work.may_hand_off_lock():
        handoff = _hand_off_lock(work)
        if handoff:
            return handoff
    with store.claim_numbers.numbered() as number:
        plan = work.plan(number) if work.requests else NO_CLAIM
        try:
            ending, claimed = run(
                store.alias,
                lambda connection: _exchange(connection, work, plan),
                # On PostgreSQL all statements are one message, which is a transaction by itself.
                atomic=not store.dialect.can_join(store.connection),
            )
        except InvalidPayload:  # nothing was changed: each verb alone finds the value that the database refuses
            if store.connection.in_atomic_block:
                raise
            return _execute_apart(work)
        # Inside the block: it may claim replacements with the same number, and an error must schedule their checks.
        return work.conclude(plan, ending, claimed)


def _exchange(connection: BaseDatabaseWrapper, work: Exchange, plan: ClaimPlan) -> tuple[AckResult, list[Reservation]]:
    dialect, jobs, acks, now = work.store.dialect, order_jobs(work.jobs), work.acks, work.store.clock()
    if dialect.one_statement:
        return dialect.exchange(connection, jobs, acks, plan, now)
    # Ends come first, and lock the rows that the insert may replace as well: all rows in one order (ADR 0024).
    pushed = [job.jid for _, job in jobs]
    ending = acknowledgements.end(work.store, acks, pushed=pushed) if acks else AckResult({}, set())
    if jobs:
        dialect.insert(connection, jobs, now)
    return ending, dialect.claim(connection, plan, now) if plan.slots else []


def _execute_apart(work: Exchange) -> ExchangeReply:
    """Execute acks, pushes and requests in transactions of their own."""
    # Acks first: the locks and permits that they release may be what the fetched jobs need.
    acked = ack(work.store, work.acks)
    pushed = _push_after_acks(work)
    # Each is a transaction: an error of one must not be the answer to the others, which are committed.
    fetch = fetch_after_commit if work.acks or work.jobs else fetch_filtered
    return ExchangeReply(pushed, acked, fetch(work.requests, work.context))


def _push_after_acks(work: Exchange) -> Sequence[FaktoryError | None]:
    try:
        return push(work.store, work.jobs)
    except BrokerUnavailable as error:
        if not work.acks or work.store.connection.in_atomic_block:
            raise
        return [error] * len(work.jobs)


def _hand_off_lock(work: Exchange) -> ExchangeReply | None:
    """Execute an exchange as a lock handoff; return None, with nothing changed, if that is not possible (ADR 0015).

    The first request that asks for a job gets the next job of the lock key of the job that ends.
    """
    [ack], store, context = work.acks, work.store, work.context
    place = next(place for place, request in enumerate(work.requests) if request.count)
    first, others = work.requests[place], [*work.requests[:place], *work.requests[place + 1 :]]
    plan = first_plan([first])
    if first.count != 1 or not plan.slots:
        return None
    with store.claim_numbers.numbered() as number:
        plan = context.fill_plan(plan, number)
        try:
            handoff = run(
                store.alias,
                lambda connection: store.dialect.hand_off_lock(connection, ack, plan, store.clock()),
                atomic=False,
            )
        except InvalidPayload:  # the usual path answers for the result
            handoff = None
    if handoff is None:
        return None
    work.record_ended(handoff.ended.values())
    # On a hot key most requests find nothing. With four clients on one key their empty claims delayed every reply, so
    # skip the claim if the statement saw that no other job was ready in any of their queues.
    fetched: list[list[Reservation]] = [[] for _ in others]
    if others and not (handoff.is_all and all(set(other.queues) <= set(first.queues) for other in others)):
        fetched = fetch_after_commit(others, context)
    fetched.insert(place, [handoff.job])
    return ExchangeReply([], [True], fetched)
