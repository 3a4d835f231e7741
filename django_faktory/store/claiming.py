"""Claims: who gets which jobs, with the locks and passes they need. Rules: W13, ADR 0015 to 0017."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec
from django.db import Error, connections

from ..errors import BrokerUnavailable
from ..logs import get_logger
from ..payloads import FetchRequest, Lease, Reservation, is_storable
from . import acquiring, giving_back, locks
from .dialects import dialect_of
from .dialects.base import DELIVERY_LEASE_S, Plan, Slot
from .transactions import run
from .unanswered import Unanswered

logger = get_logger(__name__)

MAX_ROUNDS = 8

MOST_IN_TURN = 8
"""So many different requests are claimed for one after the other; for more it is less to look first at what waits."""


def fetch(
    requests: Sequence[FetchRequest],
    *,
    using: str,
    now: datetime | None = None,
    lease_s: float = locks.LEASE_S,
    unanswered: Unanswered | None = None,
) -> list[list[Reservation]]:
    """Reserve jobs for each request, in its order of queues, then priority, then age (W13).

    No row is locked that is not handed out: requests of one worker that name the same queues are claimed for together,
    otherwise each tries its first queue; who got too little is planned for by what waits in each queue.
    """
    return fetch_for([*map(answerable, requests)], Claiming(using, now, lease_s, unanswered or Unanswered()))


def fetch_for(requests: Sequence[FetchRequest], claiming: Claiming) -> list[list[Reservation]]:
    """`fetch` for answerable requests."""
    return shared_out(requests, claiming.claim(first_plan(requests)), claiming)


def first_plan(requests: Sequence[FetchRequest]) -> Plan:
    """What to claim at first sight."""
    requests = [request for request in requests if request.count]
    total = sum(request.count for request in requests)
    if are_alike(requests):
        return Plan([Slot(queue, requests[0].wid, total) for queue in dict.fromkeys(requests[0].queues)], total)
    if len({request.wid for request in requests}) > 1:
        return Plan()  # which of them comes first in a queue takes a plan
    slots: dict[str, int] = {}
    for request in requests:
        for queue in request.queues[:1]:
            slots[queue] = slots.get(queue, 0) + request.count
    return Plan([Slot(queue, requests[0].wid, count) for queue, count in slots.items()], total)


def plan_in_turn(requests: Sequence[FetchRequest]) -> Plan:
    """What to claim so that each gets of all its queues what it would get if they came one by one; nothing where they
    are too many. For who `claims_in_turn`."""
    parts: list[Plan] = []
    last: FetchRequest | None = None
    for request in requests:
        if not request.count or not request.queues:
            continue
        count = request.count
        if last and (last.queues, last.wid) == (request.queues, request.wid):
            count += parts.pop().limit
        parts.append(Plan([Slot(queue, request.wid, count) for queue in dict.fromkeys(request.queues)], count))
        last = request
    if not parts or len(parts) > MOST_IN_TURN:
        return Plan()
    return msgspec.structs.replace(parts[0], then=parts[1:])


def are_alike(requests: Sequence[FetchRequest]) -> bool:
    """Whether it does not matter which of those that ask for jobs gets which."""
    return len({(request.queues, request.wid) for request in requests if request.count}) == 1


def shared_out(
    requests: Sequence[FetchRequest],
    claimed: Sequence[Reservation],
    claiming: Claiming,
    *,
    is_under_way: bool = False,
    is_all: bool = False,
) -> list[list[Reservation]]:
    """What was claimed, dealt to the requests, and more for those that it did not suffice for, unless it `is_all`: then
    each request has been claimed for, one after the other.

    Trouble on the way to more must not swallow what was claimed, or else done (`is_under_way`), before.
    """
    found: list[list[Reservation]] = [[] for _ in requests]
    if not claimed and not any(request.count for request in requests):
        return found
    if is_all or are_alike(requests):
        _leave(_deal(found, requests, claimed, in_turn=is_all), claiming)
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
        _leave(_deal(found, requests, had + more), claiming)
        had = []
        if not more:
            break
    _leave(_deal(found, requests, had), claiming)
    return found


def _leave(jobs: Sequence[Reservation], claiming: Claiming) -> None:
    """Give back what was claimed and is for nobody: what waited changed while it was claimed."""
    if not jobs:
        return
    try:
        giving_back.release(jobs, using=claiming.using)
    except (BrokerUnavailable, Error) as error:
        if connections[claiming.using].in_atomic_block:
            raise
        logger.warning("jobs not given back, their reservations must end jobs=%d error=%s", len(jobs), error)
    locks.tell(connections[claiming.using], {job.queue for job in jobs})


def more_for(requests: Sequence[FetchRequest], claiming: Claiming) -> list[list[Reservation]]:
    """What is fetched beside something that is done already: trouble here must not swallow that."""
    try:
        claimed = claiming.claim(first_plan(requests))
    except (BrokerUnavailable, Error) as error:
        if connections[claiming.using].in_atomic_block:
            raise
        logger.warning("claim not completed, what was claimed before is handed out error=%s", error)
        return [[] for _ in requests]
    return shared_out(requests, claimed, claiming, is_under_way=True)


def answerable(request: FetchRequest) -> FetchRequest:
    """Without the queues that no database can know: one such name must not fail those that are claimed for with it."""
    if all(map(is_storable, request.queues)):
        return request
    return msgspec.structs.replace(request, queues=tuple(filter(is_storable, request.queues)))


def has_all_it_needs(job: Reservation) -> bool:
    """Whether a claimed job may run as it is: no lock is to be taken for it, and no gate to be asked."""
    return (job.lock_key is None or job.lock_token is not None) and job.passes is None


class Leases(NamedTuple):
    """How long claims of one broker last, in seconds."""

    lock_s: float = locks.LEASE_S
    """A lock of a job whose worker extends it itself."""
    worker_timeout_s: float = 60.0
    delivery_s: float = DELIVERY_LEASE_S
    """From a claim for a client to the confirmation of its delivery."""

    def claiming(
        self, requests: Sequence[FetchRequest], *, using: str, now: datetime | None, unanswered: Unanswered
    ) -> Claiming:
        """How to claim for these requests, which ask for the same kind of lease.

        Twice WORKER_TIMEOUT: a beat extends what is half over, so that a reservation never ends before the silence of
        its worker is noticed. A client extends the locks of its jobs with its BEAT, at most WORKER_TIMEOUT apart.
        """
        lease = next((request.lease for request in requests if request.lease), Lease.RESERVE_FOR)
        lock_s, at_least_s, at_most_s = self.lock_s, None, None
        if lease is Lease.HEARTBEAT:
            at_least_s = 2 * self.worker_timeout_s
        elif lease is Lease.DELIVERY:
            lock_s, at_most_s = max(lock_s, self.worker_timeout_s), self.delivery_s
        return Claiming(using, now, lock_s, unanswered, at_least_s, at_most_s)


class Claiming(NamedTuple):
    """How jobs are claimed, and locked for where they have a key."""

    using: str
    now: datetime | None
    lease_s: float
    unanswered: Unanswered
    at_least_s: float | None = None
    at_most_s: float | None = None
    """See `Plan` for these two."""

    def numbered(self, plan: Plan, number: int) -> Plan:
        """The plan with the number of the claim, and with its leases."""
        return msgspec.structs.replace(
            plan, lease_s=self.lease_s, claim=number, at_least_s=self.at_least_s, at_most_s=self.at_most_s
        )

    def claim(self, plan: Plan) -> list[Reservation]:
        """Claim what the plan says, or what there is of it."""
        with self.unanswered.numbered() as number:
            plan = self.numbered(plan, number)
            return self.locked(plan, self._claim(plan))

    def _claim(self, plan: Plan) -> list[Reservation]:
        if not plan.slots or plan.limit < 1:
            return []
        dialect = dialect_of(connections[self.using])
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
            if all(map(has_all_it_needs, claimed)):
                return found + claimed if found else claimed
            got = acquiring.acquire(claimed, using=self.using, lease_s=self.lease_s, now=self.now)
            found += got
            if len(got) == len(claimed):
                return found
            claimed = self._claim(_rest(plan, found)) if left and not plan.then else []
        # All that was met is parked, and what can run may be behind it: whoever asks next goes on.
        locks.tell(connections[self.using], {slot.queue for slot in plan.slots})
        return found


def _rest(plan: Plan, found: Sequence[Reservation]) -> Plan:
    """What is left of a plan when these are had."""
    had = Counter((job.queue, job.wid) for job in found)
    slots = [
        Slot(slot.queue, slot.wid, rest) for slot in plan.slots if (rest := slot.count - had[slot.queue, slot.wid]) > 0
    ]
    return msgspec.structs.replace(plan, slots=slots, limit=plan.limit - len(found), ahead=(), crowd=(), then=())


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


def _deal(
    found: list[list[Reservation]],
    requests: Sequence[FetchRequest],
    claimed: Sequence[Reservation],
    *,
    in_turn: bool = False,
) -> list[Reservation]:
    """Hand what was claimed to the requests: each takes the best of its own queues first; returns what nobody took.

    What was claimed `in_turn` comes in the order of the requests, and is taken in it, so that nothing is left: who took
    a better one that came while a later request was claimed for would leave his own to nobody.
    """
    rest = list(claimed)
    for request, got in zip(requests, found, strict=True):
        order = {queue: place for place, queue in reversed(list(enumerate(request.queues)))}
        mine = [job for job in rest if job.wid == request.wid and job.queue in order]
        if not in_turn and len(order) > 1:
            mine.sort(key=lambda job: order[job.queue])
        del mine[max(request.count - len(got), 0) :]
        got.extend(mine)
        taken = {job.jid for job in mine}
        rest = [job for job in rest if job.jid not in taken]
    return rest
