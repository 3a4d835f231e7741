"""The server itself: the port, the lanes, the connections, start and stop. Knows what no verb means.

Usable in a process of its own or in a thread; `stop` and `drop` may be called from any thread or signal handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Protocol

from .. import conf
from ..brokers.base import Broker
from ..errors import BrokerUnavailable, FaktoryError
from ..event_loops import new_event_loop
from ..logs import get_logger
from ..payloads import Ack, Beat, Failure, HandedOut, JobPayload, Reservation, WorkerIdentity
from ..protocol import resp
from ..protocol.commands import Command
from .committer import MAX_BATCH, Begin, Lane
from .connection import Connection
from .desk import Desk
from .door import Door
from .doorman import Doorman
from .fetchers import Fetchers
from .guard import Guard
from .handed_out import HandOuts
from .intake import Intake
from .lock_waits import WIDTH as LOCK_WAITS
from .lock_waits import LockWaits
from .may_block import MayBlock, Work, answer_each, take_set, take_waiting, weight_of
from .shelf import Shelf
from .turns import Item, begin_turn, take_turn, weight
from .uncertain_batches import UncertainBatches
from .unfinished import LONGEST_AT_ONCE, Unfinished
from .verbs import carry_out

logger = get_logger(__name__)

LINGER_S = 0.25
"""How long a stopping server still tells clients that it stops (W28)."""

LAST_REPLIES_S = 3.0
"""How long it then waits for clients to read what they were answered."""

RELEASE_AGAIN_S = 1.0
LISTEN_S = 60.0
"""Longest wait for a hint; who stops closes the listener, which ends it."""

MAX_PUSH_IN_TURN = 50
BACKLOG = 128
WIDTH = 2
"""Turns at once. Each is a database connection; a third gained nothing on two cores."""


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
        tls: ssl.SSLContext | None = None,
        listen: Callable[[], Listener] | None = None,
    ) -> None:
        self.broker = broker
        self.password = password
        self.guard = Guard(most=conf.get("PASSWORD_TRIES") if password else 0)
        self.max_command_bytes: int = conf.get("MAX_COMMAND_BYTES")
        self.hello_timeout_s: float = conf.get("HELLO_TIMEOUT")
        self.command_timeout_s: float = conf.get("COMMAND_TIMEOUT")
        self.address = (host, port)
        self.started = threading.Event()
        self.command_count = 0
        self.on_scheduled: Callable[[datetime], None] = lambda _: None
        """Called when jobs were stored for later, with the first one's time: who enqueues them may have to be early."""
        self._max_connections: int = conf.get("MAX_CONNECTIONS")
        self.unfinished = Unfinished(LONGEST_AT_ONCE * self.max_command_bytes)
        self._door = Door(self, tls, most=self._max_connections)
        self._listen = listen
        self._connections: set[Connection] = set()
        self._by_wid: dict[str, set[Connection]] = {}
        self._is_stopping = False
        self._stopped = asyncio.Event()
        self._deserted = asyncio.Event()
        self._ears: threading.Thread | None = None
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

    def comes_round(self, within_s: float) -> bool:
        """Whether the loop does what it is asked from another thread in so many seconds."""
        came = threading.Event()
        self._from_outside(came.set)
        return came.wait(within_s)

    # --- what connections and verbs ask ---

    def admits(self, connection: Connection) -> bool:
        """Whether there is a place for one more (W8); if so it is taken."""
        if len(self._connections) >= self._max_connections:
            return False
        self._connections.add(connection)
        return True

    def joins(self, connection: Connection) -> None:
        """A connection has told its wid."""
        self._by_wid.setdefault(connection.identity.wid, set()).add(connection)

    def forgets(self, connection: Connection) -> None:
        """A connection is closed."""
        self._connections.discard(connection)
        if not self._connections:
            self._deserted.set()
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

    def push(
        self, jobs: list[JobPayload], answer: Callable[[list[FaktoryError | None] | FaktoryError], object]
    ) -> None:
        """Store jobs with the next turn. A large set goes on a way of its own, and so does what may have to wait for
        somebody else's transaction (ADR 0023): nobody waits for them."""
        if weight(jobs) > MAX_PUSH_IN_TURN:
            self.lock_waits.submit(MayBlock(jobs), answer, lane=self._bulk)
        elif any(job.options is not None and job.options.is_apart for job in jobs):
            self.lock_waits.submit(MayBlock(jobs), answer)
        else:
            self.fetchers.before_turn()
            self.turns.submit(jobs, answer)

    def ack(self, report: Ack, answer: Callable[[FaktoryError | bool], None]) -> None:
        """End a job with the next turn; a member of a batch apart, as its batch may be somebody's just now."""
        if self.handed_out.is_member(report.jid):
            self.lock_waits.submit(MayBlock(report, self._subjects_of(report.jid)), answer)
        else:
            self.fetchers.before_turn()
            self.turns.submit(report, answer)

    def fail(self, report: Failure, answer: Callable[[FaktoryError | bool], None]) -> None:
        """Record a failure; of a member of a batch apart, as another transaction may have locked its batch."""
        lane = self._apart if self.handed_out.is_member(report.jid) else self._fails
        self.lock_waits.submit(MayBlock(report, self._subjects_of(report.jid)), answer, lane=lane)

    def sign(self, sign: Beat | WorkerIdentity, answer: Callable[[Any], object]) -> None:
        """Record a heartbeat or a registration, in a lane that no other command uses."""
        self.lock_waits.submit(MayBlock(sign, [f"wid:{sign.wid}"]), answer, lane=self._signs)

    def may_block(
        self,
        work: Work,
        answer: Callable[[Any], object],
        subjects: Iterable[str] = (),
        *,
        is_repeatable: bool = False,
    ) -> None:
        """Carry out a call that may meet another transaction's lock. `subjects` name what it may wait for."""
        self.lock_waits.submit(MayBlock(work, subjects, is_repeatable=is_repeatable), answer)

    def read(self, connection: Connection, work: Callable[[], Any], answer: Callable[[Any], object]) -> None:
        """Make a call that changes nothing, unless the client has gone by then. Equal calls of a set are made once."""
        self._reads.submit((connection, work), answer)

    def _subjects_of(self, jid: str) -> list[str]:
        bid = self.handed_out.batch_of(jid)
        return [f"bid:{bid}"] if bid else [f"jid:{jid}"]

    def stored(self, jobs: Sequence[JobPayload]) -> None:
        """Jobs were committed: let fetchers that wait have them, now or when they are due."""
        self.fetchers.wake({job.queue for job in jobs})
        times = [job.at for job in jobs if job.at is not None]
        if times:
            self.on_scheduled(min(times))

    def goes_on(self) -> bool:
        """Whether there is time for more: long work ends between two of its steps when the server stops."""
        return not self._is_stopping

    @property
    def connection_count(self) -> int:
        """Clients connected to this node."""
        return len(self._connections)

    @property
    def uptime_s(self) -> float:
        """Seconds since the server was made."""
        return time.monotonic() - self._since

    # --- life ---

    async def _serve(self) -> None:
        try:
            listening = await asyncio.get_running_loop().create_server(self._door, *self.address, backlog=BACKLOG)
        except OSError as error:
            raise FaktoryError(_cannot_listen(self.address, error)) from error
        self._open_lanes()
        self.address = next(iter(listening.sockets)).getsockname()[:2]
        self.started.set()
        logger.info("server listens address=%s:%d", *self.address)
        if not self._is_stopping:
            await self._stopped.wait()
        listening.close()
        self._door.close()
        await self._wind_down()
        logger.info("server stopped commands=%d", self.command_count)

    def _open_lanes(self) -> None:
        self.doorman = Doorman(self.loop)
        most_bytes = LONGEST_AT_ONCE * self.max_command_bytes
        self.intake = Intake(self.loop, is_full=lambda: self.desk.waiting_bytes > most_bytes)
        self.desk = Desk(self.loop, commands=lambda: self.command_count, later=self.intake.free)
        common: dict[str, Any] = {"reset": self.broker.close, "loop": self.loop}
        turn = partial(take_turn, self.broker)
        self.turns: Lane[Item, Any] = Lane("turn", turn, width=WIDTH, weigh=weight, lend=self._lend, **common)
        in_sets = partial(take_set, self.broker)
        self._bulk: Lane[MayBlock, Any] = Lane("bulk", in_sets, weigh=weight_of, **common)
        self._apart: Lane[MayBlock, Any] = Lane("apart", in_sets, weigh=weight_of, **common)
        self._waiting: Lane[MayBlock, Any] = Lane(
            "waiting", partial(take_waiting, self.broker), width=LOCK_WAITS, weigh=lambda _: MAX_BATCH, **common
        )
        self.lock_waits = LockWaits(
            self._apart, self._waiting, give_up_after_s=conf.get("DATABASE_TIMEOUT"), loop=self.loop
        )
        self.uncertain_batches = UncertainBatches(self._withdraw, self.loop)
        one_by_one = partial(answer_each, reset=self.broker.close)
        self._fails: Lane[MayBlock, Any] = Lane("fail", in_sets, **common)
        self._signs: Lane[MayBlock, Any] = Lane("sign", in_sets, **common)
        self._deliveries: Lane[Callable[[], Any], Any] = Lane("delivery", one_by_one, **common)
        self._reads: Lane[_Read, Any] = Lane("read", partial(_read_each, reset=self.broker.close), **common)
        self.long_work: Lane[Callable[[], Any], Any] = Lane(
            "long", one_by_one, width=WIDTH, weigh=lambda _: MAX_BATCH, **common
        )
        self._lanes: tuple[Lane[Any, Any], ...] = (
            self.turns, self._bulk, self._apart, self._waiting, self._fails, self._signs, self._deliveries, self._reads,
            self.long_work,
        )  # fmt: skip
        self.handed_out = HandOuts(confirm=self._confirm, loop=self.loop)
        self.shelf = Shelf(
            most=conf.get("READ_AHEAD") if self.broker.reads_ahead else 0,
            hand_out=self._hand_out,
            release=lambda jobs: self.release(jobs, self.fetchers.returned),
            loop=self.loop,
        )
        self.fetchers = Fetchers(
            self.turns,
            self.shelf,
            width=WIDTH,
            release=self.release,
            poll_s=conf.get("POLL_INTERVAL"),
            loop=self.loop,
            hands_over=self.broker.hands_over,
        )
        self._hints = self._listen() if self._listen else None
        if self._hints:
            self._ears = threading.Thread(target=self._hear, args=(self._hints,), name="faktory-hints", daemon=True)
            self._ears.start()

    async def _wind_down(self) -> None:
        self.fetchers.stop()
        self.shelf.close()
        self.lock_waits.stop()
        self.uncertain_batches.stop()
        await asyncio.sleep(LINGER_S if self._connections else 0)
        await self._drain()
        await self._part()
        self.handed_out.confirm_all()  # at the end: claims that were under way have been delivered, or released
        await self._drain()  # jobs whose clients had gone before they were sent
        if self._hints:
            self._hints.close()
        for lane in self._lanes:
            lane.take_back()
            await asyncio.to_thread(lane.close)
        if self._ears:
            await asyncio.to_thread(self._ears.join, 2.0)

    async def _drain(self) -> None:
        for lane in self._lanes * 2:  # a claim that came back may have given jobs to release
            await self.desk.drained()
            await self.lock_waits.drained()
            await lane.drained()
        await self.desk.drained()
        await self.lock_waits.drained()
        await asyncio.sleep(0)

    async def _part(self) -> None:
        """Close all connections, when their clients have read what they were answered, or will not."""
        for connection in list(self._connections):
            connection.close()
        self._deserted.clear()
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._deserted.wait(), LAST_REPLIES_S)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)

    def _drop(self, wids: list[str]) -> None:
        for wid in wids:
            for connection in list(self._by_wid.get(wid, ())):
                connection.close()

    def _from_outside(self, work: Callable[..., None], *args: Any) -> None:
        if self.started.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self.loop.call_soon_threadsafe(work, *args)

    def _hear(self, hints: Listener) -> None:
        while not self._is_stopping:
            if hints.wait(LISTEN_S):
                self.wake()

    # --- what the lanes carry out, in their threads ---

    def _lend(self) -> Begin[Item, Any] | None:
        """How the loop takes turns on this thread's connection."""
        lent = self.broker.lend()
        return partial(begin_turn, lent) if lent else None

    def _hand_out(self, job: Reservation, wid: str) -> Reservation:
        handed = self.broker.hand_out(job, wid)
        self.handed_out.add(handed)
        return handed

    def _withdraw(self, bids: Collection[str], then: Callable[[FaktoryError | None], None]) -> None:
        self.may_block(lambda: self.broker.withdraw_batches(bids), then)

    def _confirm(self, handed: Sequence[HandedOut], told: Callable[[set[str] | FaktoryError], None]) -> None:
        self._deliveries.submit(lambda: self.broker.confirm(handed), told)

    def release(self, jobs: Sequence[Reservation], then: Callable[[set[str]], None] = lambda _: None) -> None:
        """Give back jobs that were claimed for clients that have gone, so that other clients can have them (W14)."""
        for job in jobs:
            self.handed_out.forget(job.jid)

        def answer(told: int | FaktoryError) -> None:
            if isinstance(told, BrokerUnavailable) and not self._is_stopping:
                self.loop.call_later(RELEASE_AGAIN_S, self.release, jobs, then)
                return
            queues = {job.queue for job in jobs}
            then(queues)
            if isinstance(told, FaktoryError):
                logger.error("jobs not given back, their reservations must end jids=%s", [job.jid for job in jobs])
            else:
                self.fetchers.wake(queues)

        self.may_block(lambda: self.broker.release(jobs), answer, [f"jid:{job.jid}" for job in jobs])


_Read = tuple[Connection, Callable[[], Any]]


def _read_each(reads: list[_Read], *, reset: Callable[[], None]) -> list[Any]:
    """Return each call's answer; equal ones (INFO) are made once, and none for clients that have gone."""
    distinct = list(dict.fromkeys(call for connection, call in reads if not connection.is_gone))
    answers = dict(zip(distinct, answer_each(distinct, reset), strict=True))
    return [answers.get(call, _GONE) for _, call in reads]


_GONE = FaktoryError("the client has gone")


_REMEDIES = {
    errno.EADDRINUSE: "end what uses it, or choose another port",
    errno.EADDRNOTAVAIL: "choose an address that this machine has, such as 127.0.0.1 or 0.0.0.0",
    errno.EACCES: "choose another port, 1024 or more",
}


def _cannot_listen(address: tuple[str, int], error: OSError) -> str:
    """What is in the way in the system's own word: asyncio's has the address in it, which says it a second time."""
    is_numbered = bool(error.errno) and not isinstance(error, socket.gaierror)
    reason = os.strerror(error.errno or 0).lower() if is_numbered else error.strerror or error
    remedy = _REMEDIES.get(error.errno or 0, "choose another address")
    return f"cannot listen on {address[0]}:{address[1]}: {reason}; {remedy}"
