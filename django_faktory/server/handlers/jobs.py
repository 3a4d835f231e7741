"""Handlers of the commands: call the broker and reply. `VERBS` maps each command class to its handler.

A handler returns the reply, or None if it passes the reply to `connection.finish` later. The broker has
the rules about jobs.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from ... import __version__, conf
from ...core.json import jsontext
from ...core.logs import get_logger
from ...core.payloads import Ack, FetchRequest, JobPayload, Lease, Reservation, failure, failure_of, rfc3339
from ...core.protocol import resp
from ...core.protocol.commands import AckJob, BeatWorker, End, FailJob, Fetch, Hello, Info, Push, PushBulk
from ...core.protocol.versions import semantic
from ...errors import FaktoryError, InvalidPayload, UnknownWorker
from ..context import ConnectedClient, Handler, ServerContext
from ..fetch_index import WaitingFetch
from . import batches, management, tracking
from .tracking import without_wid

logger = get_logger(__name__)


def hello(server: ServerContext, connection: ConnectedClient, command: Hello) -> bytes | None:
    """Accept a producer at once; register a worker first, and close its connection if that fails (W2)."""
    if not command.identity.wid:
        return resp.OK
    server.index_by_wid(connection)

    def answer(result: FaktoryError | None) -> None:
        if result is None:
            connection.finish(resp.OK)
        else:
            connection.reply_and_close(resp.refusal(result))

    server.record_worker(command.identity, answer)
    return None


def end(server: ServerContext, connection: ConnectedClient, command: End) -> bytes | None:  # noqa: ARG001
    """Reply with OK and close the connection (W4)."""
    connection.reply_and_close(resp.OK)
    return None


def push(server: ServerContext, connection: ConnectedClient, command: Push) -> bytes | None:
    """Store a job, reply after the commit, and wake waiting FETCHes of its queue (W29)."""

    def answer(result: list[FaktoryError | None] | FaktoryError) -> None:
        refusal = result if isinstance(result, FaktoryError) else result[0]
        # Before the reply: afterwards no job that was prefetched earlier may be delivered ahead of this one.
        if command.job.priority > 0:
            server.prefetch_buffer.release_for_priority([command.job.queue])
        connection.finish(resp.outcome(refusal))
        if refusal is None:
            server.announce_jobs([command.job])

    server.push([_with_sender(connection, command.job)], answer)
    return None


def push_bulk(server: ServerContext, connection: ConnectedClient, command: PushBulk) -> bytes | None:
    """Store the valid jobs and reply with the refused ones by jid (W12)."""
    valid = [_with_sender(connection, job) for job in command.jobs if isinstance(job, JobPayload)]
    refused = {job.jid: str(job) for job in command.jobs if isinstance(job, InvalidPayload)}
    if not valid:
        # Returned: `connection.finish` would execute the next command inside this one, and its next inside that.
        return resp.bulk(jsontext.encode(refused))
    queues_with_priority = {job.queue for job in valid if job.priority > 0}

    def answer(result: list[FaktoryError | None] | FaktoryError) -> None:
        if queues_with_priority:
            server.prefetch_buffer.release_for_priority(queues_with_priority)
        if isinstance(result, FaktoryError):
            connection.finish(resp.refusal(result))
            return
        refused.update(
            {job.jid: _format_refusal(refusal) for job, refusal in zip(valid, result, strict=True) if refusal}
        )
        connection.finish(resp.bulk(jsontext.encode(refused)))
        server.announce_jobs(valid)

    server.push(valid, answer)
    return None


def _with_sender(connection: ConnectedClient, job: JobPayload) -> JobPayload:
    """Add the sender's wid to a job of a batch: the broker checks whether this worker may add jobs to it."""
    if job.options is None or not job.options.bid:
        return job
    return replace(job, options=replace(job.options, caller_wid=connection.identity.wid))


def fetch(server: ServerContext, connection: ConnectedClient, command: Fetch) -> bytes | None:
    """Reply with a job, or null after two seconds (W13); a client that has closed its sending half gets none (W14)."""
    if connection.is_ending:
        return resp.NULL
    wid = connection.identity.wid
    if not wid and conf.get("STRICT_WIDS"):
        return without_wid("FETCH")  # without a wid the client could not end the job

    def answer(result: Reservation | FaktoryError | None) -> None:
        if not isinstance(result, Reservation):
            connection.finish(resp.NULL if result is None else resp.refusal(result))
            return
        # None: the job had corrupted text and is dead now. The client fetches again.
        if (reply := _encode_job(server, result)) is None:
            connection.finish(resp.NULL)
        else:
            if not result.is_prefetched:  # prefetched jobs are tracked from the time they leave the buffer
                server.deliveries.add(result)
            connection.deliver(reply, result)

    request = FetchRequest(queues=command.queues, wid=wid, lease=Lease.DELIVERY)
    server.prefetch_buffer.record_fetch(request, id(connection))
    # A prefetched job is returned as the reply at once, without entering the queue of waiting FETCHes.
    if job := server.prefetch_buffer.take(request):
        reply = _encode_job(server, job)
        if reply is None:
            return resp.NULL
        connection.expect_delivery(job)
        return reply
    waiting_fetch = WaitingFetch(request, answer)
    connection.on_disconnect = lambda: server.fetch_queue.leave(waiting_fetch)
    server.fetch_queue.add(waiting_fetch)
    return None


def ack(server: ServerContext, connection: ConnectedClient, command: AckJob) -> bytes | None:
    """Acknowledge a job; the broker decides whether this connection may end it (W16)."""
    jid, wid = command.jid, connection.identity.wid
    if not wid and conf.get("STRICT_WIDS"):
        return without_wid("ACK")
    # Before the ACK is submitted, so that the claim and the ACK are in one transaction.
    server.fetch_queue.claim_with_ack(jid)
    server.ack(
        Ack(jid=jid, wid=wid, attempt=server.deliveries.attempt_of(jid, wid)), _on_job_ended(server, connection, jid)
    )
    return None


def _on_job_ended(
    server: ServerContext, connection: ConnectedClient, jid: str
) -> Callable[[FaktoryError | bool], None]:
    def answer(result: FaktoryError | bool) -> None:
        if result is True:  # False: nothing was changed; another worker may have the job, so it stays tracked
            server.deliveries.forget(jid)
        connection.finish(resp.outcome(result))

    return answer


def fail(server: ServerContext, connection: ConnectedClient, command: FailJob) -> bytes | None:
    """Record the failure of a job, with the same check as for ACK (W17)."""
    jid, wid = command.jid, connection.identity.wid
    if not wid and conf.get("STRICT_WIDS"):
        return without_wid("FAIL")
    report = failure(
        jid=jid,
        wid=wid,
        attempt=server.deliveries.attempt_of(jid, wid),
        errtype=command.errtype,
        message=command.message,
        backtrace=command.backtrace,
    )
    server.fail(report, _on_job_ended(server, connection, jid))
    return None


def beat(server: ServerContext, connection: ConnectedClient, command: BeatWorker) -> bytes | None:
    """Record a heartbeat; the reply may carry the state `quiet` or `terminate` (W21)."""
    wid = command.beat.wid
    if not connection.identity.wid:
        return resp.error("BEAT: expected a connection that gave its wid in HELLO; producers send no BEAT")
    if wid != connection.identity.wid and conf.get("STRICT_WIDS"):
        return resp.error("BEAT: this server has STRICT_WIDS, expected the wid that this connection gave in HELLO")

    def answer(state: FaktoryError | str) -> None:
        if state:
            server.prefetch_buffer.distrust(wid)
        if isinstance(state, FaktoryError):
            connection.finish(resp.refusal(state))
            if isinstance(state, UnknownWorker):  # considered lost (W20): it has to connect and register again
                server.drop([wid])
        else:
            connection.finish(resp.bulk(jsontext.encode({"state": state})) if state else resp.OK)

    # Extends reservations of confirmed deliveries only: a job that never arrived must return to its queue (ADR 0026).
    beat = replace(command.beat, keeps_delivered=True) if conf.get("BEAT_KEEPS_JOBS") else command.beat
    server.record_worker(beat, answer)
    return None


def info(server: ServerContext, connection: ConnectedClient, command: Info) -> bytes | None:  # noqa: ARG001
    """Reply with counts of jobs, queues and workers, in the original server's shape (W22)."""

    def answer(result: dict[str, Any] | FaktoryError) -> None:
        connection.finish(resp.outcome(result, lambda numbers: resp.bulk(jsontext.encode(_info(server, numbers)))))

    server.read(connection, answer, server.broker.info)
    return None


VERBS: dict[type[Any], Handler] = {
    Hello: hello,
    End: end,
    Push: push,
    PushBulk: push_bulk,
    Fetch: fetch,
    AckJob: ack,
    FailJob: fail,
    BeatWorker: beat,
    Info: info,
    **batches.VERBS,
    **management.VERBS,
    **tracking.VERBS,
}


def _encode_job(server: ServerContext, job: Reservation) -> bytes | None:
    """Return the reply with a job, or None, after killing the job, if its stored text is not JSON."""
    server.deliveries.remember_batch(job)
    try:
        return resp.bulk(job.wire())
    except InvalidPayload as error:
        _kill(server, job, error)
        return None


def _kill(server: ServerContext, job: Reservation, error: InvalidPayload) -> None:
    """Move a job with corrupted text to dead: no worker could read it, but an operator can find it there."""
    logger.error("stored job is not JSON jid=%s queue=%s error=%s", job.jid, job.queue, error)
    report = failure_of(job, errtype=type(error).__name__, message=str(error), verdict="kill")
    server.fail(report, lambda _: None)


def _format_refusal(refusal: FaktoryError) -> str:
    """Return a refusal for PUSHB's reply: codes other than ERR precede the text, as in `-CODE text`."""
    return str(refusal) if refusal.code == FaktoryError.code else f"{refusal.code} {refusal}"


def _info(server: ServerContext, numbers: dict[str, Any]) -> dict[str, Any]:
    now = datetime.now(UTC)
    sets = numbers["sets"]
    # The original server reports its periodic tasks in this shape (W22); this one has no such counters.
    idle = {"cycles": 0, "enqueued": 0, "wall_time_sec": 0.0}
    return {
        "now": rfc3339(now),
        "server_utc_time": now.strftime("%H:%M:%S UTC"),
        "faktory": {
            "queues": numbers["queues"],
            "sets": sets,
            "tasks": {
                "Busy": {"reaped": 0, "size": sets["working"]},
                "Dead": {**idle, "size": sets["dead"]},
                "Retries": {**idle, "size": sets["retries"]},
                "Scheduled": {**idle, "size": sets["scheduled"]},
                "Workers": {"reaped": 0, "size": numbers["workers"]},
            },
            "total_enqueued": numbers["total_enqueued"],
            "total_failures": numbers["total_failures"],
            "total_processed": numbers["total_processed"],
            "total_queues": numbers["total_queues"],
        },
        "server": {
            "description": "Faktory",
            "faktory_version": semantic(__version__),
            "uptime": int(server.uptime_s),
            "connections": server.connection_count,
            "command_count": server.command_count,
            "used_memory_mb": _memory_mb(),
        },
    }


def _memory_mb() -> int:
    """Return the peak resident memory of this process in MiB."""
    # `ru_maxrss` is in bytes on macOS and in KiB on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (1024 * 1024 if sys.platform == "darwin" else 1024)
