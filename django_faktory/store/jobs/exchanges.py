"""Push, acknowledge and fetch jobs in one transaction: the hot path of the server. Rules: W10, W13, W14, W16."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django.db import connections

from ...core.payloads import Ack, FetchRequest, JobPayload, Reservation, is_storable
from ...errors import FaktoryError
from ..dialects import dialect_of
from ..dialects.base import Dialect, Ending, Placed, Plan
from ..locks import locks
from ..transactions import run
from . import prefetch
from .acknowledgements import OnEnded, ack, end_members, nobody_asks
from .claims import (
    Claiming,
    answerable,
    are_alike,
    fetch_for,
    first_plan,
    has_all_it_needs,
    more_for,
    plan_in_turn,
    shared_out,
)
from .lost_claims import Unanswered
from .pushes import CHUNK, any_apart, placed, push


class Exchanged(NamedTuple):
    """Result of `exchange`: the results of `push`, `ack` and `fetch`, each in the order of its input."""

    pushed: Sequence[FaktoryError | None]
    acked: list[FaktoryError | bool]
    fetched: list[list[Reservation]]


class Turn:
    """One exchange: the jobs, acks and fetch requests, and the conversion of the database's reply into their results.

    Used by `carry_out` in a thread and by `store.jobs.async_exchange` on the event loop, so that both paths share one
    implementation.
    """

    def __init__(
        self,
        jobs: Sequence[JobPayload],
        acks: Sequence[Ack],
        requests: Sequence[FetchRequest],
        claiming: Claiming,
        on_ended: OnEnded,
    ) -> None:
        self.jobs, self.acks, self.claiming, self.on_ended = jobs, acks, claiming, on_ended
        self.requests = [answerable(request) for request in requests]

    def is_one(self) -> bool:
        """Return True if the database can execute the exchange as one transaction."""
        if max(len(self.jobs), len(self.acks)) > CHUNK or any_apart(
            self.jobs, dialect_of(connections[self.claiming.using])
        ):
            return False
        return all(is_storable(ack.jid) for ack in self.acks)

    def may_be_relay(self, dialect: Dialect) -> bool:
        """Return True if a lock handoff (`Dialect.relay`, ADR 0020) should be tried first.

        It needs exactly one ack and no push, and the dialect must expect that the ended job has a successor.
        """
        is_pair = not self.jobs and len(self.acks) == 1 and self.asks()
        return is_pair and dialect.expects_relay(self.acks[0].jid)

    def asks(self) -> bool:
        """Return True if at least one request asks for a job."""
        return any(request.count for request in self.requests)

    def placed(self) -> Placed:
        """Return the jobs to store, in insertion order."""
        return placed(self.jobs)

    def plan(self, number: int) -> Plan:
        """Return the claim plan, marked with this claim number. Without slots, a query must find the work first."""
        plan = Plan()
        if not are_alike(self.requests) and dialect_of(connections[self.claiming.using]).claims_in_turn:
            plan = plan_in_turn(self.requests)
        if not plan.slots:
            plan = first_plan(self.requests)
        plan = self.claiming.numbered(plan, number)
        # A plan without slots although a job is requested: `shared_out` claims later, without prefetch.
        return prefetch.with_slots(plan, self.requests) if plan.slots or not self.asks() else plan

    def ends_here(self, plan: Plan, ending: Ending, claimed: Sequence[Reservation]) -> bool:
        """Return True if `concluded` needs no further query, so that the event loop can call it."""
        if ending.left or ending.readied or ending.blocked:
            return False
        if not all(has_all_it_needs(job) for job in claimed):
            return False
        if plan.then or are_alike(self.requests):
            return True
        # Different requests that got too few jobs need a second plan, by the number of waiting jobs.
        return sum(not job.is_ahead for job in claimed) >= sum(request.count for request in self.requests)

    def concluded(self, plan: Plan, ending: Ending, claimed: list[Reservation]) -> Exchanged:
        """Finish the exchange and return its results. May block on further queries, see `ends_here`.

        Ends the jobs that the hot statement left unchanged, acquires locks and permits for the claimed jobs, and
        claims replacements for jobs that lose the race for a lock or permit.
        """
        claiming = self.claiming
        if ending.readied:
            locks.tell(connections[claiming.using], set(ending.readied))
        locks.settle_later(connections[claiming.using], ending.blocked)
        acked = end_members(ending, self.acks, using=claiming.using, now=claiming.now, on_ended=self.on_ended)
        # Prefetched jobs are always plain: they need neither lock nor permit, and belong to no request yet (ADR 0022).
        theirs = [job for job in claimed if not job.is_ahead]
        got = claiming.locked(plan, theirs)
        is_all = len(plan.then) > 0 and len(got) == len(theirs)
        fetched = shared_out(self.requests, got, claiming, is_under_way=True, is_all=is_all)
        if len(theirs) < len(claimed):
            fetched = prefetch.go_along(fetched, self.requests, [job for job in claimed if job.is_ahead])
        return Exchanged([None] * len(self.jobs), acked, fetched)


def exchange(
    jobs: Sequence[JobPayload],
    acks: Sequence[Ack],
    requests: Sequence[FetchRequest],
    *,
    using: str,
    now: datetime | None = None,
    lease_s: float = locks.LEASE_S,
    unanswered: Unanswered | None = None,
    on_ended: OnEnded = nobody_asks,
) -> Exchanged:
    """Run `ack`, `push` and `fetch` in one transaction; on PostgreSQL in one round trip.

    A pushed job may be fetched by a request of the same exchange.
    """
    claiming = Claiming(using, now, lease_s, unanswered or Unanswered())
    return carry_out(Turn(jobs, acks, requests, claiming, on_ended))


def carry_out(turn: Turn) -> Exchanged:
    """Execute a turn, see `exchange`. Blocks until the database has committed."""
    acks, claiming = turn.acks, turn.claiming
    using, now = claiming.using, claiming.now
    if not turn.is_one():
        # Acks first: the locks and permits that they release may be what the fetched jobs need.
        acked = ack(acks, using=using, now=now, on_ended=turn.on_ended)
        pushed = push(turn.jobs, using=using, now=now)
        return Exchanged(pushed, acked, fetch_for(turn.requests, claiming))
    if turn.may_be_relay(dialect_of(connections[using])):
        relayed = _relayed(turn)
        if relayed:
            return relayed
    with claiming.unanswered.numbered() as number:
        plan = turn.plan(number)
        ending, claimed = run(
            using,
            lambda connection: dialect_of(connection).exchange(connection, turn.placed(), acks, plan, now),
            # On PostgreSQL all statements are one message, which is a transaction by itself.
            atomic=not dialect_of(connections[using]).joins(connections[using]),
        )
        return turn.concluded(plan, ending, claimed)


def _relayed(turn: Turn) -> Exchanged | None:
    """Execute a turn as a lock handoff; return None, with nothing changed, if that is not possible (ADR 0020).

    The first request that asks for a job gets the next job of the lock key of the job that ends.
    """
    [ack], claiming = turn.acks, turn.claiming
    place = next(place for place, request in enumerate(turn.requests) if request.count)
    first, others = turn.requests[place], [*turn.requests[:place], *turn.requests[place + 1 :]]
    plan = first_plan([first])
    if first.count != 1 or not plan.slots:
        return None
    with claiming.unanswered.numbered() as number:
        plan = claiming.numbered(plan, number)
        relayed = run(
            claiming.using,
            lambda connection: dialect_of(connection).relay(connection, ack, plan, claiming.now),
            atomic=False,
        )
    if relayed is None:
        return None
    turn.on_ended(relayed.ended.values())
    # On a hot key most requests find nothing. With four clients on one key their empty claims delayed every reply, so
    # skip the claim if the statement saw that no other job was ready in any of their queues.
    fetched: list[list[Reservation]] = [[] for _ in others]
    if others and not (relayed.is_all and all(set(other.queues) <= set(first.queues) for other in others)):
        fetched = more_for(others, claiming)
    fetched.insert(place, [relayed.job])
    return Exchanged([], [True], fetched)
