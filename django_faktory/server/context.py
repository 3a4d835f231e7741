"""Interfaces between the server, its connections and the handlers of commands, which avoid circular imports.

`ServerContext` has the members of the server that connections and handlers use. `ConnectedClient` has the members of a
connection that the server and handlers use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from ..brokers.base import Broker
from ..core.payloads import Ack, Beat, Failure, JobPayload, Reservation, WorkerIdentity
from ..core.protocol.commands import Command
from ..errors import FaktoryError
from .buffer_limits import LineBufferLimit
from .deliveries import DeliveryTracker
from .group_commit import CommitQueue
from .handshake_queue import HandshakeQueue
from .login_throttle import LoginThrottle
from .may_block import Work
from .prefetch_buffer import PrefetchBuffer
from .tuning import Tuning
from .turns import Turns
from .uncertain_batches import UncertainBatches
from .waiting_fetches import FetchQueue


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


class ServerContext(Protocol):
    """The server; see `server.Server`."""

    broker: Broker
    loop: asyncio.AbstractEventLoop
    tuning: Tuning
    password: str
    max_command_bytes: int
    hello_timeout_s: float
    command_timeout_s: float
    command_count: int
    login_throttle: LoginThrottle
    handshake_queue: HandshakeQueue
    line_buffer_limit: LineBufferLimit
    long_lines: Turns
    rest_queue: Turns
    deliveries: DeliveryTracker
    prefetch_buffer: PrefetchBuffer
    fetch_queue: FetchQueue
    long_work: CommitQueue[Callable[[], Any], Any]
    uncertain_batches: UncertainBatches

    @property
    def connection_count(self) -> int: ...
    @property
    def uptime_s(self) -> float: ...
    def admit(self, connection: ConnectedClient) -> bool: ...
    def index_by_wid(self, connection: ConnectedClient) -> None: ...
    def forget(self, connection: ConnectedClient) -> None: ...
    def execute(self, connection: ConnectedClient, command: Command) -> bytes | None: ...
    def push(
        self, jobs: list[JobPayload], answer: Callable[[list[FaktoryError | None] | FaktoryError], object]
    ) -> None: ...
    def ack(self, report: Ack, answer: Callable[[FaktoryError | bool], None]) -> None: ...
    def fail(self, report: Failure, answer: Callable[[FaktoryError | bool], None]) -> None: ...
    def record_worker(self, report: Beat | WorkerIdentity, answer: Callable[[Any], object]) -> None: ...
    def execute_blocking(
        self,
        work: Work,
        answer: Callable[[Any], object],
        subjects: Iterable[str] = (),
        *,
        is_repeatable: bool = False,
    ) -> None: ...
    def read(
        self, connection: ConnectedClient, answer: Callable[[Any], object], method: Callable[..., Any], *args: Any
    ) -> None: ...
    def announce_jobs(self, jobs: Sequence[JobPayload]) -> None: ...
    def release(self, jobs: Sequence[Reservation], on_result: Callable[[set[str]], None] = ...) -> None: ...
    def drop(self, wids: Collection[str]) -> None: ...
    def should_continue(self) -> bool: ...


Handler = Callable[[ServerContext, ConnectedClient, Any], bytes | None]
"""Executes a command: returns the reply, or None if it passes the reply to `ConnectedClient.finish` later."""
