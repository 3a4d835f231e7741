"""Run the Faktory server: the port, the commit queues, the connections, start and stop.

`Server` is usable in a process of its own or in a thread; `stop` and `drop` may be called from any thread or signal
handler. `handlers` implements the verbs. ADR 0005 explains the commit queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

from .. import conf
from ..brokers.base import Broker
from ..core.event_loop import new_event_loop
from ..core.logs import get_logger
from ..core.payloads import Delivery, Reservation
from ..errors import FaktoryError
from .context import ServerContext
from .deliveries import DeliveryTracker
from .exchange_set import exchange_on_loop, execute_exchange, weight
from .group_commit import MAX_SET_WEIGHT, CommitQueue
from .handlers.jobs import VERBS
from .listening import Acceptor, find_max_backlog, limit_connections, open_sockets
from .lock_waits import WIDTH as LOCK_WAITS
from .lock_waits import LockWaits
from .may_block import MayBlock, execute_each, execute_set, execute_waiting, weight_of
from .prefetch_buffer import PrefetchBuffer
from .reads import Reads, compute_rest_s
from .tuning import DEFAULT_TUNING, Tuning
from .turns import Turns
from .uncertain_batches import UncertainBatches
from .waiting_fetches import FetchQueue

logger = get_logger(__name__)

LINGER_S = 0.25
"""Seconds in which a stopping server still answers new commands with an error that it stops (W28)."""

REST_S = 0.001
"""Rest of a connection after many commands in a row, and between such connections."""

LISTEN_S = 60.0
"""Longest wait for one notification; closing the listener ends it early."""

READ_WEIGHT = MAX_SET_WEIGHT // 5
"""Weight of a read: the event loop writes five answers at a time. One of QUEUE LATENCY may have 260 KB: 1 to 2 ms."""

UNPAUSED_BULK = 1000
"""Weight of a set of the bulk queue up to which it does not pause: SQLite stores 1,000 jobs in about 40 ms."""

WIDTH = 2
"""Concurrent exchanges. Each uses a database connection; a third gained nothing on two cores. If the event loop owns
these, there is one thread, with a connection of its own, for exchanges that need more than one message."""


class NotificationSource(Protocol):
    """Source of notifications about new work, as returned by `notifier.listen`."""

    def wait(self, timeout_s: float) -> bool:
        """Block until a notification arrives or the timeout ends; return True for a notification."""

    def close(self) -> None:
        """Make a running `wait` in another thread return."""


class Server(ServerContext):
    """Serve `broker` at host:port. With port 0 the system chooses a free port; `address` has it once `started` is set.

    `shares_port`: other processes may listen there too, and the system divides new connections among them.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        host: str = "127.0.0.1",
        port: int = 7419,
        password: str = "",
        tls: ssl.SSLContext | None = None,
        listen: Callable[[], NotificationSource] | None = None,
        shares_port: bool = False,
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        super().__init__(broker, password, tuning, VERBS)
        self.address = (host, port)
        self._tls = tls
        self._listen = listen
        self._shares_port = shares_port
        self._stop_requested = asyncio.Event()
        self._listener_thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve until `stop`; blocks. Raises FaktoryError if the address cannot be bound."""
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            self.loop = runner.get_loop()
            runner.run(self._serve())

    def stop(self) -> None:
        """Begin to stop: answer accepted commands, answer waiting FETCHes with null, then close everything (W28)."""
        self._is_stopping = True
        self._call_in_loop(self._stop_requested.set)

    def wake(self, queues: Collection[str] | None = None) -> None:
        """Try waiting FETCHes of these queues, which got work. None, as after a notification, means all queues."""
        self._call_in_loop(lambda: self.fetch_queue.wake(queues))  # a lambda: before the start there is no queue yet

    def is_responsive(self, within_s: float) -> bool:
        """Return whether the event loop runs a callback within `within_s` seconds; blocks the calling thread."""
        was_run = threading.Event()
        self._call_in_loop(was_run.set)
        return was_run.wait(within_s)

    # --- start and stop ---

    async def _serve(self) -> None:
        try:
            sockets = open_sockets(*self.address, shares_port=self._shares_port)
        except OSError as error:
            raise FaktoryError(_cannot_listen(self.address, error)) from error
        self.address = sockets[0].getsockname()[:2]
        self._open_turns()
        self._open_commit_queues()
        self._open_fetch_queue()
        self._start_listener()
        self._max_connections = self._limit_connections()
        self._acceptor = Acceptor(sockets, self, self._tls, limit=self._max_connections)
        self.started.set()
        logger.info("server listens address=%s:%d", *self.address)
        # `stop` before `started` was set could not reach the loop: the flag covers that race.
        if not self._is_stopping:
            await self._stop_requested.wait()
        self._acceptor.close()
        await self._shut_down()
        logger.info("server stopped commands=%d", self.command_count)

    def _limit_connections(self) -> int:
        """Return how many connections this node serves: MAX_CONNECTIONS, or fewer if it may open fewer files."""
        wanted: int = conf.get("MAX_CONNECTIONS")
        spare = self.tuning.spare_handshakes if self._tls else 0
        limit = limit_connections(wanted + spare) - spare
        if limit < wanted:
            logger.warning(
                "fewer connections than MAX_CONNECTIONS, because of the hard limit of open files limit=%d", limit
            )
        if (max_backlog := find_max_backlog()) is not None and max_backlog < wanted:
            logger.warning("net.core.somaxconn is smaller than MAX_CONNECTIONS somaxconn=%d", max_backlog)
        return limit

    def _open_turns(self) -> None:
        # A check takes 2 to 4 ms in which the event loop does nothing else (W1).
        self.password_checks = Turns(self.loop, lambda: self.command_count)
        self.long_lines = Turns(self.loop, lambda: self.command_count, budget_bytes=self.tuning.long_lines_bytes)
        # Without a rest a flood of commands keeps the event loop busy, and threads wait for the GIL.
        self.rest_queue = Turns(self.loop, lambda: self.command_count, least_rest_s=REST_S)

    # One commit queue for each kind of verb: a slow or blocked command delays only commands of its own kind (ADR 0005).
    # Heartbeats and confirmations share theirs with no other verb: a late BEAT costs a live worker its jobs, and a late
    # confirmation runs a job twice. Waiting and long commands weigh MAX_SET_WEIGHT, so each is a set of its own.
    def _open_commit_queues(self) -> None:
        in_sets = partial(execute_set, self.broker)
        one_by_one = partial(execute_each, self.broker)
        queues: dict[str, tuple[Callable[[list[Any]], Sequence[Any]], dict[str, Any]]] = {
            "exchange": (
                partial(execute_exchange, self.broker),
                {
                    "width": WIDTH,
                    "threads": 1 if self.broker.can_use_loop else WIDTH,
                    "weigh": weight,
                    "connect": self.broker.take_connection,
                    "on_loop": partial(exchange_on_loop, self.broker),
                },
            ),
            "bulk": (in_sets, {"weigh": weight_of, "pause_s": self._bulk_pause_s}),
            "may-block": (in_sets, {"weigh": weight_of}),
            "lock-wait": (
                partial(execute_waiting, self.broker), {"width": LOCK_WAITS, "weigh": lambda _: MAX_SET_WEIGHT}
            ),
            "fail": (in_sets, {}),
            "heartbeat": (in_sets, {}),
            "confirm": (one_by_one, {}),
            "read": (
                Reads(self.broker).execute,
                {
                    "weigh": lambda _: READ_WEIGHT,
                    "pause_s": lambda _, ran_s: 0.0 if self._is_stopping else compute_rest_s(ran_s),
                },
            ),
            "long": (one_by_one, {"width": WIDTH, "weigh": lambda _: MAX_SET_WEIGHT}),
        }  # fmt: skip
        self.commit_queues: dict[str, CommitQueue[Any, Any]] = {
            name: CommitQueue(name, execute, reset=self.broker.close, loop=self.loop, **options)
            for name, (execute, options) in queues.items()
        }
        self.exchanges, self.long_work = self.commit_queues["exchange"], self.commit_queues["long"]
        self.lock_waits = LockWaits(self.commit_queues, give_up_after_s=conf.get("DATABASE_TIMEOUT"), loop=self.loop)
        self.uncertain_batches = UncertainBatches(self._withdraw, self.loop)

    def _bulk_pause_s(self, commands: Sequence[MayBlock], ran_s: float) -> float:
        """Return how long the bulk queue pauses after a set, so that other clients can write before its next one.

        It pauses if the database admits one writer at a time, the set was large, and other commands are in progress.
        """
        # The weight first: on the event loop, a look-up of the dialect creates a connection object.
        if self._is_stopping or sum(map(weight_of, commands)) <= UNPAUSED_BULK or not self.broker.has_single_writer:
            return 0.0
        are_others_idle = all(queue.is_idle for name, queue in self.commit_queues.items() if name != "bulk")
        return 0.0 if are_others_idle else min(self.tuning.bulk_pause * ran_s, self.tuning.max_bulk_pause_s)

    def _open_fetch_queue(self) -> None:
        self.deliveries = DeliveryTracker(confirm=self._confirm, loop=self.loop, tuning=self.tuning)
        self.prefetch_buffer = PrefetchBuffer(
            limit=conf.get("PREFETCH") if self.broker.supports_prefetch else 0,
            assign_prefetched=self._assign_prefetched,
            release=lambda jobs: self.release(jobs, self.fetch_queue.mark_returned),
            loop=self.loop,
            tuning=self.tuning,
        )
        self.fetch_queue = FetchQueue(
            self.exchanges,
            self.prefetch_buffer,
            width=WIDTH,
            release=self.release,
            poll_s=conf.get("POLL_INTERVAL"),
            loop=self.loop,
            supports_lock_handoff=self.broker.supports_lock_handoff,
            wait_s=self.tuning.fetch_wait_s,
        )
        self.exchanges.before_set = self.fetch_queue.submit_refills

    def _start_listener(self) -> None:
        self._listener = self._listen() if self._listen else None
        if self._listener:
            self._listener_thread = threading.Thread(
                target=self._wake_on_notifications, args=(self._listener,), name="faktory-listener", daemon=True
            )
            self._listener_thread.start()

    async def _shut_down(self) -> None:
        # Order: stop new work, answer accepted commands, close connections, confirm deliveries. The threads end last,
        # as each of these steps submits work to them.
        self.fetch_queue.stop()
        self.prefetch_buffer.close()
        self.lock_waits.stop()
        self.uncertain_batches.stop()
        await asyncio.sleep(LINGER_S if self._connections else 0)
        await self._drain()
        await self._close_connections()
        self.deliveries.confirm_all()  # at the end: by now running claims are delivered or released
        await self._drain()  # releases of jobs that could not be sent
        if self._listener:
            self._listener.close()
        for commit_queue in self.commit_queues.values():
            commit_queue.close_connections()
            await asyncio.to_thread(commit_queue.close)
        if self._listener_thread:
            # Bounded: a stuck listener must not prevent the exit.
            await asyncio.to_thread(self._listener_thread.join, 2.0)

    async def _drain(self) -> None:
        for commit_queue in [*self.commit_queues.values()] * 2:  # twice: a claim that ends may submit jobs to release
            await self.lock_waits.wait_idle()
            await commit_queue.wait_idle()
        await self.lock_waits.wait_idle()
        await asyncio.sleep(0)

    async def _close_connections(self) -> None:
        """Close all connections; abort a connection if its client has not read the replies within `last_replies_s`."""
        for connection in list(self._connections):
            connection.close()
        self._all_closed.clear()
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed.wait(), self.tuning.last_replies_s)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)

    def _wake_on_notifications(self, listener: NotificationSource) -> None:
        while not self._is_stopping:
            if listener.wait(LISTEN_S):
                self.wake()

    # --- work of the commit queues ---

    def _assign_prefetched(self, job: Reservation, wid: str) -> Reservation:
        delivered = self.broker.assign_prefetched(job, wid)
        self.deliveries.add(delivered)
        return delivered

    def _withdraw(self, bids: Collection[str], on_result: Callable[[FaktoryError | None], None]) -> None:
        self.execute_blocking(lambda: self.broker.withdraw_batches(bids), on_result)

    def _confirm(self, delivered: Sequence[Delivery], on_confirmed: Callable[[set[str] | FaktoryError], None]) -> None:
        self.commit_queues["confirm"].submit(lambda: self.broker.confirm(delivered), on_confirmed)


_REMEDIES = {
    errno.EADDRINUSE: "end what uses it, or choose another port",
    errno.EADDRNOTAVAIL: "choose an address that this machine has, such as 127.0.0.1 or 0.0.0.0",
    errno.EACCES: "choose another port, 1024 or more",
}


def _cannot_listen(address: tuple[str, int], error: OSError) -> str:
    """Return the error message, with the system's text for `errno`: asyncio's text repeats the address."""
    is_numbered = bool(error.errno) and not isinstance(error, socket.gaierror)
    reason = os.strerror(error.errno or 0).lower() if is_numbered else error.strerror or error
    remedy = _REMEDIES.get(error.errno or 0, "choose another address")
    return f"cannot listen on {address[0]}:{address[1]}: {reason}; {remedy}"
