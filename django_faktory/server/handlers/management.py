"""Handlers of the management verbs MUTATE, QUEUE and FLUSH: call the broker and reply. Rules: W23 to W25.

Changes of many jobs and reads have a commit queue each, so that they delay no other command.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from ... import conf
from ...core.json import jsontext
from ...core.protocol import resp
from ...core.protocol.management import Flush, Mutate, PauseQueues, QueueLatency, RemoveQueues, ResumeQueues
from ...errors import FaktoryError
from ..context import ConnectedClient, Handler, ServerContext


def mutate(server: ServerContext, connection: ConnectedClient, command: Mutate) -> bytes | None:
    """Change many jobs in bounded steps; `requeue` wakes all waiting FETCHes (W23)."""
    if refusal := _refusal("MUTATE"):
        return refusal
    mutation = command.mutation
    work = partial(server.broker.mutate, mutation, should_continue=server.should_continue)
    wakes = mutation.command == "requeue"
    server.long_work.submit(work, _answer(server, connection, wakes_all=wakes))
    return None


def pause(server: ServerContext, connection: ConnectedClient, command: PauseQueues) -> bytes | None:
    """Pause queues. Waiting FETCHes are covered, as each of their claims checks the pause in the database (W24)."""
    if refusal := _refusal("QUEUE PAUSE"):
        return refusal
    # One subject for all queues: such commands are rare, so they may wait for each other.
    work = partial(server.broker.pause, command.queues, by=connection.description)
    server.execute_blocking(work, _answer(server, connection), ["queues"])
    return None


def resume(server: ServerContext, connection: ConnectedClient, command: ResumeQueues) -> bytes | None:
    """Resume queues and wake the FETCHes that wait for them (W24)."""
    if refusal := _refusal("QUEUE RESUME"):
        return refusal
    wakes_all = command.queues is None
    answer = _answer(server, connection, wakes=command.queues or (), wakes_all=wakes_all)
    server.execute_blocking(partial(server.broker.resume, command.queues), answer, ["queues"])
    return None


def remove(server: ServerContext, connection: ConnectedClient, command: RemoveQueues) -> bytes | None:
    """Delete the waiting jobs of these queues, the queues and their pauses (W24)."""
    if refusal := _refusal("QUEUE REMOVE"):
        return refusal
    # Deletes in steps and checks `should_continue` between them, so that a stop does not wait for a large queue.
    work = partial(server.broker.remove, command.queues, should_continue=server.should_continue)
    server.long_work.submit(work, _answer(server, connection))
    return None


def latency(server: ServerContext, connection: ConnectedClient, command: QueueLatency) -> bytes | None:
    """Reply with the seconds that the oldest job of each queue has waited (W24)."""

    def encode(latencies: dict[str, float]) -> bytes:
        # Whole numbers without a fraction, as the original server writes them.
        seconds = {name: int(value) if value.is_integer() else value for name, value in latencies.items()}
        return resp.bulk(jsontext.encode(seconds))

    def answer(result: dict[str, float] | FaktoryError) -> None:
        connection.finish(resp.outcome(result, encode))

    # A slow read (8 to 10 s for 1,000 names, ADR 0005): in the queue for reads it delays only other reads.
    server.read(connection, answer, server.broker.latency, tuple(command.queues))
    return None


def flush(server: ServerContext, connection: ConnectedClient, command: Flush) -> bytes | None:  # noqa: ARG001
    """Delete all jobs, locks, tracking, queues and pauses, if ALLOW_FLUSH permits it (W25)."""
    if not conf.allows_flush():
        return resp.error('FLUSH is disabled; to allow it, set FAKTORY["ALLOW_FLUSH"] = True where the server runs')
    server.long_work.submit(
        partial(server.broker.flush, should_continue=server.should_continue), _answer(server, connection)
    )
    return None


def _refusal(command: str) -> bytes | None:
    """Return the error if REFUSED_COMMANDS names this command, else None."""
    if command not in conf.get("REFUSED_COMMANDS"):
        return None
    return resp.error(f'{command} is disabled; to allow it, take it out of FAKTORY["REFUSED_COMMANDS"]')


def _answer(
    server: ServerContext, connection: ConnectedClient, *, wakes: Collection[str] = (), wakes_all: bool = False
) -> Callable[[Any], None]:
    """Return a callback that replies with OK or the error, then wakes the FETCHes of these queues."""

    def answer(result: Any) -> None:
        server.prefetch_buffer.clear()  # a job prefetched before a pause, removal or change must not be delivered
        connection.finish(resp.outcome(result))
        if wakes or wakes_all:
            server.fetch_queue.wake(None if wakes_all else wakes)

    return answer


VERBS: dict[type[Any], Handler] = {
    Mutate: mutate,
    PauseQueues: pause,
    ResumeQueues: resume,
    RemoveQueues: remove,
    QueueLatency: latency,
    Flush: flush,
}
