"""The server itself: the port, the lanes, the connections, start and stop. Knows what no verb means.

Usable in a process of its own or in a thread; `stop` and `drop` may be called from any thread or signal handler.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from .. import conf
from ..brokers.base import Broker
from ..errors import FaktoryError
from ..payloads import Ack, Failure, FetchRequest, JobPayload, Reservation
from ..protocol import resp
from ..protocol.commands import Command
from .committer import Lane
from .connection import Connection
from .fetchers import Fetchers
from .verbs import carry_out

try:
    import uvloop
except ImportError:  # not for this platform: slower, nothing else
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop

logger = logging.getLogger(__name__)

LINGER_S = 0.25
"""How long a stopping server still tells clients that it stops (W28)."""

BACKLOG = 128
WIDTH = 2
"""Transactions of one kind at once. Each is a database connection; a third gained nothing on two cores."""


class Listener(Protocol):
    """What `wakeups.listen` returns."""

    def wait(self, timeout_s: float) -> bool:
        """True when a hint came."""

    def close(self) -> None:
        """Let a running wait return."""


class Server:
    """Serve `broker` at host:port; port 0 takes a free one, told by `address` once `started` is set."""

    def __init__(
        self,
        broker: Broker,
        *,
        host: str = "127.0.0.1",
        port: int = 7419,
        password: str = "",
        listen: Callable[[], Listener] | None = None,
    ) -> None:
        self.broker = broker
        self.password = password
        self.max_command_bytes: int = conf.get("MAX_COMMAND_BYTES")
        self.hello_timeout_s: float = conf.get("HELLO_TIMEOUT")
        self.address = (host, port)
        self.started = threading.Event()
        self.command_count = 0
        self._max_connections: int = conf.get("MAX_CONNECTIONS")
        self._listen = listen
        self._connections: set[Connection] = set()
        self._by_wid: dict[str, set[Connection]] = {}
        self._is_stopping = False
        self._stopped = asyncio.Event()
        self._since = time.monotonic()

    def run(self) -> None:
        """Serve until `stop`. Raises FaktoryError where the address cannot be had."""
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            self.loop = runner.get_loop()
            runner.run(self._serve())

    def stop(self) -> None:
        """Begin to stop: what was accepted is answered, who waits is sent away, then all is closed (W28)."""
        self._is_stopping = True
        self._from_outside(self._stopped.set)

    def drop(self, wids: Collection[str]) -> None:
        """Close the connections of worker processes that were given up as lost (W20)."""
        self._from_outside(self._drop, list(wids))

    def wake(self, queues: Collection[str] | None = None) -> None:
        """Tell the fetchers that wait of work that came from elsewhere; None: in any queue."""
        self._from_outside(lambda: self.fetchers.wake(queues))

    # --- what connections and verbs ask ---

    def admits(self, connection: Connection) -> bool:
        """Whether there is a place for one more (W8); if so it is taken."""
        if len(self._connections) >= self._max_connections or self._is_stopping:
            return False
        self._connections.add(connection)
        return True

    def joins(self, connection: Connection) -> None:
        """A connection has told its wid."""
        self._by_wid.setdefault(connection.identity.wid, set()).add(connection)

    def forgets(self, connection: Connection) -> None:
        """A connection is closed."""
        self._connections.discard(connection)
        mates = self._by_wid.get(connection.identity.wid)
        if mates is not None:
            mates.discard(connection)
            if not mates:
                del self._by_wid[connection.identity.wid]

    def carry_out(self, connection: Connection, command: Command) -> bytes | None:
        """Do what the command asks, unless the server stops."""
        self.command_count += 1
        if self._is_stopping:
            connection.dismiss(resp.error("shutdown in progress"))
            return None
        return carry_out(self, connection, command)

    @property
    def connection_count(self) -> int:
        """Clients connected to this node."""
        return len(self._connections)

    @property
    def worker_count(self) -> int:
        """Worker processes connected to this node."""
        return len(self._by_wid)

    @property
    def uptime_s(self) -> float:
        """Seconds since the server was made."""
        return time.monotonic() - self._since

    # --- life ---

    async def _serve(self) -> None:
        try:
            listening = await asyncio.get_running_loop().create_server(
                lambda: Connection(self), *self.address, backlog=BACKLOG
            )
        except OSError as error:
            host, port = self.address
            raise FaktoryError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; end what uses it or choose another port"
            ) from error
        self._open_lanes()
        self.address = next(iter(listening.sockets)).getsockname()[:2]
        self.started.set()
        logger.info("server listens address=%s:%d", *self.address)
        if not self._is_stopping:
            await self._stopped.wait()
        listening.close()
        await self._wind_down()
        logger.info("server stopped commands=%d", self.command_count)

    def _open_lanes(self) -> None:
        common: dict[str, Any] = {"reset": self.broker.close, "loop": self.loop}
        self.pushes: Lane[list[JobPayload], list[FaktoryError | None]] = Lane("push", self._push, width=WIDTH, **common)
        self.reports: Lane[Ack | Failure, bool] = Lane("report", self._report, width=WIDTH, **common)
        self.control: Lane[Callable[[], Any], Any] = Lane("control", _call_each, **common)
        claims: Lane[list[FetchRequest], list[list[Reservation]]] = Lane("fetch", self._fetch, width=WIDTH, **common)
        self._lanes: tuple[Lane[Any, Any], ...] = (claims, self.pushes, self.reports, self.control)
        self.fetchers = Fetchers(
            claims, width=WIDTH, release=self.release, poll_s=conf.get("POLL_INTERVAL"), loop=self.loop
        )
        self._hints = self._listen() if self._listen else None
        if self._hints:
            threading.Thread(target=self._hear, args=(self._hints,), name="faktory-hints", daemon=True).start()

    async def _wind_down(self) -> None:
        self.fetchers.stop()
        await asyncio.sleep(LINGER_S if self._connections else 0)
        for lane in self._lanes * 2:  # a claim that came back may have given jobs to release
            await lane.drained()
        await asyncio.sleep(0)
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(0)
        if self._hints:
            self._hints.close()
        for lane in self._lanes:
            await asyncio.to_thread(lane.close)

    def _drop(self, wids: list[str]) -> None:
        for wid in wids:
            for connection in list(self._by_wid.get(wid, ())):
                connection.close()

    def _from_outside(self, work: Callable[..., None], *args: Any) -> None:
        if self.started.is_set() and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(work, *args)

    def _hear(self, hints: Listener) -> None:
        while not self._is_stopping:
            if hints.wait(1.0):
                self.wake()

    # --- what the lanes carry out, in their threads ---

    def _push(self, sets: list[list[JobPayload]]) -> list[list[FaktoryError | None] | FaktoryError]:
        answers = iter(self.broker.push([job for jobs in sets for job in jobs]))
        return [[next(answers) for _ in jobs] for jobs in sets]

    def _report(self, reports: list[Ack | Failure]) -> list[bool | FaktoryError]:
        acked = iter(self.broker.ack([report for report in reports if isinstance(report, Ack)]))
        failed = iter(self.broker.fail([report for report in reports if isinstance(report, Failure)]))
        return [next(acked) if isinstance(report, Ack) else next(failed) for report in reports]

    def _fetch(self, sets: list[list[FetchRequest]]) -> list[list[list[Reservation]] | FaktoryError]:
        answers = iter(self.broker.fetch([request for requests in sets for request in requests]))
        return [[next(answers) for _ in requests] for requests in sets]

    def release(self, jobs: Sequence[Reservation]) -> None:
        """Give back what was claimed for clients that went away, and let others have it (W14)."""
        queues = {job.queue for job in jobs}
        self.control.submit(lambda: self.broker.release(jobs), lambda _: self.fetchers.wake(queues))


def _call_each(calls: list[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]
