"""A job's straight way: push, fetch, ack, release. Rules: W10, W13, W14, W16."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q

from ..errors import BrokerUnavailable, FaktoryError
from ..lifecycle import State
from ..models import Job
from ..payloads import Ack, FetchRequest, JobPayload, Reservation
from . import optioned
from .dialects import dialect_of
from .dialects.base import Dialect, Ended, Plan, Slot, holds
from .transactions import run

logger = logging.getLogger(__name__)

CHUNK = 500
"""Rows a statement: large enough to make a statement's own cost vanish, small enough to hold no lock for long."""

MAX_ROUNDS = 8


def push(jobs: Sequence[JobPayload], *, using: str, now: datetime | None = None) -> Sequence[FaktoryError | None]:
    """Store jobs, in one transaction, or in the caller's. The first of two with one jid counts (W10).

    A jid that lives stays as it is; one that is finished is replaced. Answers to each None, or why it was refused:
    NotUnique (W27).
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


def fetch(requests: Sequence[FetchRequest], *, using: str, now: datetime | None = None) -> list[list[Reservation]]:
    """Reserve jobs for each request, in its order of queues, then priority, then age (W13).

    No row is locked that is not handed out: requests of one worker that name the same queues are claimed for together,
    otherwise each tries its first queue; who got too little is planned for by what waits in each queue.
    """
    requests = [_answerable(request) for request in requests]
    claimed = _claim(_first_plan(requests), using=using, now=now)
    return _shared_out(requests, claimed, using=using, now=now)


class Exchanged(NamedTuple):
    """What `exchange` did: the answers of `push`, `ack` and `fetch`."""

    pushed: Sequence[FaktoryError | None]
    acked: list[bool]
    fetched: list[list[Reservation]]


def exchange(
    jobs: Sequence[JobPayload],
    acks: Sequence[Ack],
    requests: Sequence[FetchRequest],
    *,
    using: str,
    now: datetime | None = None,
) -> Exchanged:
    """`ack`, `push` and `fetch` in one transaction, on PostgreSQL in one round trip; what is pushed may be fetched."""
    is_one = max(len(jobs), len(acks)) <= CHUNK and not _any_options(jobs)
    if not is_one or not all(is_storable(ack.jid) for ack in acks):
        acked = ack(acks, using=using, now=now)
        pushed = push(jobs, using=using, now=now)
        return Exchanged(pushed, acked, fetch(requests, using=using, now=now))
    distinct = _distinct(jobs)
    requests = [_answerable(request) for request in requests]
    plan = _first_plan(requests)
    ended, claimed = run(
        using,
        lambda connection: dialect_of(connection).exchange(connection, distinct, acks, plan, now),
        atomic=not _dialect(using).joins(connections[using]),
    )
    acked = [_was_holder(ack, ended) for ack in acks]
    fetched = _shared_out(requests, claimed, using=using, now=now, is_under_way=True)
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
    *,
    using: str,
    now: datetime | None,
    is_under_way: bool = False,
) -> list[list[Reservation]]:
    """What was claimed, dealt to the requests, and more for those that it did not suffice for.

    Trouble on the way to more must not swallow what was claimed, or else done (`is_under_way`), before.
    """
    found: list[list[Reservation]] = [[] for _ in requests]
    _deal(found, requests, claimed)
    if len({(request.queues, request.wid) for request in requests}) <= 1:
        return found
    for _ in range(MAX_ROUNDS):
        if all(len(got) >= request.count for request, got in zip(requests, found, strict=True)):
            break
        try:
            claimed = _claim(_plan(requests, found, using=using, now=now), using=using, now=now)
        except (BrokerUnavailable, Error) as error:
            if not (is_under_way or any(found)) or connections[using].in_atomic_block:
                raise
            logger.warning("claim not completed, what was claimed before is handed out error=%s", error)
            break
        if not claimed:
            break
        _deal(found, requests, claimed)
    return found


def _answerable(request: FetchRequest) -> FetchRequest:
    """Without the queues that no database can know: one such name must not fail those that are claimed for with it."""
    if all(map(is_storable, request.queues)):
        return request
    return msgspec.structs.replace(request, queues=tuple(filter(is_storable, request.queues)))


def _claim(plan: Plan, *, using: str, now: datetime | None) -> list[Reservation]:
    if not plan.slots or plan.limit < 1:
        return []
    joined = len({slot.wid for slot in plan.slots}) == 1 or _dialect(using).joins(connections[using])
    return run(
        using,
        lambda connection: dialect_of(connection).claim(connection, plan, now),
        atomic=not (_dialect(using).one_statement and joined),
    )


def _plan(
    requests: Sequence[FetchRequest], found: Sequence[Sequence[Reservation]], *, using: str, now: datetime | None
) -> Plan:
    """Who takes from which queue, by how many wait in each: every request in turn, its queues in order."""
    wanted = [request.count - len(got) for request, got in zip(requests, found, strict=True)]
    queues = dict.fromkeys(queue for request in requests for queue in request.queues)
    wids = {request.wid for request in requests if request.wid}
    waiting, muted = run(
        using,
        lambda connection: dialect_of(connection).waiting(connection, list(queues), max(sum(wanted), 0), wids, now),
        atomic=False,
    )
    slots: dict[tuple[str, str], int] = {}
    for request, need in zip(requests, wanted, strict=True):
        missing = 0 if request.wid in muted else need
        for queue in request.queues:
            take = min(missing, waiting.get(queue, 0))
            if take:
                waiting[queue] -= take
                missing -= take
                slots[queue, request.wid] = slots.get((queue, request.wid), 0) + take
    return Plan([Slot(queue, wid, count) for (queue, wid), count in slots.items()], sum(slots.values()))


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


def ack(acks: Sequence[Ack], *, using: str, now: datetime | None = None) -> list[bool]:
    """End jobs well: the row goes, or stays as succeeded for its `result_ttl`. False: nothing was changed (W16)."""
    ended: Ended = {}
    one_statement = _dialect(using).one_statement
    for start in range(0, len(acks), CHUNK):
        chunk = [ack for ack in acks[start : start + CHUNK] if is_storable(ack.jid)]
        if chunk:
            ended |= run(
                using,
                lambda connection, chunk=chunk: dialect_of(connection).end(connection, chunk, now),  # type: ignore[misc]
                atomic=not one_statement,
            )
    return [_was_holder(ack, ended) for ack in acks]


def _was_holder(ack: Ack, ended: Ended) -> bool:
    if ack.jid not in ended or not holds(ack.wid, ack.attempt, *ended[ack.jid]):
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

    def give_back(_: BaseDatabaseWrapper) -> int:
        working = Job.objects.using(using).filter(held, state=State.WORKING)
        return working.update(state=State.ENQUEUED, wid="", started_at=None, reserved_until=None)

    return run(using, give_back, atomic=False)


def is_storable(text: str) -> bool:
    """Whether a database can hold, and so could know, this text: no NUL, no lone surrogate."""
    try:
        return b"\x00" not in text.encode()
    except UnicodeEncodeError:
        return False


def _dialect(using: str) -> Dialect:
    return dialect_of(connections[using])
