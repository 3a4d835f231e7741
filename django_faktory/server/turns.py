"""A turn: the pushes, acks and fetches that have come since the last one, as one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..brokers.base import Broker
from ..payloads import Ack, FetchRequest, JobPayload
from .committer import MAX_BATCH

Item = list[JobPayload] | Ack | FetchRequest
"""A PUSH or PUSHB, an ACK, a FETCH."""

BYTES_A_WEIGHT = 8 * 1024
"""Jobs of this size and below weigh the same, so a transaction carries about 4 MiB of larger ones."""


def weight(item: Item) -> int:
    """How much of a transaction's room an item takes: a plain command is 1."""
    if isinstance(item, list):
        if len(item) >= MAX_BATCH:  # it has a transaction for itself, whatever it weighs
            return len(item)
        return sum(1 + len(job.text) // BYTES_A_WEIGHT for job in item)
    return 1


def take_turn(broker: Broker, items: Sequence[Item]) -> list[Any]:
    """Carry out the items: to each what `push`, `ack` or `fetch` answers."""
    sets = [item for item in items if isinstance(item, list)]
    acks = [item for item in items if isinstance(item, Ack)]
    requests = [item for item in items if isinstance(item, FetchRequest)]
    told = _exchange(broker, [job for jobs in sets for job in jobs], acks, requests)
    pushed, acked, fetched = map(iter, told)
    answers: list[Any] = []
    for item in items:
        if isinstance(item, list):
            answers.append([next(pushed) for _ in item])
        else:
            answers.append(next(acked if isinstance(item, Ack) else fetched))
    return answers


def _exchange(
    broker: Broker, jobs: list[JobPayload], acks: list[Ack], requests: list[FetchRequest]
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """One verb alone is carried out as that verb."""
    if bool(jobs) + bool(acks) + bool(requests) > 1:
        return broker.exchange(jobs, acks, requests)
    return (
        broker.push(jobs) if jobs else [],
        broker.ack(acks) if acks else [],
        broker.fetch(requests) if requests else [],
    )
