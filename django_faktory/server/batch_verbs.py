"""BATCH NEW, OPEN, COMMIT, STATUS → broker call → reply. Rule: W26. Those that lock a batch may have to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import FaktoryError
from ..payloads import BatchStatus
from ..protocol import resp
from ..protocol.batches import BatchAsk, BatchCommit, BatchNew, BatchOpen, status_text

if TYPE_CHECKING:
    from .connection import Connection
    from .listener import Server


def new(server: Server, connection: Connection, command: BatchNew) -> bytes | None:
    """Make a batch; its parent is asked who this is."""
    work = partial(server.broker.new_batch, command.batch, by=connection.identity.wid)
    server.apart.submit(work, _with_bulk(connection))
    return None


def reopen(server: Server, connection: Connection, command: BatchOpen) -> bytes | None:
    """Tell whether this client may add to it."""
    work = partial(server.broker.open_batch, command.bid, by=connection.identity.wid)
    server.apart.submit(work, _with_bulk(connection))
    return None


def commit(server: Server, connection: Connection, command: BatchCommit) -> bytes | None:
    """Callbacks may come from now on; one that comes at once wakes who waits for it."""

    def answer(told: FaktoryError | None) -> None:
        connection.finish(_error(told) if isinstance(told, FaktoryError) else resp.OK)
        server.fetchers.wake()

    server.apart.submit(partial(server.broker.commit_batch, command.bid), answer)
    return None


def status(server: Server, connection: Connection, command: BatchAsk) -> bytes | None:
    """Tell how it is doing."""

    def answer(told: BatchStatus | FaktoryError) -> None:
        connection.finish(_error(told) if isinstance(told, FaktoryError) else resp.bulk(status_text(told)))

    server.control.submit(partial(server.broker.batch_status, command.bid), answer)
    return None


def _with_bulk(connection: Connection) -> Callable[[str | FaktoryError], None]:
    def answer(told: str | FaktoryError) -> None:
        connection.finish(_error(told) if isinstance(told, FaktoryError) else resp.bulk(told))

    return answer


def _error(error: FaktoryError) -> bytes:
    return resp.error(str(error), code=error.code)


VERBS: dict[type[Any], Callable[[Server, Connection, Any], bytes | None]] = {
    BatchNew: new,
    BatchOpen: reopen,
    BatchCommit: commit,
    BatchAsk: status,
}
