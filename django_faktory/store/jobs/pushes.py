"""Push, fetch and acknowledge sets of jobs: the hot path of the store. Rules: W10, W13, W14, W16.

`exchange` does all three in one transaction. Jobs of batches and jobs that hold locks or permits leave the hot path:
the dialect's statements leave them unchanged and return their jids, and `store.batches.counters` ends them (ADR 0011,
0015, 0016).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import NamedTuple

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.limits import passes_of
from ...core.logs import get_logger
from ...core.payloads import Ack, FetchRequest, JobPayload, Reservation
from ...core.payloads import is_storable as is_storable  # noqa: PLC0414  (many look for it here)
from ...errors import BrokerUnavailable, FaktoryError, LockTimeout
from ..batches import counters
from ..dialects import dialect_of
from ..dialects.base import Dialect, Ended, Ending, Held, Placed, Plan, holds, insertion_order
from ..limits import limiters
from ..locks import locks
from ..transactions import run
from . import prefetch, unique_push
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
from .claims import fetch as fetch  # noqa: PLC0414  (a part of the straight way)
from .lost_claims import Unanswered

logger = get_logger(__name__)

CHUNK = 500
"""Maximum rows of one statement: enough to make its fixed cost negligible, few enough to keep row locks short."""

OnEnded = Callable[[Collection[Held]], None]
"""Callback for jobs after the end of their runs. Called inside the transaction that ended them, or after it."""


def nobody_asks(_: Collection[Held]) -> None:
    """Ignore the ended jobs; the default for `on_ended`."""


def push(jobs: Sequence[JobPayload], *, using: str, now: datetime | None = None) -> Sequence[FaktoryError | None]:
    """Store jobs in one transaction, or in the caller's transaction if there is one.

    Return one item per job: None, or the reason for the refusal: NotUnique (W27), UnknownBatch or BatchClosed (W26). A
    stored job that has not finished stays unchanged, a finished one is replaced. Of two jobs with the same jid, the
    first is stored (W10). A push can therefore be repeated after a lost connection.
    """
    if not jobs:
        return []
    placed = _placed(jobs)
    if _any_apart(jobs, _dialect(using)):
        refused = run(using, lambda connection: unique_push.push(connection, placed, now), atomic=False, writes=True)
        return [refused.get(job.jid) for job in jobs]

    def insert(connection: BaseDatabaseWrapper) -> None:
        dialect = dialect_of(connection)
        # One INSERT locks the rows it meets by itself. With several, all of these rows must be locked before the first
        # INSERT, or two overlapping sets deadlock (ADR 0030).
        clock = dialect.lock_stored(connection, placed, now) if len(placed) > CHUNK else now
        for start in range(0, len(placed), CHUNK):
            # Check the keys of blocked jobs again after the commit: their holder may be releasing the lock now, and
            # neither transaction sees the other (ADR 0015).
            locks.settle_later(connection, dialect.insert(connection, placed[start : start + CHUNK], clock))

    one_statement = len(placed) <= CHUNK and not _needs_atomic(using, placed)
    run(using, insert, atomic=not one_statement, writes=True)
    return [None] * len(jobs)


def _any_apart(jobs: Sequence[JobPayload], dialect: Dialect) -> bool:
    """Return True if one of the jobs needs lookups before its insert: a unique key, a batch, or an unsupported lock."""
    asking = [job.options for job in jobs if job.options is not None]
    return any(ask.is_apart or (ask.lock_key is not None and not dialect.stores_keyed) for ask in asking)


def _placed(jobs: Sequence[JobPayload]) -> Placed:
    """Return the first job of each jid, in the insertion order that all transactions share."""
    return insertion_order(list({job.jid: job for job in reversed(jobs)}.values())[::-1])


def _needs_atomic(using: str, jobs: Placed) -> bool:
    # Some dialects insert a set with several statements. One row needs a single statement on every database.
    return len(jobs) > 1 and not _dialect(using).one_statement


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
        if max(len(self.jobs), len(self.acks)) > CHUNK or _any_apart(self.jobs, _dialect(self.claiming.using)):
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
        return _placed(self.jobs)

    def plan(self, number: int) -> Plan:
        """Return the claim plan, marked with this claim number. Without slots, a query must find the work first."""
        plan = Plan()
        if not are_alike(self.requests) and _dialect(self.claiming.using).claims_in_turn:
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
        acked = _end_members(ending, self.acks, using=claiming.using, now=claiming.now, on_ended=self.on_ended)
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
    if turn.may_be_relay(_dialect(using)):
        relayed = _relayed(turn)
        if relayed:
            return relayed
    with claiming.unanswered.numbered() as number:
        plan = turn.plan(number)
        ending, claimed = run(
            using,
            lambda connection: dialect_of(connection).exchange(connection, turn.placed(), acks, plan, now),
            # On PostgreSQL all statements are one message, which is a transaction by itself.
            atomic=not _dialect(using).joins(connections[using]),
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


def _end_members(
    ending: Ending, acks: Sequence[Ack], *, using: str, now: datetime | None, on_ended: OnEnded
) -> list[FaktoryError | bool]:
    """End the jobs that `ending` left unchanged, in a separate transaction, and return the result of each ack.

    `ending` is already committed. If this transaction fails, only the acks of `ending.left` get the error as their
    result: the reporter sends these again. The other acks must not be repeated, they would count as late.
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

    Return one item per ack: True if the job was ended; False if nothing changed because the sender does not hold the
    job (W16); BrokerUnavailable if this job was not ended although other jobs of the set were. Raise BrokerUnavailable
    if no job was ended.
    """
    answers: list[FaktoryError | bool] = []
    for start in range(0, len(acks), CHUNK):
        try:
            answers += _ack_chunk(acks[start : start + CHUNK], using=using, now=now, on_ended=on_ended)
        except BrokerUnavailable as error:
            # Earlier chunks are committed and their acks must not be repeated, so return the error per ack.
            if not answers or connections[using].in_atomic_block:
                raise
            logger.warning("jobs not acknowledged jobs=%d error=%s", len(acks) - start, error)
            answers += [error] * (len(acks) - start)
            break
    return answers


def _ack_chunk(
    acks: Sequence[Ack], *, using: str, now: datetime | None, on_ended: OnEnded
) -> list[FaktoryError | bool]:
    # A jid that no database can store (such as one with a NUL character) would fail the statement of the whole set.
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
    # Put False in the places of the jids that were left out, so that results match the acks.
    theirs = iter(answers)
    return [next(theirs) if is_storable(ack.jid) else False for ack in acks]


def ack_last(
    report: Ack, job: Reservation, *, using: str, now: datetime | None = None, on_ended: OnEnded = nobody_asks
) -> bool:
    """`ack` this job as the last statement of the caller's `atomic` block, which must end right after this call.

    If the dialect supports it, COMMIT is part of the same message, and Django's own commit finds no transaction (ADR
    0007). Return False if the job was not ended. Raise TransactionManagementError if the transaction is marked for
    rollback, and ReservationLost if another attempt holds the job.
    """
    connection = connections[using]
    connection.validate_no_broken_transaction()
    # Only in the outermost block: COMMIT inside a savepoint would also commit the caller's outer transaction.
    if job.ends_alone and len(connection.atomic_blocks) == 1 and connection.commit_on_exit:
        ended = dialect_of(connection).end_last(connection, report, now)
        if ended is not None:
            # A limit that was set while the job ran may have given it permits; their limiters may have room now.
            limiters.settle_later(connection, passes_of(ended.passes))
            ran_s = (ended.at - job.started_at).total_seconds() if job.started_at else 0.0
            on_ended([Held(job.wid, job.attempt, job.queue, job.jobtype, ran_s)])
            return True
    return ack([report], using=using, now=now, on_ended=on_ended) == [True]


def _end_of_batches(ending: Ending, acks: Sequence[Ack], *, using: str, now: datetime | None) -> Ended:
    """End the jobs of `ending.left` together with their batches, locks and permits."""
    theirs = [ack for ack in acks if ack.jid in ending.left]
    return run(using, lambda connection: counters.end(connection, theirs, now)) if theirs else {}


def _was_holder(ack: Ack, ended: Ended) -> bool:
    held = ended.get(ack.jid)
    if held is None or not holds(ack.wid, ack.attempt, held.wid, held.attempt):
        return False
    del ended[ack.jid]  # a second ack of the same job finds it ended
    return True


def _dialect(using: str) -> Dialect:
    return dialect_of(connections[using])
