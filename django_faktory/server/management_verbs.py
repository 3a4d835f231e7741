"""The verbs people manage with: MUTATE, QUEUE and FLUSH → broker call → reply. Rules: W23 to W25.

Changes of many jobs and reads have a lane each, so that they hold up no other command.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import conf, jsontext
from ..errors import FaktoryError
from ..protocol import resp
from ..protocol.management import Flush, Mutate, PauseQueues, QueueLatency, RemoveQueues, ResumeQueues

if TYPE_CHECKING:
    from .connection import Connection
    from .listener import Server


def mutate(server: Server, connection: Connection, command: Mutate) -> bytes | None:
    """Change many jobs; those that are enqueued by it find the fetchers that wait (W23)."""
    if refusal := _refusal("MUTATE"):
        return refusal
    mutation = command.mutation
    work = partial(server.broker.mutate, mutation, go_on=server.goes_on)
    wakes = mutation.command == "requeue"
    server.long_work.submit(work, _answer(server, connection, wakes_all=wakes))
    return None


def pause(server: Server, connection: Connection, command: PauseQueues) -> bytes | None:
    """Give out no job of these queues. Fetchers that wait ask the broker at each try, and so find it paused (W24)."""
    if refusal := _refusal("QUEUE PAUSE"):
        return refusal
    server.may_block(partial(server.broker.pause, command.queues), _answer(server, connection), ["queues"])
    return None


def resume(server: Server, connection: Connection, command: ResumeQueues) -> bytes | None:
    """Give out jobs of these queues again, to those that wait already too (W24)."""
    if refusal := _refusal("QUEUE RESUME"):
        return refusal
    wakes_all = command.queues is None
    answer = _answer(server, connection, wakes=command.queues or (), wakes_all=wakes_all)
    server.may_block(partial(server.broker.resume, command.queues), answer, ["queues"])
    return None


def remove(server: Server, connection: Connection, command: RemoveQueues) -> bytes | None:
    """Drop what waits in these queues, and forget them (W24)."""
    if refusal := _refusal("QUEUE REMOVE"):
        return refusal
    work = partial(server.broker.remove, command.queues, go_on=server.goes_on)
    server.long_work.submit(work, _answer(server, connection))
    return None


def latency(server: Server, connection: Connection, command: QueueLatency) -> bytes | None:
    """Seconds the oldest job of each queue has waited (W24)."""

    def answer(told: dict[str, float] | FaktoryError) -> None:
        if isinstance(told, FaktoryError):
            connection.finish(_error(told))
            return
        # Whole numbers without a fraction, as the original server writes them.
        seconds = {name: int(value) if value.is_integer() else value for name, value in told.items()}
        connection.finish(resp.bulk(jsontext.encode(seconds)))

    server.read(connection, partial(server.broker.latency, command.queues), answer)
    return None


def flush(server: Server, connection: Connection, command: Flush) -> bytes | None:  # noqa: ARG001
    """Forget all jobs, where the project allows it (W25)."""
    if not conf.allows_flush():
        return resp.error('FLUSH is disabled; to allow it, set FAKTORY["ALLOW_FLUSH"] = True where the server runs')
    server.long_work.submit(partial(server.broker.flush, go_on=server.goes_on), _answer(server, connection))
    return None


def _refusal(command: str) -> bytes | None:
    """The answer where the project does not let clients do this."""
    if command not in conf.get("REFUSED_COMMANDS"):
        return None
    return resp.error(f'{command} is disabled; to allow it, take it out of FAKTORY["REFUSED_COMMANDS"]')


def _answer(
    server: Server, connection: Connection, *, wakes: Collection[str] = (), wakes_all: bool = False
) -> Callable[[Any], None]:
    """Say OK or what went wrong; then let the fetchers of these queues try."""

    def answer(told: Any) -> None:
        server.shelf.clear()  # whatever was done: what was read before it is not to be handed out after it
        connection.finish(_error(told) if isinstance(told, FaktoryError) else resp.OK)
        if wakes or wakes_all:
            server.fetchers.wake(None if wakes_all else wakes)

    return answer


def _error(error: FaktoryError) -> bytes:
    return resp.error(str(error), code=error.code)


VERBS: dict[type[Any], Callable[[Server, Connection, Any], bytes | None]] = {
    Mutate: mutate,
    PauseQueues: pause,
    ResumeQueues: resume,
    RemoveQueues: remove,
    QueueLatency: latency,
    Flush: flush,
}
