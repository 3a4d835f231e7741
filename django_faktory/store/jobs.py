"""A job's straight way: push, fetch, ack, release. Rules: W10, W13, W14, W16."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import NamedTuple

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..errors import BrokerUnavailable, FaktoryError, LockTimeout
from ..gating import passes_of
from ..logs import get_logger
from ..payloads import Ack, FetchRequest, JobPayload, Reservation
from ..payloads import is_storable as is_storable  # noqa: PLC0414  (many look for it here)
from . import ahead, gates, locks, members, optioned
from .claiming import (
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
from .claiming import fetch as fetch  # noqa: PLC0414  (a part of the straight way)
from .dialects import dialect_of
from .dialects.base import Dialect, Ended, Ending, Held, Placed, Plan, holds, insertion_order
from .transactions import run
from .unanswered import Unanswered

logger = get_logger(__name__)

CHUNK = 500
"""Rows a statement: large enough to make a statement's own cost vanish, small enough to hold no lock for long."""

OnEnded = Callable[[Collection[Held]], None]
"""Told of jobs that were ended well, in the transaction that ended them or after it."""


def nobody_asks(_: Collection[Held]) -> None:
    """The usual `OnEnded`."""


def push(jobs: Sequence[JobPayload], *, using: str, now: datetime | None = None) -> Sequence[FaktoryError | None]:
    """Store jobs, in one transaction, or in the caller's. The first of two with one jid counts (W10).

    A jid that lives stays as it is; one that is finished is replaced. Answers to each None, or why it was refused:
    NotUnique (W27), UnknownBatch, BatchClosed (W26).
    """
    if not jobs:
        return []
    placed = _placed(jobs)
    if _any_apart(jobs, _dialect(using)):
        refused = run(using, lambda connection: optioned.push(connection, placed, now), atomic=False)
        return [refused.get(job.jid) for job in jobs]

    def insert(connection: BaseDatabaseWrapper) -> None:
        dialect = dialect_of(connection)
        clock = dialect.lock_stored(connection, placed, now) if len(placed) > CHUNK else now
        for start in range(0, len(placed), CHUNK):
            locks.settle_later(connection, dialect.insert(connection, placed[start : start + CHUNK], clock))

    one_statement = len(placed) <= CHUNK and not _needs_atomic(using, placed)
    run(using, insert, atomic=not one_statement)
    return [None] * len(jobs)


def _any_apart(jobs: Sequence[JobPayload], dialect: Dialect) -> bool:
    """Whether what is stored decides what becomes of one of them, beyond what an insert sees to."""
    asking = [job.options for job in jobs if job.options is not None]
    return any(ask.is_apart or (ask.lock_key is not None and not dialect.stores_keyed) for ask in asking)


def _placed(jobs: Sequence[JobPayload]) -> Placed:
    """Return the first of the jobs with each jid, in the order in which they are inserted."""
    return insertion_order(list({job.jid: job for job in reversed(jobs)}.values())[::-1])


def _needs_atomic(using: str, jobs: Placed) -> bool:
    # Many rows may be many statements. One row commits alone anywhere.
    return len(jobs) > 1 and not _dialect(using).one_statement


class Exchanged(NamedTuple):
    """What `exchange` did: the answers of `push`, `ack` and `fetch`."""

    pushed: Sequence[FaktoryError | None]
    acked: list[FaktoryError | bool]
    fetched: list[list[Reservation]]


class Turn:
    """One exchange: what is asked, and what its answer becomes."""

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
        """Whether the database can carry it out as one."""
        if max(len(self.jobs), len(self.acks)) > CHUNK or _any_apart(self.jobs, _dialect(self.claiming.using)):
            return False
        return all(is_storable(ack.jid) for ack in self.acks)

    def may_be_relay(self, dialect: Dialect) -> bool:
        """Whether a relay is to be tried."""
        is_pair = not self.jobs and len(self.acks) == 1 and self.asks()
        return is_pair and dialect.expects_relay(self.acks[0].jid)

    def asks(self) -> bool:
        """Whether somebody waits for a job."""
        return any(request.count for request in self.requests)

    def placed(self) -> Placed:
        """Return the jobs to store, in the order in which they are inserted."""
        return _placed(self.jobs)

    def plan(self, number: int) -> Plan:
        """What to claim, under this number."""
        plan = Plan()
        if not are_alike(self.requests) and _dialect(self.claiming.using).claims_in_turn:
            plan = plan_in_turn(self.requests)
        if not plan.slots:
            plan = first_plan(self.requests)
        plan = self.claiming.numbered(plan, number)
        return ahead.with_slots(plan, self.requests) if plan.slots or not self.asks() else plan

    def ends_here(self, plan: Plan, ending: Ending, claimed: Sequence[Reservation]) -> bool:
        """Whether `concluded` has nothing more to ask the database."""
        if ending.left or ending.readied or ending.blocked:
            return False
        if not all(has_all_it_needs(job) for job in claimed):
            return False
        if plan.then or are_alike(self.requests):
            return True
        return sum(not job.is_ahead for job in claimed) >= sum(request.count for request in self.requests)

    def concluded(self, plan: Plan, ending: Ending, claimed: list[Reservation]) -> Exchanged:
        """What everybody is answered, when those are ended too that the exchange left alone, and the claimed have
        their locks or were replaced by others."""
        claiming = self.claiming
        if ending.readied:
            locks.tell(connections[claiming.using], set(ending.readied))
        locks.settle_later(connections[claiming.using], ending.blocked)
        acked = _end_members(ending, self.acks, using=claiming.using, now=claiming.now, on_ended=self.on_ended)
        theirs = [job for job in claimed if not job.is_ahead]
        got = claiming.locked(plan, theirs)
        is_all = len(plan.then) > 0 and len(got) == len(theirs)
        fetched = shared_out(self.requests, got, claiming, is_under_way=True, is_all=is_all)
        if len(theirs) < len(claimed):
            fetched = ahead.go_along(fetched, self.requests, [job for job in claimed if job.is_ahead])
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
    """`ack`, `push` and `fetch` in one transaction, on PostgreSQL in one round trip; what is pushed may be fetched."""
    claiming = Claiming(using, now, lease_s, unanswered or Unanswered())
    return carry_out(Turn(jobs, acks, requests, claiming, on_ended))


def carry_out(turn: Turn) -> Exchanged:
    """`exchange` for a turn."""
    acks, claiming = turn.acks, turn.claiming
    using, now = claiming.using, claiming.now
    if not turn.is_one():
        acked = ack(acks, using=using, now=now, on_ended=turn.on_ended)
        pushed = push(turn.jobs, using=using, now=now)
        return Exchanged(pushed, acked, fetch_for(turn.requests, claiming))
    if turn.may_be_relay(_dialect(using)):
        relayed = _relayed(turn)
        if relayed:
            return relayed
    with claiming.unanswered.numbered() as number:
        plan = turn.plan(number)
        ending, claimed = run(
            using,
            lambda connection: dialect_of(connection).exchange(connection, turn.placed(), acks, plan, now),
            atomic=not _dialect(using).joins(connections[using]),
        )
        return turn.concluded(plan, ending, claimed)


def _relayed(turn: Turn) -> Exchanged | None:
    """`carry_out` where the first who asks for a job, and for one, gets the next of the key of the one that ends."""
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
    fetched: list[list[Reservation]] = [[] for _ in others]
    if others and not (relayed.is_all and all(set(other.queues) <= set(first.queues) for other in others)):
        fetched = more_for(others, claiming)
    fetched.insert(place, [relayed.job])
    return Exchanged([], [True], fetched)


def _end_members(
    ending: Ending, acks: Sequence[Ack], *, using: str, now: datetime | None, on_ended: OnEnded
) -> list[FaktoryError | bool]:
    """End what `ending` left alone, in a transaction of its own, and return the answer to each ack.

    `ending` is committed: when this transaction fails, only the acks of `ending.left` are answered with the error. The
    reporter sends those again; the others would count as late.
    """
    try:
        ended = ending.ended | _end_of_batches(ending, acks, using=using, now=now)
    except (BrokerUnavailable, Error) as error:
        if connections[using].in_atomic_block:
            raise
        if not isinstance(error, LockTimeout):
            logger.warning("jobs of batches not acknowledged jobs=%d error=%s", len(ending.left), error)
        on_ended(ending.ended.values())
        trouble = error if isinstance(error, LockTimeout) else BrokerUnavailable("database unavailable")
        return [trouble if ack.jid in ending.left else _was_holder(ack, ending.ended) for ack in acks]
    on_ended(ended.values())
    return [_was_holder(ack, ended) for ack in acks]


def ack(
    acks: Sequence[Ack], *, using: str, now: datetime | None = None, on_ended: OnEnded = nobody_asks
) -> list[FaktoryError | bool]:
    """End jobs successfully: delete the row, or keep it as succeeded for its `result_ttl`.

    False: nothing was changed, the sender did not hold the job (W16). BrokerUnavailable as an answer: this job was not
    ended, others of the set were. Raised: none was.
    """
    answers: list[FaktoryError | bool] = []
    for start in range(0, len(acks), CHUNK):
        try:
            answers += _ack_chunk(acks[start : start + CHUNK], using=using, now=now, on_ended=on_ended)
        except BrokerUnavailable as error:
            if not answers or connections[using].in_atomic_block:
                raise
            logger.warning("jobs not acknowledged jobs=%d error=%s", len(acks) - start, error)
            answers += [error] * (len(acks) - start)
            break
    return answers


def _ack_chunk(
    acks: Sequence[Ack], *, using: str, now: datetime | None, on_ended: OnEnded
) -> list[FaktoryError | bool]:
    storable = [ack for ack in acks if is_storable(ack.jid)]
    if not storable:
        return [False] * len(acks)
    dialect = _dialect(using)
    ending = run(
        using,
        lambda connection: dialect.end(connection, storable, now),
        atomic=not (dialect.one_statement and dialect.joins(connections[using])),
    )
    locks.tell(connections[using], set(ending.readied))
    answers = _end_members(ending, storable, using=using, now=now, on_ended=on_ended)
    if len(storable) == len(acks):
        return answers
    theirs = iter(answers)
    return [next(theirs) if is_storable(ack.jid) else False for ack in acks]


def ack_last(
    report: Ack, job: Reservation, *, using: str, now: datetime | None = None, on_ended: OnEnded = nobody_asks
) -> bool:
    """`ack` this job as the last thing in the caller's transaction, a block of `Atomic` that ends next. Where the
    database can, the commit comes along in one message, and Django's own finds nothing left to do (ADR 0007).

    Raises TransactionManagementError where the transaction was broken, ReservationLost where it is lost.
    """
    connection = connections[using]
    connection.validate_no_broken_transaction()
    if job.ends_alone and len(connection.atomic_blocks) == 1 and connection.commit_on_exit:
        ended = dialect_of(connection).end_last(connection, report, now)
        if ended is not None:
            gates.settle_later(connection, passes_of(ended.passes))
            ran_s = (ended.at - job.started_at).total_seconds() if job.started_at else 0.0
            on_ended([Held(job.wid, job.attempt, job.queue, job.jobtype, ran_s)])
            return True
    return ack([report], using=using, now=now, on_ended=on_ended) == [True]


def _end_of_batches(ending: Ending, acks: Sequence[Ack], *, using: str, now: datetime | None) -> Ended:
    """End those that were left alone, together with their batches."""
    theirs = [ack for ack in acks if ack.jid in ending.left]
    return run(using, lambda connection: members.end(connection, theirs, now)) if theirs else {}


def _was_holder(ack: Ack, ended: Ended) -> bool:
    held = ended.get(ack.jid)
    if held is None or not holds(ack.wid, ack.attempt, held.wid, held.attempt):
        return False
    del ended[ack.jid]  # a second ack of the same job finds it ended
    return True


def _dialect(using: str) -> Dialect:
    return dialect_of(connections[using])
