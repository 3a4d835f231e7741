"""A turn: the pushes, acks and fetches that have come since the last one, as one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..brokers.base import Broker, InFlight, Lent
from ..payloads import Ack, FetchRequest, JobPayload
from .committer import MAX_BATCH

Item = list[JobPayload] | Ack | FetchRequest
"""A PUSH or PUSHB, an ACK, a FETCH."""

Told = tuple[Sequence[Any], Sequence[Any], Sequence[Any]]
"""What `Broker.exchange` answers."""

BYTES_A_WEIGHT = 8 * 1024
"""Jobs of this size and below weigh the same, so a transaction carries about 4 MiB of larger ones."""


NAMES_A_WEIGHT = 10
"""Queues of a FETCH that weigh the same."""


def weight(item: object) -> int:
    """How much of a transaction's room an item takes: a plain command is 1."""
    if isinstance(item, FetchRequest):
        return 1 + len(item.queues) // NAMES_A_WEIGHT
    if isinstance(item, list):
        if len(item) >= MAX_BATCH:  # it has a transaction for itself, whatever it weighs
            return len(item)
        return sum(1 + len(job.text) // BYTES_A_WEIGHT for job in item)
    return 1


class Turn:
    """One set of items."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.sets = [item for item in items if isinstance(item, list)]
        self.jobs = [job for jobs in self.sets for job in jobs]
        self.acks = [item for item in items if isinstance(item, Ack)]
        self.requests = [item for item in items if isinstance(item, FetchRequest)]

    def answers(self, told: Told) -> list[Any]:
        """To each item what `push`, `ack` or `fetch` answers."""
        pushed, acked, fetched = map(iter, told)
        answers: list[Any] = []
        for item in self.items:
            if isinstance(item, list):
                answers.append([next(pushed) for _ in item])
            else:
                answers.append(next(acked if isinstance(item, Ack) else fetched))
        return answers


def take_turn(broker: Broker, items: Sequence[Item]) -> list[Any]:
    """Carry out the items: to each what `push`, `ack` or `fetch` answers. One verb alone is carried out as itself."""
    turn = Turn(items)
    is_mixed = bool(turn.jobs) + bool(turn.acks) + bool(turn.requests) > 1
    if is_mixed or any(request.ahead for request in turn.requests):
        return turn.answers(broker.exchange(turn.jobs, turn.acks, turn.requests))
    pushed: Sequence[Any] = broker.push(turn.jobs) if turn.jobs else []
    acked: Sequence[Any] = broker.ack(turn.acks) if turn.acks else []
    return turn.answers((pushed, acked, broker.fetch(turn.requests) if turn.requests else []))


def begin_turn(lent: Lent, items: Sequence[Item]) -> InFlight[list[Any]] | None:
    """`take_turn` on a lent connection, where it can go that way."""
    turn = Turn(items)
    return lent(turn.jobs, turn.acks, turn.requests, turn.answers)
