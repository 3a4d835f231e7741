"""A job's straight way: push, fetch, ack, release. Rules: W10, W13, W14, W16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q

from ..errors import BrokerUnavailable, FaktoryError
from ..lifecycle import State
from ..logs import get_logger
from ..models import Job, JobQuerySet
from ..payloads import Ack, FetchRequest, JobPayload, Reservation
from ..payloads import is_storable as is_storable  # noqa: PLC0414  (many look for it here)
from . import gates, locks, members, optioned
from .dialects import dialect_of
from .dialects.base import Dialect, Ended, Ending, Held, Plan, Slot, holds
from .transactions import run

logger = get_logger(__name__)

CHUNK = 500
"""Rows a statement: large enough to make a statement's own cost vanish, small enough to hold no lock for long."""

MAX_ROUNDS = 8

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
    distinct = _distinct(jobs)
    if _any_options(distinct):
        refused = run(using, lambda connection: optioned.push(connection, distinct, now), atomic=False)
        return [refused.get(job.jid) for job in jobs]

    def insert(connection: BaseDatabaseWrapper) -> None:
        dialect = dialect_of(connection)
        for start in range(0, len(distinct), CHUNK):
            dialect.insert(connection, distinct[start : start + CHUNK], now)

    one_statement = len(distinct) <= CHUNK and not _needs_atomic(using, distinct)
    run(using, insert, atomic=not one_statement)
    return [None] * len(jobs)


def _any_options(jobs: Sequence[JobPayload]) -> bool:
    return any(job.options is not None for job in jobs)


def _distinct(jobs: Sequence[JobPayload]) -> list[JobPayload]:
    """The first of those with one jid."""
    return list({job.jid: job for job in reversed(jobs)}.values())[::-1]


def _needs_atomic(using: str, jobs: Sequence[JobPayload]) -> bool:
    # Many rows may be many statements. One row commits alone anywhere.
    return len(jobs) > 1 and not _dialect(using).one_statement


def fetch(
    requests: Sequence[FetchRequest], *, using: str, now: datetime | None = None, lease_s: float = locks.LEASE_S
) -> list[list[Reservation]]:
    """Reserve jobs for each request, in its order of queues, then priority, then age (W13).

    No row is locked that is not handed out: requests of one worker that name the same queues are claimed for together,
    otherwise each tries its first queue; who got too little is planned for by what waits in each queue.
    """
    requests = [_answerable(request) for request in requests]
    claiming = _Claiming(using, now, lease_s)
    return _shared_out(requests, claiming.claim(_first_plan(requests)), claiming)


class Exchanged(NamedTuple):
    """What `exchange` did: the answers of `push`, `ack` and `fetch`."""

    pushed: Sequence[FaktoryError | None]
    acked: list[FaktoryError | bool]
    fetched: list[list[Reservation]]


def exchange(
    jobs: Sequence[JobPayload],
    acks: Sequence[Ack],
    requests: Sequence[FetchRequest],
    *,
    using: str,
    now: datetime | None = None,
    lease_s: float = locks.LEASE_S,
    on_ended: OnEnded = nobody_asks,
) -> Exchanged:
    """`ack`, `push` and `fetch` in one transaction, on PostgreSQL in one round trip; what is pushed may be fetched."""
    is_one = max(len(jobs), len(acks)) <= CHUNK and not _any_options(jobs)
    if not is_one or not all(is_storable(ack.jid) for ack in acks):
        acked: list[FaktoryError | bool] = [*ack(acks, using=using, now=now, on_ended=on_ended)]
        pushed = push(jobs, using=using, now=now)
        return Exchanged(pushed, acked, fetch(requests, using=using, now=now, lease_s=lease_s))
    distinct = _distinct(jobs)
    requests = [_answerable(request) for request in requests]
    plan = _first_plan(requests)
    ending, claimed = run(
        using,
        lambda connection: dialect_of(connection).exchange(connection, distinct, acks, plan, now),
        atomic=not _dialect(using).joins(connections[using]),
    )
    locks.tell(connections[using], set(ending.readied))
    try:
        ended = ending.ended | _end_of_batches(ending, acks, using=using, now=now)
        on_ended(ended.values())
        acked = [_was_holder(ack, ended) for ack in acks]
    except (BrokerUnavailable, Error) as error:  # must not swallow what is done
        if connections[using].in_atomic_block:
            raise
        logger.warning("jobs of batches not acknowledged jobs=%d error=%s", len(ending.left), error)
        trouble = BrokerUnavailable("database unavailable")
        acked = [trouble if ack.jid in ending.left else _was_holder(ack, ending.ended) for ack in acks]
    claiming = _Claiming(using, now, lease_s)
    fetched = _shared_out(requests, claiming.locked(plan, claimed), claiming, is_under_way=True)
    return Exchanged([None] * len(jobs), acked, fetched)


def _first_plan(requests: Sequence[FetchRequest]) -> Plan:
    """What to claim at first sight."""
    total = sum(request.count for request in requests)
    if len({(request.queues, request.wid) for request in requests}) == 1:
        return Plan([Slot(queue, requests[0].wid, total) for queue in dict.fromkeys(requests[0].queues)], total)
    if len({request.wid for request in requests}) > 1:
        return Plan()  # which of them comes first in a queue takes a plan
    slots: dict[str, int] = {}
    for request in requests:
        for queue in request.queues[:1]:
            slots[queue] = slots.get(queue, 0) + request.count
    return Plan([Slot(queue, requests[0].wid, count) for queue, count in slots.items()], total)


def _shared_out(
    requests: Sequence[FetchRequest],
    claimed: Sequence[Reservation],
    claiming: _Claiming,
    *,
    is_under_way: bool = False,
) -> list[list[Reservation]]:
    """What was claimed, dealt to the requests, and more for those that it did not suffice for.

    Trouble on the way to more must not swallow what was claimed, or else done (`is_under_way`), before.
    """
    found: list[list[Reservation]] = [[] for _ in requests]
    if len({(request.queues, request.wid) for request in requests}) <= 1:
        _deal(found, requests, claimed)
        return found
    # Each of different requests tried its first queue. What came is dealt together with what they get of their others:
    # alone it might go to somebody who would take it last.
    had, wanted = list(claimed), sum(request.count for request in requests)
    for _ in range(MAX_ROUNDS):
        if sum(map(len, found)) + len(had) >= wanted:
            break
        try:
            more = claiming.claim(_plan(requests, found, had, using=claiming.using, now=claiming.now))
        except (BrokerUnavailable, Error) as error:
            if not (is_under_way or had or any(found)) or connections[claiming.using].in_atomic_block:
                raise
            logger.warning("claim not completed, what was claimed before is handed out error=%s", error)
            break
        _deal(found, requests, had + more)
        had = []
        if not more:
            break
    _deal(found, requests, had)
    return found


def _answerable(request: FetchRequest) -> FetchRequest:
    """Without the queues that no database can know: one such name must not fail those that are claimed for with it."""
    if all(map(is_storable, request.queues)):
        return request
    return msgspec.structs.replace(request, queues=tuple(filter(is_storable, request.queues)))


class _Claiming(NamedTuple):
    """How jobs are claimed, and locked for where they have a key."""

    using: str
    now: datetime | None
    lease_s: float

    def claim(self, plan: Plan) -> list[Reservation]:
        """Claim what the plan says, or what there is of it."""
        return self.locked(plan, self._claim(plan))

    def _claim(self, plan: Plan) -> list[Reservation]:
        if not plan.slots or plan.limit < 1:
            return []
        dialect = _dialect(self.using)
        joined = len({slot.wid for slot in plan.slots}) == 1 or dialect.joins(connections[self.using])
        return run(
            self.using,
            lambda connection: dialect_of(connection).claim(connection, plan, self.now),
            atomic=not (dialect.one_statement and joined),
        )

    def locked(self, plan: Plan, claimed: list[Reservation]) -> list[Reservation]:
        """Those of the claimed that no lock or limit concerns, or that got theirs, and others in the place of those
        who did not."""
        found: list[Reservation] = []
        for left in reversed(range(MAX_ROUNDS)):
            if all(job.lock_key is None and job.passes is None for job in claimed):
                return found + claimed if found else claimed
            got = self._with_locks(gates.let_pass(claimed, using=self.using, now=self.now))
            found += got
            if len(got) == len(claimed):
                return found
            claimed = self._claim(_rest(plan, found)) if left else []
        # All that was met is parked, and what can run may be behind it: whoever asks next goes on.
        locks.tell(connections[self.using], {slot.queue for slot in plan.slots})
        return found

    def _with_locks(self, claimed: list[Reservation]) -> list[Reservation]:
        """Those of the claimed that have no key, or got their lock; others give their passes back."""
        keyed = [job for job in claimed if job.lock_key is not None]
        if not keyed:
            return claimed
        won = {job.jid: job for job in locks.take(keyed, using=self.using, lease_s=self.lease_s, now=self.now)}
        lost = [job.passes for job in keyed if job.jid not in won]
        if any(lost):
            run(self.using, lambda connection: gates.release(connection, lost))
        return [won.get(job.jid, job) for job in claimed if job.lock_key is None or job.jid in won]


def _rest(plan: Plan, found: Sequence[Reservation]) -> Plan:
    """What is left of a plan when these are had."""
    had = Counter((job.queue, job.wid) for job in found)
    slots = [
        Slot(slot.queue, slot.wid, rest) for slot in plan.slots if (rest := slot.count - had[slot.queue, slot.wid]) > 0
    ]
    return Plan(slots, plan.limit - len(found))


def _plan(
    requests: Sequence[FetchRequest],
    found: Sequence[Sequence[Reservation]],
    had: Sequence[Reservation],
    *,
    using: str,
    now: datetime | None,
) -> Plan:
    """Who takes what from which queue, by how many wait in each: every request in turn, its queues in order.

    What is had already, from first queues of these requests of one worker, counts as waiting, and is not claimed again.
    """
    wanted = [request.count - len(got) for request, got in zip(requests, found, strict=True)]
    queues = dict.fromkeys(queue for request in requests for queue in request.queues)
    wids = {request.wid for request in requests if request.wid}
    waiting, muted = run(
        using,
        lambda connection: dialect_of(connection).waiting(connection, list(queues), max(sum(wanted), 0), wids, now),
        atomic=False,
    )
    mine = Counter((job.queue, job.wid) for job in had)
    for (queue, _), count in mine.items():
        waiting[queue] = waiting.get(queue, 0) + count
    slots: dict[tuple[str, str], int] = {}
    for request, need in zip(requests, wanted, strict=True):
        missing = 0 if request.wid in muted else need
        for queue in request.queues:
            take = min(missing, waiting.get(queue, 0))
            if take:
                waiting[queue] -= take
                missing -= take
                slots[queue, request.wid] = slots.get((queue, request.wid), 0) + take
    rest = [Slot(*place, count - mine[place]) for place, count in slots.items() if count > mine[place]]
    return Plan(rest, sum(slot.count for slot in rest))


def _deal(found: list[list[Reservation]], requests: Sequence[FetchRequest], claimed: Sequence[Reservation]) -> None:
    """Hand what was claimed to the requests: each takes the best of its own queues first."""
    rest = list(claimed)
    for request, got in zip(requests, found, strict=True):
        order = {queue: place for place, queue in reversed(list(enumerate(request.queues)))}
        mine = sorted(
            (job for job in rest if job.wid == request.wid and job.queue in order), key=lambda job: order[job.queue]
        )[: request.count - len(got)]
        got.extend(mine)
        taken = {job.jid for job in mine}
        rest = [job for job in rest if job.jid not in taken]


def ack(acks: Sequence[Ack], *, using: str, now: datetime | None = None, on_ended: OnEnded = nobody_asks) -> list[bool]:
    """End jobs well: the row goes, or stays as succeeded for its `result_ttl`. False: nothing was changed (W16)."""
    ended: Ended = {}
    one_statement = _dialect(using).one_statement
    for start in range(0, len(acks), CHUNK):
        chunk = [ack for ack in acks[start : start + CHUNK] if is_storable(ack.jid)]
        if chunk:
            ending = run(
                using,
                lambda connection, chunk=chunk: dialect_of(connection).end(connection, chunk, now),  # type: ignore[misc]
                atomic=not (one_statement and _dialect(using).joins(connections[using])),
            )
            locks.tell(connections[using], set(ending.readied))
            ended |= ending.ended | _end_of_batches(ending, chunk, using=using, now=now)
    on_ended(ended.values())
    return [_was_holder(ack, ended) for ack in acks]


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


def release(reservations: Sequence[Reservation], *, using: str) -> int:
    """Give back jobs nobody began: enqueued again with the age they had, so at their old place (W14)."""
    chunks = [reservations[start : start + CHUNK] for start in range(0, len(reservations), CHUNK)]
    return sum(_release(chunk, using=using) for chunk in chunks)


def _release(reservations: Sequence[Reservation], *, using: str) -> int:
    held = Q()
    for job in reservations:
        held |= Q(jid=job.jid, wid=job.wid, attempt=job.attempt)

    hold_some = any(job.lock_token is not None or job.passes is not None for job in reservations)

    def give_back(connection: BaseDatabaseWrapper) -> int:
        working = Job.objects.using(using).filter(held, state=State.WORKING)
        if hold_some:
            return put_back(connection, working)
        return working.update(state=State.ENQUEUED, wid="", started_at=None, reserved_until=None, lock_token=None)

    return run(using, give_back, atomic=hold_some)


def release_others(wid: str, held: Collection[str], *, using: str) -> int:
    """`release` what this worker holds, but for these jids; returns how many jobs there were."""
    if not wid:
        return 0
    theirs = Job.objects.using(using).filter(state=State.WORKING, wid=wid)

    def look(_: BaseDatabaseWrapper) -> list[int]:
        return [pk for pk, jid in theirs.values_list("pk", "jid") if jid not in held]

    others = run(using, look, atomic=False)
    if not others:
        return 0
    return run(using, lambda connection: put_back(connection, theirs.filter(pk__in=others)))


def put_back(connection: BaseDatabaseWrapper, working: JobQuerySet) -> int:
    """Make these working jobs enqueued again, without the locks and passes they hold. Inside a transaction."""
    locks.release_all(connection, working)
    passes = gates.held_by(working)
    returned = working.update(
        state=State.ENQUEUED, wid="", started_at=None, reserved_until=None, lock_token=None, passes=None
    )
    gates.release(connection, passes)
    return returned


def _dialect(using: str) -> Dialect:
    return dialect_of(connections[using])
