"""Handlers of TRACK SET and TRACK GET: call the broker and reply. Rule: W27."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from ... import conf
from ...core.payloads import Tracked
from ...core.protocol import resp
from ...core.protocol.tracking import TrackGet, TrackSet, format_tracked
from ...errors import FaktoryError
from ..context import ConnectedClient, Handler, ServerContext


def track_set(server: ServerContext, connection: ConnectedClient, command: TrackSet) -> bytes | None:
    """Store a job's progress; only its holder, or a connection without wid, can lengthen its reservation."""
    if not connection.identity.wid and command.update.reserve_until is not None and conf.get("STRICT_WIDS"):
        return without_wid("TRACK SET")
    # The wid comes from HELLO, not from the command: a client cannot extend the job of another worker.
    update = msgspec.structs.replace(command.update, wid=connection.identity.wid)

    def answer(result: FaktoryError | None) -> None:
        connection.finish(resp.outcome(result))

    server.execute_blocking(partial(server.broker.track_set, [update]), answer, [f"jid:{update.jid}"])
    return None


def track_get(server: ServerContext, connection: ConnectedClient, command: TrackGet) -> bytes | None:
    """Reply with the state and progress of a job."""

    def answer(result: list[Tracked] | FaktoryError) -> None:
        connection.finish(resp.outcome(result, lambda tracked: resp.bulk(format_tracked(tracked[0]))))

    server.read(connection, answer, server.broker.track_get, (command.jid,))
    return None


def without_wid(verb: str) -> bytes:
    """Return the error for a connection without wid when `STRICT_WIDS` requires one."""
    return resp.error(f"{verb}: this server has STRICT_WIDS, expected a connection that gave its wid in HELLO")


VERBS: dict[type[Any], Handler] = {
    TrackSet: track_set,
    TrackGet: track_get,
}
