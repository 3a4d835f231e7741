"""Handlers of BATCH NEW, OPEN, COMMIT and STATUS: call the broker and reply. Rule: W26.

All but STATUS lock a batch, so they may wait for another transaction (ADR 0024).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec

from ...core.payloads import BatchStatus
from ...core.protocol import resp
from ...core.protocol.batches import BatchAsk, BatchCommit, BatchNew, BatchOpen, format_status
from ...errors import BrokerUnavailable, FaktoryError, LockTimeout
from ..context import ConnectedClient, Handler, ServerContext


def new(server: ServerContext, connection: ConnectedClient, command: BatchNew) -> bytes | None:
    """Create a batch. Its bid is chosen here, so that a retry after a lost connection stores no second batch."""
    batch = msgspec.structs.replace(command.batch, bid=f"b-{uuid4().hex}")
    reply = _reply_with_bulk(connection)

    def answer(result: str | FaktoryError) -> None:
        # The batch may be stored although the client never learns its bid: an orphan would keep its parent open.
        if isinstance(result, BrokerUnavailable) and not isinstance(result, LockTimeout):
            server.uncertain_batches.add(batch.bid)
        reply(result)

    work = partial(server.broker.new_batch, batch, caller_wid=connection.identity.wid)
    # Only a parent can be locked: the row of the new batch is not visible to other transactions yet.
    server.execute_blocking(work, answer, [f"bid:{batch.parent_bid}"] if batch.parent_bid else (), is_repeatable=True)
    return None


def reopen(server: ServerContext, connection: ConnectedClient, command: BatchOpen) -> bytes | None:
    """Reopen a committed batch, so that jobs can be added."""
    work = partial(server.broker.open_batch, command.bid, caller_wid=connection.identity.wid)
    server.execute_blocking(work, _reply_with_bulk(connection), [f"bid:{command.bid}"], is_repeatable=True)
    return None


def commit(server: ServerContext, connection: ConnectedClient, command: BatchCommit) -> bytes | None:
    """Commit a batch and wake waiting FETCHes, since a callback may be enqueued at once."""

    def answer(result: FaktoryError | None) -> None:
        connection.finish(resp.outcome(result))
        server.fetch_queue.wake()

    work = partial(server.broker.commit_batch, command.bid)
    server.execute_blocking(work, answer, [f"bid:{command.bid}"], is_repeatable=True)
    return None


def status(server: ServerContext, connection: ConnectedClient, command: BatchAsk) -> bytes | None:
    """Reply with the progress of a batch."""

    def answer(result: BatchStatus | FaktoryError) -> None:
        connection.finish(resp.outcome(result, lambda status: resp.bulk(format_status(status))))

    # Takes no lock, so it does not wait behind commands that do.
    server.read(connection, answer, server.broker.batch_status, command.bid)
    return None


def _reply_with_bulk(connection: ConnectedClient) -> Callable[[str | FaktoryError], None]:
    def answer(result: str | FaktoryError) -> None:
        connection.finish(resp.outcome(result, resp.bulk))

    return answer


VERBS: dict[type[Any], Handler] = {
    BatchNew: new,
    BatchOpen: reopen,
    BatchCommit: commit,
    BatchAsk: status,
}
