"""What connections and handlers of commands use of the server (`ServerContext`), and they of a connection.

Imports neither: `server.Server` adds the verbs, start and stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from .. import conf
from ..brokers.base import Broker
from ..core.logs import get_logger
from ..core.payloads import Ack, Beat, Failure, JobPayload, Reservation, WorkerIdentity
from ..core.protocol import resp
from ..core.protocol.commands import Command
from ..errors import BrokerUnavailable, FaktoryError
from .buffer_limits import LONGEST_AT_ONCE, LineBufferLimit
from .deliveries import DeliveryTracker
from .exchange_set import MAX_PUSH_IN_EXCHANGE, Item, weight
from .group_commit import CommitQueue
from .lock_waits import LockWaits
from .login_throttle import LoginThrottle
from .may_block import MayBlock, Work
from .prefetch_buffer import PrefetchBuffer
from .reads import Read
from .tuning import Tuning
from .turns import Turns
from .uncertain_batches import UncertainBatches
from .waiting_fetches import FetchQueue

logger = get_logger(__name__)


class ConnectedClient(Protocol):
    """One connection; see `connection.Connection`."""

    on_disconnect: Callable[[], None] | None
    is_ending: bool

    @property
    def identity(self) -> WorkerIdentity: ...
    @property
    def description(self) -> str: ...
    @property
    def is_disconnected(self) -> bool: ...
    def finish(self, reply: bytes) -> bool: ...
    def deliver(self, reply: bytes, job: Reservation) -> None: ...
    def expect_delivery(self, job: Reservation) -> None: ...
    def reply_and_close(self, reply: bytes) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class ServerContext:
    """The members of the server that connections and handlers use. `server.Server` opens and closes what is declared.

    All but `drop` are used on the event loop only.
    """

    loop: asyncio.AbstractEventLoop
    password_checks: Turns
    long_lines: Turns
    rest_queue: Turns
    deliveries: DeliveryTracker
    prefetch_buffer: PrefetchBuffer
    fetch_queue: FetchQueue
    commit_queues: Mapping[str, CommitQueue[Any, Any]]
    exchanges: CommitQueue[Item, Any]
    long_work: CommitQueue[Callable[[], Any], Any]
    lock_waits: LockWaits
    uncertain_batches: UncertainBatches
    _max_connections: int

    def __init__(self, broker: Broker, password: str, tuning: Tuning, verbs: Mapping[type, Handler]) -> None:
        self.broker, self.password, self.tuning = broker, password, tuning
        self.login_throttle = LoginThrottle(limit=conf.get("PASSWORD_TRIES") if password else 0)
        self.max_command_bytes: int = conf.get("MAX_COMMAND_BYTES")
        self.hello_timeout_s: float = conf.get("HELLO_TIMEOUT")
        self.command_timeout_s: float = conf.get("COMMAND_TIMEOUT")
        self.started = threading.Event()
        self.command_count = 0
        self.on_scheduled: Callable[[datetime], None] = lambda _: None
        """Called with the earliest time of newly stored scheduled jobs, so that maintenance can wake up in time."""
        self.line_buffer_limit = LineBufferLimit(LONGEST_AT_ONCE * self.max_command_bytes)
        self._verbs = verbs
        self._connections: set[ConnectedClient] = set()
        self._by_wid: dict[str, set[ConnectedClient]] = {}
        self._is_stopping = False
        self._all_closed = asyncio.Event()
        self._created_at = time.monotonic()

    def execute(self, connection: ConnectedClient, command: Command) -> bytes | None:
        """Execute a command and return its reply, or None if the reply comes later; reject it if the server stops."""
        self.command_count += 1
        if self._is_stopping:
            connection.reply_and_close(resp.error("shutdown in progress"))
            return None
        return self._verbs[type(command)](self, connection, command)

    def admit(self, connection: ConnectedClient) -> bool:
        """Register a connection; return False if there are too many others (W8). Idempotent."""
        if connection not in self._connections and len(self._connections) >= self._max_connections:
            return False
        self._connections.add(connection)
        return True

    def index_by_wid(self, connection: ConnectedClient) -> None:
        """Index the connection by its wid, for `drop`."""
        self._by_wid.setdefault(connection.identity.wid, set()).add(connection)

    def forget(self, connection: ConnectedClient) -> None:
        """Remove a closed connection from all indexes; idempotent."""
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()
        same_wid = self._by_wid.get(connection.identity.wid)
        if same_wid is not None:
            same_wid.discard(connection)
            if not same_wid:
                del self._by_wid[connection.identity.wid]

    def push(
        self, jobs: list[JobPayload], answer: Callable[[list[FaktoryError | None] | FaktoryError], object]
    ) -> None:
        """Store jobs with the next exchange.

        Large sets, and jobs that may wait for another transaction's lock (ADR 0024), use separate commit queues, so
        that no other command waits for them.
        """
        if weight(jobs) > MAX_PUSH_IN_EXCHANGE:
            self.lock_waits.submit(MayBlock(jobs), answer, queue="bulk")
            return
        for job in jobs:
            if job.options is not None and job.options.may_block:
                self.lock_waits.submit(MayBlock(jobs), answer)
                return
        self.exchanges.submit(jobs, answer)

    def ack(self, report: Ack, answer: Callable[[FaktoryError | bool], None]) -> None:
        """Acknowledge a job with the next exchange; a member of a batch separately, as its batch may be locked."""
        if self.deliveries.is_batch_member(report.jid):
            self.lock_waits.submit(MayBlock(report, self._subjects_of(report.jid)), answer)
        else:
            self.exchanges.submit(report, answer)

    def fail(self, report: Failure, answer: Callable[[FaktoryError | bool], None]) -> None:
        """Record a failure. A member of a batch uses the queue for commands that may block on the batch's row."""
        queue = "may-block" if self.deliveries.is_batch_member(report.jid) else "fail"
        self.lock_waits.submit(MayBlock(report, self._subjects_of(report.jid)), answer, queue=queue)

    def record_worker(self, report: Beat | WorkerIdentity, answer: Callable[[Any], object]) -> None:
        """Record a heartbeat or a registration in a commit queue that no other command uses (ADR 0005)."""
        self.lock_waits.submit(MayBlock(report, [f"wid:{report.wid}"]), answer, queue="heartbeat")

    def execute_blocking(
        self,
        work: Work,
        answer: Callable[[Any], object],
        subjects: Iterable[str] = (),
        *,
        is_repeatable: bool = False,
    ) -> None:
        """Execute a call that may meet another transaction's lock. `subjects` name the rows it may wait for."""
        self.lock_waits.submit(MayBlock(work, subjects, is_repeatable=is_repeatable), answer)

    def read(
        self, connection: ConnectedClient, answer: Callable[[Any], object], method: Callable[..., Any], *args: Any
    ) -> None:
        """Execute a read-only call, unless the client has disconnected. Equal calls that wait share one read."""
        self.commit_queues["read"].submit(
            Read(lambda: connection.is_disconnected, (method, args), time.monotonic()), answer
        )

    def _subjects_of(self, jid: str) -> list[str]:
        bid = self.deliveries.batch_of(jid)
        return [f"bid:{bid}"] if bid else [f"jid:{jid}"]

    def announce_jobs(self, jobs: Sequence[JobPayload]) -> None:
        """Announce committed jobs: try waiting FETCHes now, and schedule jobs that are due later."""
        self.fetch_queue.wake({job.queue for job in jobs} if len(jobs) > 1 else (jobs[0].queue,))
        earliest: datetime | None = None
        for job in jobs:
            if job.at is not None and (earliest is None or job.at < earliest):
                earliest = job.at
        if earliest is not None:
            self.on_scheduled(earliest)

    def should_continue(self) -> bool:
        """Return whether long work may start its next step; False once the server stops."""
        return not self._is_stopping

    @property
    def connection_count(self) -> int:
        """Number of clients connected to this node."""
        return len(self._connections)

    @property
    def uptime_s(self) -> float:
        """Seconds since the server object was created."""
        return time.monotonic() - self._created_at

    def release(self, jobs: Sequence[Reservation], on_result: Callable[[set[str]], None] = lambda _: None) -> None:
        """Release jobs that were claimed for disconnected clients (W14); retry while the database is unavailable.

        `on_result` is called with the queues of the jobs once they are released, or cannot be.
        """
        # Before the release: a confirmation would reserve the job for the disconnected client.
        for job in jobs:
            self.deliveries.forget(job.jid)

        def answer(result: int | FaktoryError) -> None:
            if isinstance(result, BrokerUnavailable) and not self._is_stopping:
                self.loop.call_later(self.tuning.release_again_s, self.release, jobs, on_result)
                return
            queues = {job.queue for job in jobs}
            on_result(queues)
            if isinstance(result, FaktoryError):
                logger.error("jobs not released, their reservations must end jids=%s", [job.jid for job in jobs])
            else:
                self.fetch_queue.wake(queues)

        self.execute_blocking(lambda: self.broker.release(jobs), answer, [f"jid:{job.jid}" for job in jobs])

    def drop(self, wids: Collection[str]) -> None:
        """Close the connections of worker processes that are considered lost (W20)."""
        self._call_in_loop(self._drop, list(wids))

    def _drop(self, wids: list[str]) -> None:
        for wid in wids:
            for connection in list(self._by_wid.get(wid, ())):
                connection.close()

    def _call_in_loop(self, work: Callable[..., None], *args: Any) -> None:
        if self.started.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to notify
                self.loop.call_soon_threadsafe(work, *args)


Handler = Callable[[ServerContext, ConnectedClient, Any], bytes | None]
"""Executes a command: returns the reply, or None if it passes the reply to `ConnectedClient.finish` later."""
