"""Execute pushes, acks and fetches that arrived together in one transaction (ADR 0005).

`execute_exchange` runs in a thread of the commit queue, `exchange_on_loop` on the event loop (ADR 0005).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from ..brokers.base import Broker
from ..core.loop_connection import InThread, LoopConnection
from ..core.payloads import Ack, ExchangeReply, FetchRequest, JobPayload
from .group_commit import MAX_SET_WEIGHT

Item = list[JobPayload] | Ack | FetchRequest
"""A PUSH or PUSHB (its jobs), an ACK, or a FETCH."""

BYTES_A_WEIGHT = 8 * 1024
"""Jobs up to this size weigh 1, so a transaction has about 4 MiB of larger ones."""

MAX_PUSH_IN_EXCHANGE = 50
"""Weight above which a PUSH or PUSHB uses the bulk queue instead, so that it does not delay single commands."""

NAMES_A_WEIGHT = 10
"""Queues of a FETCH that add 1 to its weight."""


def weight(item: object) -> int:
    """Return the weight of an item in a transaction of at most `MAX_SET_WEIGHT`; a plain command weighs 1."""
    if type(item) is list:
        if len(item) == 1:
            return 1 + len(item[0].text) // BYTES_A_WEIGHT
        if len(item) >= MAX_SET_WEIGHT:  # fills a transaction alone; adding up the sizes of its jobs is not worth it
            return len(item)
        return sum(1 + len(job.text) // BYTES_A_WEIGHT for job in item)
    # A claim reads each named queue, so many names would lengthen the transaction of the other commands.
    return 1 + len(item.queues) // NAMES_A_WEIGHT if type(item) is FetchRequest else 1


class ExchangeSet:
    """Items of one exchange, grouped by kind."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.jobs: list[JobPayload] = []
        self.acks: list[Ack] = []
        self.requests: list[FetchRequest] = []
        for item in items:
            if type(item) is list:
                self.jobs += item
            elif type(item) is Ack:
                self.acks.append(item)
            elif type(item) is FetchRequest:
                self.requests.append(item)

    def build_answers(self, reply: ExchangeReply) -> list[Any]:
        """Return the answer of `push`, `ack` or `fetch` for each item, in the order of `items`."""
        pushed, acked, fetched = map(iter, reply)
        answers: list[Any] = []
        for item in self.items:
            if type(item) is list:
                answers.append([*islice(pushed, len(item))])
            else:
                answers.append(next(acked if type(item) is Ack else fetched))
        return answers


def execute_exchange(broker: Broker, items: Sequence[Item]) -> list[Any]:
    """Execute the items and return an answer for each. Items of one kind use `push`, `ack` or `fetch`; blocks."""
    commands = ExchangeSet(items)
    is_mixed = bool(commands.jobs) + bool(commands.acks) + bool(commands.requests) > 1
    # Only `exchange` can mix verbs and prefetch jobs.
    if is_mixed or any(request.prefetch for request in commands.requests):
        return commands.build_answers(broker.exchange(commands.jobs, commands.acks, commands.requests))
    pushed = broker.push(commands.jobs) if commands.jobs else []
    acked = broker.ack(commands.acks) if commands.acks else []
    fetched = broker.fetch(commands.requests) if commands.requests else []
    return commands.build_answers(ExchangeReply(pushed, acked, fetched))


async def exchange_on_loop(
    broker: Broker, connection: LoopConnection, items: Sequence[Item], in_thread: InThread
) -> list[Any] | None:
    """Execute the items on a connection of the event loop; None, with nothing done, if they need `execute_exchange`."""
    commands = ExchangeSet(items)
    reply = await broker.exchange_on_loop(connection, commands.jobs, commands.acks, commands.requests, in_thread)
    return None if reply is None else commands.build_answers(reply)
