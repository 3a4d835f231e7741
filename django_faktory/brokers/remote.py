"""Implement `Broker` on a remote Faktory server, ours or the original, with one connection per thread.

`RemoteBroker` uses no model and no ORM, and retries of jobs are the server's task. A verb that is safe to repeat is
sent again over a new connection if the old one is broken (W10, W16); a FETCH is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from msgspec.structs import replace

from ..core.logs import get_logger
from ..core.mutation import Mutation
from ..core.payloads import (
    MAX_NAME,
    Ack,
    BatchStatus,
    Beat,
    Failure,
    FetchRequest,
    JobPayload,
    NewBatch,
    Reservation,
    Tracked,
    TrackUpdate,
    WorkerIdentity,
    failure,
)
from ..core.protocol.batches import BatchAsk, BatchCommit, BatchNew, BatchOpen, parse_status
from ..core.protocol.commands import AckJob, BeatWorker, FailJob, Fetch, Info, Push, PushBulk
from ..core.protocol.management import Flush, Mutate, PauseQueues, QueueLatency, RemoveQueues, ResumeQueues
from ..core.protocol.replies import (
    check_ok,
    parse_bid,
    parse_bulk,
    parse_bulk_refusal,
    parse_fail,
    parse_object_reply,
    parse_refusal,
    parse_reservation,
    parse_state,
    translate_batch_refusal,
)
from ..core.protocol.resp import Error, Reply
from ..core.protocol.tracking import TrackGet, TrackSet, parse_tracked
from ..errors import (
    AuthenticationFailed,
    BatchClosed,
    BrokerUnavailable,
    FaktoryError,
    NotUnique,
    ProtocolError,
)
from .base import Broker
from .client import CONNECT_TIMEOUT_S, GOODBYE_TIMEOUT_S, REPLY_TIMEOUT_S, SocketConnection, parse_url

logger = get_logger(__name__)

BULK_JOBS = 1000
"""Limit of jobs in one PUSHB."""
BULK_BYTES = 4 * 1024 * 1024
"""Limit of bytes in one PUSHB: a quarter of the longest line that a server accepts by default (W7)."""

MUTATE_JIDS = 5_000
"""Limit of jids in one MUTATE: with the longest jids 1.3 MB, below the limits of a server (`core.protocol.limits`)."""

LONG_REPLY_TIMEOUT_S = 600.0
"""Reply timeout in seconds of commands that change many jobs: MUTATE, QUEUE REMOVE, FLUSH."""


class RemoteBroker(Broker):
    """Broker that sends every verb to the Faktory server at `url`.

    Jobs are sent when push is called, not at the commit of a database transaction. Every verb raises
    AuthenticationFailed while the server has never accepted the password. After it has been accepted once, a refusal
    raises BrokerUnavailable: a worker must not lose its unsent reports because a server is being reconfigured.
    """

    blocking = True

    def __init__(
        self,
        url: str,
        *,
        identity: WorkerIdentity | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
        goodbye_timeout_s: float = GOODBYE_TIMEOUT_S,
    ) -> None:
        self.address = parse_url(url)
        self._identity = identity or WorkerIdentity()
        self._connect_timeout_s, self._reply_timeout_s = connect_timeout_s, reply_timeout_s
        self._goodbye_timeout_s = goodbye_timeout_s
        self._was_authenticated = False
        self._local = threading.local()
        # Weak: a connection is closed when its thread ends, and must not be kept open by this set.
        self._connections: WeakSet[SocketConnection] = WeakSet()
        self._connections_lock = threading.Lock()

    def push(self, jobs: Sequence[JobPayload]) -> list[FaktoryError | None]:
        """Store jobs by PUSH or PUSHB, in chunks of BULK_JOBS and BULK_BYTES."""
        return [answer for chunk in _chunks(jobs) for answer in self._push(chunk)]

    def _push(self, jobs: Sequence[JobPayload]) -> list[FaktoryError | None]:
        if len(jobs) == 1:
            # PUSHB would answer with a map of refusals; PUSH keeps the code of a refusal.
            [reply] = self._request([Push(jobs[0]).line()], check=check_ok)
            refusal = parse_refusal(reply)
            return [NotUnique(jobs[0].jid) if refusal and refusal.code == NotUnique.code else refusal]
        [reply] = self._request([PushBulk(jobs).line()], check=parse_object_reply)
        refused = parse_object_reply(reply)
        # One job of a set may have met a lock: it is not refused for good.
        return [parse_bulk_refusal(str(refused[job.jid]), job.jid) if job.jid in refused else None for job in jobs]

    def fetch(self, requests: Sequence[FetchRequest]) -> list[list[Reservation]]:
        """Reserve one job per request, whatever its `count`; each request blocks for up to 2 s on the server.

        A FETCH is never repeated, because the first may have reserved a job. If a request fails, the jobs fetched
        before it are returned.
        """
        fetched: list[list[Reservation]] = []
        for request in requests:
            try:
                fetched.append(self._fetch(request))
            except FaktoryError:
                # Jobs of earlier requests are reserved: raising now would lose them until their reservations expire.
                if not any(fetched):
                    raise
                return fetched + [[]] * (len(requests) - len(fetched))
        return fetched

    def _fetch(self, request: FetchRequest) -> list[Reservation]:
        [reply] = self._request([Fetch(request.queues).line()], may_retry=False)
        # The wid is not in the reply: the server knows it from this connection's HELLO.
        text = parse_bulk(reply)
        return [] if text is None else [parse_reservation(text, request.wid)]

    def ack(self, acks: Sequence[Ack]) -> list[FaktoryError | bool]:
        """End jobs. The server does not report whether an ack had effect: any reply except an error counts as True.

        BrokerUnavailable as an answer: the server could not end this job now; send this ack again.
        """
        # The reply is OK for an ack of another worker too (W16).
        replies = self._request([AckJob(ack.jid).line() for ack in acks], check=check_ok)
        refusals = [parse_refusal(reply) for reply in replies]
        answers: list[FaktoryError | bool] = []
        for ack, refusal in zip(acks, refusals, strict=True):
            if refusal and not isinstance(refusal, BrokerUnavailable):
                logger.warning("ACK refused jid=%s server=%s error=%s", ack.jid, self.address, refusal)
                answers.append(False)
            else:
                answers.append(refusal or True)
        return answers

    def fail(self, failures: Sequence[Failure]) -> list[FaktoryError | bool]:
        """Report failures. The protocol cannot carry a task's own delay or verdict: the server's retry rule applies.

        JobNotFound may also mean that the report was sent twice: the first took effect, and its reply was lost.
        """
        lines = [FailJob(report.jid, report.errtype, report.message, report.backtrace).line() for report in failures]
        replies = self._request(lines, check=check_ok)
        return [parse_fail(reply, report.jid) for report, reply in zip(failures, replies, strict=True)]

    def release(self, reservations: Sequence[Reservation]) -> int:
        """Fail the jobs with `WorkerShutdown`, because the protocol cannot release a job.

        Each job runs again after its backoff.
        """
        # The error type names the reason in the job's history; the protocol has no other field for it.
        reports = [
            failure(jid=job.jid, wid=job.wid, errtype="WorkerShutdown", message="released before it began")
            for job in reservations
        ]
        return sum(answer is True for answer in self.fail(reports))

    def hello(self, worker: WorkerIdentity) -> None:
        """Register with HELLO: this thread opens a new connection now, other threads with their next command."""
        self._identity = worker
        # The identity is part of HELLO, so a connection that is open already cannot change it.
        self.close()
        self._request([])

    def beat(self, beats: Sequence[Beat]) -> list[FaktoryError | str]:
        replies = self._request([BeatWorker(beat).line() for beat in beats])
        return [parse_state(reply, beat.wid) for reply, beat in zip(replies, beats, strict=True)]

    def bye(self, wids: Sequence[str]) -> None:
        """Send END on all connections of these workers, in any thread; the server releases their jobs."""
        with self._connections_lock:
            # A copy under the mutex: other threads add connections. Inherited ones (over a fork) belong to the parent.
            connections = [
                connection
                for connection in self._connections
                if connection.is_of_this_process and connection.identity.wid in wids
            ]
        for connection in connections:
            connection.end()

    def lost(self, wids: Sequence[str], *, reason: str = "") -> int:  # noqa: ARG002  (the protocol has no verb for it)
        """Do nothing and return 0: the server detects a lost worker by missing BEATs or expired reservations."""
        return 0

    def mutate(self, mutation: Mutation, *, should_continue: Callable[[], bool] = lambda: True) -> None:  # noqa: ARG002
        """Send MUTATE and wait at most LONG_REPLY_TIMEOUT_S for its reply; several if there are many jids."""
        jids = mutation.jids or ()
        chunks = [jids[start : start + MUTATE_JIDS] for start in range(0, len(jids), MUTATE_JIDS)]
        parts = [replace(mutation, jids=chunk) for chunk in chunks] or [mutation]
        for part in parts:
            self._execute(Mutate(part).line(), reply_timeout_s=LONG_REPLY_TIMEOUT_S)

    def pause(self, queues: Sequence[str] | None, *, by: str = "", reason: str = "") -> None:  # noqa: ARG002
        """Pause queues; the server records this client. An original server cannot pause a queue never used."""
        self._execute_on_queues(PauseQueues, queues)

    def resume(self, queues: Sequence[str] | None) -> None:
        self._execute_on_queues(ResumeQueues, queues)

    def remove(self, queues: Sequence[str] | None, *, should_continue: Callable[[], bool] = lambda: True) -> None:  # noqa: ARG002
        """Remove queues with their jobs; the server has LONG_REPLY_TIMEOUT_S to reply. `should_continue` is ignored."""
        self._execute_on_queues(RemoveQueues, queues, reply_timeout_s=LONG_REPLY_TIMEOUT_S)

    def latency(self, queues: Sequence[str]) -> dict[str, float]:
        [reply] = self._request([QueueLatency(tuple(queues)).line()])
        return {queue: float(seconds) for queue, seconds in parse_object_reply(reply).items()}

    def flush(self, *, should_continue: Callable[[], bool] = lambda: True) -> None:  # noqa: ARG002
        """Send FLUSH; the server has LONG_REPLY_TIMEOUT_S to reply. `should_continue` is ignored."""
        self._execute(Flush().line(), reply_timeout_s=LONG_REPLY_TIMEOUT_S)

    def track_set(self, updates: Sequence[TrackUpdate]) -> None:
        """Send TRACK SET for each update; raises its first refusal.

        An original server knows TRACK only in its paid edition.
        """
        for reply in self._request([TrackSet(update).line() for update in updates], check=check_ok):
            if refusal := parse_refusal(reply):
                raise refusal

    def track_get(self, jids: Sequence[str]) -> list[Tracked]:
        """Return the progress of jobs; jids that are invalid or do not fit into a command line are unknown."""
        # The jid is a word of the command: a space or a line end in it would change the command.
        valid_jids = [jid for jid in jids if jid and jid == jid.strip() and jid.isprintable() and len(jid) <= MAX_NAME]
        replies = self._request([TrackGet(jid).line() for jid in valid_jids])
        by_jid = {jid: parse_tracked(parse_object_reply(reply)) for jid, reply in zip(valid_jids, replies, strict=True)}
        return [by_jid.get(jid) or Tracked(jid=jid) for jid in jids]

    def new_batch(self, batch: NewBatch, *, caller_wid: str = "") -> str:  # noqa: ARG002  (the server knows us by HELLO)
        """Create a batch. An original server knows BATCH only in its paid edition."""
        return self._request_bid(BatchNew(batch).line(), batch.parent_bid)

    def check_batch(self, bid: str, *, caller_wid: str = "") -> None:  # noqa: ARG002
        """Raise BatchClosed if a callback of the batch was enqueued.

        The server itself checks pushes from inside the batch.
        """
        status = self.batch_status(bid)
        if status.complete_st == "1" or status.success_st:
            raise BatchClosed(bid, "a callback of it was enqueued already, nothing can be added any more")

    def open_batch(self, bid: str, *, caller_wid: str = "") -> str:  # noqa: ARG002
        return self._request_bid(BatchOpen(bid).line(), bid)

    def commit_batch(self, bid: str) -> None:
        self._request_bid(BatchCommit(bid).line(), bid, check_ok)

    def batch_status(self, bid: str) -> BatchStatus:
        [reply] = self._request([BatchAsk(bid).line()])
        if refusal := parse_refusal(reply):
            raise translate_batch_refusal(refusal, bid)
        return parse_status(parse_object_reply(reply))

    def _request_bid(self, line: bytes, bid: str, check: Callable[[Reply], object] = parse_bid) -> str:
        # Never repeated: a second BATCH NEW would create another batch, which is never committed.
        [reply] = self._request([line], check=check, may_retry=False)
        if refusal := parse_refusal(reply):
            raise translate_batch_refusal(refusal, bid)
        return parse_bid(reply) if check is parse_bid else ""

    def info(self) -> dict[str, Any]:
        """Return the numbers of INFO; `workers` is read from the original's `tasks`, if present."""
        [reply] = self._request([Info().line()])
        numbers = parse_object_reply(reply).get("faktory", {})
        if not isinstance(numbers, dict):
            return {}
        # A server of another kind may leave this part out.
        with suppress(KeyError, TypeError):
            numbers["workers"] = numbers["tasks"]["Workers"]["size"]
        return numbers

    def close(self) -> None:
        if connection := getattr(self._local, "connection", None):
            connection.close()
            self._local.connection = None

    def _execute_on_queues(
        self,
        verb: type[PauseQueues | ResumeQueues | RemoveQueues],
        queues: Sequence[str] | None,
        *,
        reply_timeout_s: float | None = None,
    ) -> None:
        names = None if queues is None else tuple(queues)
        if names != ():  # an empty list means no queue, but no argument means all
            self._execute(verb(names).line(), reply_timeout_s=reply_timeout_s)

    def _execute(self, line: bytes, *, reply_timeout_s: float | None = None) -> None:
        """Send an idempotent command that is answered with OK or an error."""
        [reply] = self._request([line], check=check_ok, reply_timeout_s=reply_timeout_s)
        if refusal := parse_refusal(reply):
            raise refusal

    def _request(
        self,
        lines: Sequence[bytes],
        *,
        check: Callable[[Reply], object] = lambda _: None,
        may_retry: bool = True,
        reply_timeout_s: float | None = None,
    ) -> list[Reply]:
        """Send commands over this thread's connection; `may_retry` allows one retry over a new connection.

        `check` raises ProtocolError for a reply that the verb does not have; the connection is closed then.
        """
        connection = self._usable_connection()
        is_new = connection is None
        try:
            replies = (connection or self._connect()).request(lines, reply_timeout_s=reply_timeout_s)
            for reply in replies:
                if not isinstance(reply, Error):
                    check(reply)
        except (OSError, ProtocolError) as error:
            self.close()
            # A password that never worked is a configuration error; a later refusal may be a server that is being
            # reconfigured.
            if isinstance(error, AuthenticationFailed) and not self._was_authenticated:
                raise
            # Retry only if an idle connection may have been closed by the server. After a timeout a retry would double
            # the wait.
            if may_retry and not is_new and not isinstance(error, TimeoutError):
                logger.info("connection lost, trying once more server=%s error=%s", self.address, error)
                return self._request(lines, check=check, may_retry=False, reply_timeout_s=reply_timeout_s)
            raise BrokerUnavailable(f"the Faktory server at {self.address} is unavailable: {error}") from error
        refusals = [parse_refusal(reply) for reply in replies if isinstance(reply, Error)]
        unavailable = [refusal for refusal in refusals if isinstance(refusal, BrokerUnavailable)]
        if unavailable:
            # Such a server may be about to stop: close, so that the next command connects again, perhaps to its
            # successor.
            self.close()
            if len(unavailable) == len(replies):
                raise BrokerUnavailable(f"{unavailable[0]} (at {self.address})")
        return replies

    def _usable_connection(self) -> SocketConnection | None:
        """Return this thread's connection if it is usable and was opened with the current identity."""
        connection: SocketConnection | None = getattr(self._local, "connection", None)
        # Another thread may have set a new identity by `hello`, which takes effect with a new connection.
        if connection and connection.is_usable and connection.identity == self._identity:
            return connection
        self.close()
        return None

    def _connect(self) -> SocketConnection:
        connection = SocketConnection(
            self.address,
            self._identity,
            connect_timeout_s=self._connect_timeout_s,
            reply_timeout_s=self._reply_timeout_s,
            goodbye_timeout_s=self._goodbye_timeout_s,
        )
        self._local.connection = connection
        self._was_authenticated = True
        with self._connections_lock:
            self._connections.add(connection)
        return connection


def _chunks(jobs: Sequence[JobPayload]) -> Iterator[Sequence[JobPayload]]:
    """Split jobs into chunks for PUSHB; a job above BULK_BYTES is sent alone."""
    start, size = 0, 0
    for index, job in enumerate(jobs):
        # The length of an ASCII text is known without an encoded copy of it.
        length = len(job.text) if job.text.isascii() else len(job.text.encode())
        if index > start and (index - start == BULK_JOBS or size + length > BULK_BYTES):
            yield jobs[start:index]
            start, size = index, 0
        size += length
    if start < len(jobs):
        yield jobs[start:]
