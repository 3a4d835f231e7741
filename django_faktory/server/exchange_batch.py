"""Execute pushes, acks and fetches that arrived together in one transaction (ADR 0005).

`take_turn` runs in a thread of the commit queue, `begin_turn` on the event loop with a lent connection (ADR 0021).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..brokers.base import Broker, InFlight, Lent
from ..core.payloads import Ack, FetchRequest, JobPayload
from .group_commit import MAX_BATCH

Item = list[JobPayload] | Ack | FetchRequest
"""A PUSH or PUSHB (its jobs), an ACK, or a FETCH."""

Told = tuple[Sequence[Any], Sequence[Any], Sequence[Any]]
"""Result of `Broker.exchange`: answers to the jobs, the acks and the requests."""

BYTES_A_WEIGHT = 8 * 1024
"""Jobs up to this size weigh 1, so a transaction has about 4 MiB of larger ones."""


NAMES_A_WEIGHT = 10
"""Queues of a FETCH that add 1 to its weight."""


def weight(item: object) -> int:
    """Return the weight of an item in a transaction of at most `MAX_BATCH`; a plain command weighs 1."""
    # A claim reads each named queue, so many names would lengthen the transaction of the other commands.
    if isinstance(item, FetchRequest):
        return 1 + len(item.queues) // NAMES_A_WEIGHT
    if isinstance(item, list):
        if len(item) >= MAX_BATCH:  # fills a transaction alone; adding up the sizes of its jobs is not worth it
            return len(item)
        return sum(1 + len(job.text) // BYTES_A_WEIGHT for job in item)
    return 1


class Turn:
    """Items of one exchange, sorted by kind."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.sets = [item for item in items if isinstance(item, list)]
        self.jobs = [job for jobs in self.sets for job in jobs]
        self.acks = [item for item in items if isinstance(item, Ack)]
        self.requests = [item for item in items if isinstance(item, FetchRequest)]

    def answers(self, told: Told) -> list[Any]:
        """Return the answer of `push`, `ack` or `fetch` for each item, in the order of `items`."""
        pushed, acked, fetched = map(iter, told)
        answers: list[Any] = []
        for item in self.items:
            if isinstance(item, list):
                answers.append([next(pushed) for _ in item])
            else:
                answers.append(next(acked if isinstance(item, Ack) else fetched))
        return answers


def take_turn(broker: Broker, items: Sequence[Item]) -> list[Any]:
    """Execute the items and return an answer for each. Items of one kind use `push`, `ack` or `fetch`; blocks."""
    turn = Turn(items)
    is_mixed = bool(turn.jobs) + bool(turn.acks) + bool(turn.requests) > 1
    # Only `exchange` can mix verbs and prefetch jobs.
    if is_mixed or any(request.ahead for request in turn.requests):
        return turn.answers(broker.exchange(turn.jobs, turn.acks, turn.requests))
    pushed: Sequence[Any] = broker.push(turn.jobs) if turn.jobs else []
    acked: Sequence[Any] = broker.ack(turn.acks) if turn.acks else []
    return turn.answers((pushed, acked, broker.fetch(turn.requests) if turn.requests else []))


def begin_turn(lent: Lent, items: Sequence[Item]) -> InFlight[list[Any]] | None:
    """Send the items on a lent connection without waiting; None if they need `take_turn`."""
    turn = Turn(items)
    return lent(turn.jobs, turn.acks, turn.requests, turn.answers)
