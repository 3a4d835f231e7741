"""The broker that is a Faktory server elsewhere, ours or the original: one connection a thread.

Knows no model, no ORM and no rule of retrying: those are the server's business. A verb that is safe to repeat is
sent once more over a new connection when the old one turns out to be dead (W10, W16); a FETCH is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from ..errors import (
    AuthenticationFailed,
    BatchClosed,
    BrokerUnavailable,
    FaktoryError,
    NotUnique,
    ProtocolError,
)
from ..logs import get_logger
from ..mutations import Mutation
from ..payloads import (
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
from ..protocol.batches import BatchAsk, BatchCommit, BatchNew, BatchOpen, parse_status
from ..protocol.commands import AckJob, BeatWorker, FailJob, Fetch, Info, Push, PushBulk
from ..protocol.management import Flush, Mutate, PauseQueues, QueueLatency, RemoveQueues, ResumeQueues
from ..protocol.resp import Bulk, Error, Reply
from ..protocol.tracking import TrackGet, TrackSet, parse_tracked
from .base import Broker
from .connection import CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S, Connection, parse_url
from .replies import (
    about_batch,
    bulk_in,
    failed,
    object_in,
    refusal_in,
    refused_in_bulk,
    reservation_in,
    state_in,
)

logger = get_logger(__name__)

BULK_JOBS = 1000
BULK_BYTES = 4 * 1024 * 1024
"""Jobs and bytes of one PUSHB: a quarter of what a server takes in one line by default (W7)."""

LONG_REPLY_TIMEOUT_S = 600.0
"""For what goes over many jobs: MUTATE, QUEUE REMOVE, FLUSH."""

NOT_NOW = ("database unavailable", "shutdown in progress", "too many connections")
"""Errors that are about the server, not about what was sent: it may be sent again later (W8, W28, W30)."""


class RemoteBroker(Broker):
    """A Faktory server, by its URL. Jobs go there when push is called: no transaction of this database holds them back.

    Raises AuthenticationFailed from any verb while the server has never accepted the password. Once it has, a refusal
    is BrokerUnavailable: a server that is being set up anew must not cost a worker the reports it holds.
    """

    blocking = True

    def __init__(
        self,
        url: str,
        *,
        identity: WorkerIdentity | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        self.address = parse_url(url)
        self._identity = identity or WorkerIdentity()
        self._connect_timeout_s, self._reply_timeout_s = connect_timeout_s, reply_timeout_s
        self._was_let_in = False
        self._local = threading.local()
        self._open: WeakSet[Connection] = WeakSet()
        self._opening = threading.Lock()

    def push(self, jobs: Sequence[JobPayload]) -> list[FaktoryError | None]:
        """See Broker."""
        return [answer for chunk in _chunks(jobs) for answer in self._push(chunk)]

    def _push(self, jobs: Sequence[JobPayload]) -> list[FaktoryError | None]:
        if len(jobs) == 1:
            [reply] = self._ask([Push(jobs[0]).line()])
            refusal = refusal_in(reply)
            return [NotUnique(jobs[0].jid) if refusal and refusal.code == NotUnique.code else refusal]
        [reply] = self._ask([PushBulk(jobs).line()])
        refused = object_in(reply)
        return [refused_in_bulk(str(refused[job.jid]), job.jid) if job.jid in refused else None for job in jobs]

    def fetch(self, requests: Sequence[FetchRequest]) -> list[list[Reservation]]:
        """See Broker. One job a request, however many it asks for; each waits up to 2 s on the server.

        Never sent a second time: the first may have reserved a job. What was fetched before a failure is returned.
        """
        found: list[list[Reservation]] = []
        for request in requests:
            try:
                found.append(self._fetch(request))
            except FaktoryError:
                if not any(found):
                    raise
                return found + [[]] * (len(requests) - len(found))
        return found

    def _fetch(self, request: FetchRequest) -> list[Reservation]:
        [reply] = self._ask([Fetch(request.queues).line()], again=False)
        text = bulk_in(reply)
        return [] if text is None else [reservation_in(text, request.wid)]

    def ack(self, acks: Sequence[Ack]) -> list[bool]:
        """See Broker. The server does not tell whether it had effect: well answered counts as True."""
        refusals = [refusal_in(reply) for reply in self._ask([AckJob(ack.jid).line() for ack in acks])]
        for ack, refusal in zip(acks, refusals, strict=True):
            if refusal:
                logger.warning("ACK refused jid=%s server=%s error=%s", ack.jid, self.address, refusal)
        return [refusal is None for refusal in refusals]

    def fail(self, failures: Sequence[Failure]) -> list[FaktoryError | bool]:
        """See Broker. A task's own delay or verdict cannot be told over the wire: the server's rule holds.

        JobNotFound may also mean that the first of two sendings had effect, and the connection broke before its reply.
        """
        lines = [FailJob(one.jid, one.errtype, one.message, one.backtrace).line() for one in failures]
        return [failed(reply, one.jid) for one, reply in zip(failures, self._ask(lines), strict=True)]

    def release(self, reservations: Sequence[Reservation]) -> int:
        """See Broker. The protocol cannot give a job back: it is failed, so that it runs again after its backoff."""
        reports = [
            failure(jid=job.jid, wid=job.wid, errtype="WorkerShutdown", message="given back before it began")
            for job in reservations
        ]
        return sum(answer is True for answer in self.fail(reports))

    def hello(self, worker: WorkerIdentity) -> None:
        """See Broker. It is said over a new connection at once, by other threads when they ask next."""
        self._identity = worker
        self.close()
        self._ask([])

    def beat(self, beats: Sequence[Beat]) -> list[FaktoryError | str]:
        """See Broker."""
        replies = self._ask([BeatWorker(beat).line() for beat in beats])
        return [state_in(reply, beat.wid) for reply, beat in zip(replies, beats, strict=True)]

    def bye(self, wids: Sequence[str]) -> None:
        """See Broker. Their connections say END, whichever thread they belong to; the server does the rest."""
        with self._opening:
            leaving = [one for one in self._open if one.is_ours and one.identity.wid in wids]
        for connection in leaving:
            connection.end()

    def lost(self, wids: Sequence[str], *, reason: str = "") -> int:  # noqa: ARG002  (the protocol has no verb for it)
        """See Broker. The server notices by itself: missing BEATs, or the reservation's end."""
        return 0

    def mutate(self, mutation: Mutation, *, go_on: Callable[[], bool] = lambda: True) -> None:  # noqa: ARG002
        """See Broker. The server carries out all of it, and is waited for up to LONG_REPLY_TIMEOUT_S."""
        self._order(Mutate(mutation).line(), reply_timeout_s=LONG_REPLY_TIMEOUT_S)

    def pause(self, queues: Sequence[str] | None) -> None:
        """See Broker. An original server knows no pause of a queue that was never used."""
        self._order_queues(PauseQueues, queues)

    def resume(self, queues: Sequence[str] | None) -> None:
        """See Broker."""
        self._order_queues(ResumeQueues, queues)

    def remove(self, queues: Sequence[str] | None, *, go_on: Callable[[], bool] = lambda: True) -> None:  # noqa: ARG002
        """See Broker."""
        self._order_queues(RemoveQueues, queues, reply_timeout_s=LONG_REPLY_TIMEOUT_S)

    def latency(self, queues: Sequence[str]) -> dict[str, float]:
        """See Broker."""
        [reply] = self._ask([QueueLatency(tuple(queues)).line()])
        return {queue: float(seconds) for queue, seconds in object_in(reply).items()}

    def flush(self, *, go_on: Callable[[], bool] = lambda: True) -> None:  # noqa: ARG002
        """See Broker."""
        self._order(Flush().line(), reply_timeout_s=LONG_REPLY_TIMEOUT_S)

    def track_set(self, updates: Sequence[TrackUpdate]) -> None:
        """See Broker. An original server knows TRACK in its paid edition only."""
        for reply in self._ask([TrackSet(update).line() for update in updates]):
            if refusal := refusal_in(reply):
                raise refusal

    def track_get(self, jids: Sequence[str]) -> list[Tracked]:
        """See Broker. A jid that no job can have, or that does not fit into a command's line, is unknown."""
        askable = [jid for jid in jids if jid and jid == jid.strip() and jid.isprintable() and len(jid) <= MAX_NAME]
        replies = self._ask([TrackGet(jid).line() for jid in askable])
        told = {jid: parse_tracked(object_in(reply)) for jid, reply in zip(askable, replies, strict=True)}
        return [told.get(jid) or Tracked(jid=jid) for jid in jids]

    def new_batch(self, batch: NewBatch, *, by: str = "") -> str:  # noqa: ARG002  (the server knows us by HELLO)
        """See Broker. An original server knows BATCH in its paid edition only."""
        return self._bid(BatchNew(batch).line(), batch.parent_bid)

    def check_batch(self, bid: str, *, by: str = "") -> None:  # noqa: ARG002
        """See Broker. Whether the sender is inside of a committed batch, its pushes are answered."""
        status = self.batch_status(bid)
        if status.complete_st == "1" or status.success_st:
            raise BatchClosed(bid, "a callback of it was enqueued already, nothing can be added any more")

    def open_batch(self, bid: str, *, by: str = "") -> str:  # noqa: ARG002
        """See Broker."""
        return self._bid(BatchOpen(bid).line(), bid)

    def commit_batch(self, bid: str) -> None:
        """See Broker."""
        self._bid(BatchCommit(bid).line(), bid)

    def batch_status(self, bid: str) -> BatchStatus:
        """See Broker."""
        [reply] = self._ask([BatchAsk(bid).line()])
        if refusal := refusal_in(reply):
            raise about_batch(refusal, bid)
        return parse_status(object_in(reply))

    def _bid(self, line: bytes, asked: str) -> str:
        [reply] = self._ask([line], again=False)
        if refusal := refusal_in(reply):
            raise about_batch(refusal, asked)
        return bulk_in(reply) or "" if isinstance(reply, Bulk) else ""

    def info(self) -> dict[str, Any]:
        """See Broker."""
        [reply] = self._ask([Info().line()])
        found = object_in(reply).get("faktory", {})
        if not isinstance(found, dict):
            return {}
        with suppress(KeyError, TypeError):
            found["workers"] = found["tasks"]["Workers"]["size"]
        return found

    def close(self) -> None:
        """See Broker."""
        if connection := getattr(self._local, "connection", None):
            connection.close()
            self._local.connection = None

    def _order_queues(
        self,
        verb: type[PauseQueues | ResumeQueues | RemoveQueues],
        queues: Sequence[str] | None,
        *,
        reply_timeout_s: float | None = None,
    ) -> None:
        names = None if queues is None else tuple(queues)
        if names != ():  # none are no work, and no command
            self._order(verb(names).line(), reply_timeout_s=reply_timeout_s)

    def _order(self, line: bytes, *, reply_timeout_s: float | None = None) -> None:
        """Send a command that is answered with OK, or refused. Twice does no harm."""
        [reply] = self._ask([line], reply_timeout_s=reply_timeout_s)
        if refusal := refusal_in(reply):
            raise refusal

    def _ask(self, lines: Sequence[bytes], *, again: bool = True, reply_timeout_s: float | None = None) -> list[Reply]:
        """Send commands over this thread's connection; `again` allows a second try over a new one."""
        connection = self._usable()
        is_new = connection is None
        try:
            replies = (connection or self._connect()).ask(lines, reply_timeout_s=reply_timeout_s)
        except (OSError, ProtocolError) as error:
            self.close()
            if isinstance(error, AuthenticationFailed) and not self._was_let_in:
                raise
            if again and not is_new and not isinstance(error, TimeoutError):
                logger.info("connection lost, trying once more server=%s error=%s", self.address, error)
                return self._ask(lines, again=False, reply_timeout_s=reply_timeout_s)
            raise BrokerUnavailable(f"the Faktory server at {self.address} is unavailable: {error}") from error
        for reply in replies:
            if isinstance(reply, Error) and reply.message.startswith(NOT_NOW):
                self.close()
                raise BrokerUnavailable(f"the Faktory server at {self.address} says: {reply.message}")
        return replies

    def _usable(self) -> Connection | None:
        """This thread's connection, where it has one that is still good and says who we are now."""
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection and connection.is_usable and connection.identity == self._identity:
            return connection
        self.close()
        return None

    def _connect(self) -> Connection:
        connection = Connection(
            self.address,
            self._identity,
            connect_timeout_s=self._connect_timeout_s,
            reply_timeout_s=self._reply_timeout_s,
        )
        self._local.connection = connection
        self._was_let_in = True
        with self._opening:
            self._open.add(connection)
        return connection


def _chunks(jobs: Sequence[JobPayload]) -> Iterator[Sequence[JobPayload]]:
    """Cut into what one PUSHB may carry; a job that is larger goes alone."""
    start, size = 0, 0
    for at, job in enumerate(jobs):
        length = len(job.text) if job.text.isascii() else len(job.text.encode())
        if at > start and (at - start == BULK_JOBS or size + length > BULK_BYTES):
            yield jobs[start:at]
            start, size = at, 0
        size += length
    if start < len(jobs):
        yield jobs[start:]
