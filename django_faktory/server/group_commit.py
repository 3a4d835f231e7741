"""Group commit: commands that arrive while a transaction runs share the next one (ADR 0005).

A `CommitQueue` is a queue for one kind of verb, with one or a few threads. With two, the next transaction begins while
the last one waits for the disk. If the event loop owns connections, it sends most sets itself (ADR 0005). There is no
timer: an idle queue executes a single command at once. Answers follow the commit (W29).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from ..core.logs import get_logger
from ..core.loop_connection import InThread, LoopConnection
from ..errors import BrokerUnavailable, FaktoryError, LockTimeout
from ..store import sharing

logger = get_logger(__name__)

MAX_SET_WEIGHT = 500
"""Maximum weight of a transaction; a plain command weighs 1. Large enough to hide the cost of the commit, small enough
to keep the transaction short."""

LOG_EVERY_S = 5.0
"""Minimum seconds between log lines about an unavailable database, however many commands fail."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")
T = TypeVar("T")
CommandSet = list[tuple[Item, Callable[[Answer | FaktoryError], object]]]
Answers = Sequence[Answer | FaktoryError]


class _Lane:
    """A place for one set at a time: on a connection of the event loop, or in one of the threads."""

    connection: LoopConnection | None = None
    task: asyncio.Task[None] | None = None
    """Kept, because the loop holds a weak reference."""


class CommitQueue(Generic[Item, Answer]):
    """Commit queue for one kind of verb.

    `execute` takes a list of items and returns one answer for each; it runs in a thread. At most `width` sets run at a
    time, in as many threads unless `threads` is given. `weigh` returns the weight of an item. After a set the thread
    calls `connect`: with its result `on_loop` executes the next sets, or returns None if a set needs a thread. `reset`
    closes a thread's connection. `pause_s` returns how long the next set waits, from a set and its duration in seconds.
    """

    def __init__(
        self,
        name: str,
        execute: Callable[[list[Item]], Answers[Answer]],
        *,
        width: int = 1,
        weigh: Callable[[Item], int] = lambda _: 1,
        threads: int | None = None,
        connect: Callable[[], LoopConnection | None] = lambda: None,
        on_loop: Callable[[LoopConnection, list[Item], InThread], Awaitable[Answers[Answer] | None]] | None = None,
        pause_s: Callable[[list[Item], float], float] | None = None,
        reset: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._execute, self._weigh, self._connect, self._on_loop = execute, weigh, connect, on_loop
        self._reset, self._loop, self._pause_s = reset, loop, pause_s
        self.before_set: Callable[[], object] | None = None
        """Called before a set is made; may submit items that join it."""
        self._is_scheduled = False
        self._failed = 0  # failed commands since the last log line
        self._log_again_at = 0.0
        self._pending: deque[tuple[Item, Callable[[Answer | FaktoryError], object]]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._lanes: list[_Lane] = [_Lane() for _ in range(width)]
        self._free = [*self._lanes]
        self._work: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run_thread, name=f"faktory-{name}-{number}", daemon=True)
            for number in range(threads or width)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, item: Item, answer: Callable[[Answer | FaktoryError], object]) -> None:
        """Execute an item with the next set; `answer` is called on the event loop with its result or error."""
        self._pending.append((item, answer))
        if self._free and not self._is_scheduled:
            self._is_scheduled = True
            self._idle.clear()
            lane = self._free.pop()
            lane.task = self._loop.create_task(self._run(lane))  # begins later: commands of the same read join the set

    @property
    def is_idle(self) -> bool:
        """Return whether all submitted items are answered and no thread pauses."""
        return self._idle.is_set()

    async def wait_idle(self) -> None:
        """Wait until all submitted items are answered."""
        await self._idle.wait()

    def close_connections(self) -> None:
        """Close the connections of the event loop; the queue must be idle."""
        for lane in self._lanes:
            if lane.connection:
                lane.connection.close()

    def close(self) -> None:
        """End the threads after their current work; blocks up to 10 s for each."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(10)

    async def _run(self, lane: _Lane) -> None:
        """Execute sets until nothing is pending."""
        self._is_scheduled = False
        while self._pending:
            if self.before_set:
                self.before_set()
            command_set = self._pop_set()
            items = list(map(_item_of, command_set))
            began_at = time.monotonic()
            answers = await self._execute_on_loop(lane, items)
            if answers is None:
                answers = await self._in_thread(partial(self._execute_in_thread, lane, items))
            # Not now: the next set is sent first, and runs while these are written.
            self._loop.call_soon(self._answer_set, command_set, answers)
            if self._pause_s and (pause_s := self._pause_s(items, time.monotonic() - began_at)):
                await asyncio.sleep(pause_s)
        self._free.append(lane)
        if len(self._free) == len(self._lanes):
            self._idle.set()

    async def _execute_on_loop(self, lane: _Lane, items: list[Item]) -> Answers[Answer] | None:
        """Execute a set on the lane's connection; None, with nothing done, if it needs a thread."""
        if lane.connection is None or self._on_loop is None:
            return None
        if not lane.connection.is_usable():
            lane.connection = None
            return None
        try:
            return await self._on_loop(lane.connection, items, self._in_thread)
        except BrokerUnavailable as error:
            return [error] * len(items)
        except Exception:  # the outcome is unknown
            logger.exception("set failed on the event loop items=%d", len(items))
            lane.connection.close()
            return [BrokerUnavailable("internal error")] * len(items)

    def _pop_set(self) -> CommandSet[Item, Answer]:
        """Remove and return the next set: one item of any weight, and more up to a total of `MAX_SET_WEIGHT`."""
        command_set = [self._pending.popleft()]
        if self._pending:
            room = MAX_SET_WEIGHT - self._weigh(command_set[0][0])
            while self._pending and (room := room - self._weigh(self._pending[0][0])) >= 0:
                command_set.append(self._pending.popleft())
        return command_set

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._work.put((future, work))
        return future

    def _run_thread(self) -> None:
        while (task := self._work.get()) is not None:
            future, work = task
            conclude: Callable[[Any], None] = future.set_result
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - raised where the future is awaited
                result, conclude = error, future.set_exception
                self._reset()
            sharing.give_back()
            self._loop.call_soon_threadsafe(conclude, result)
        self._reset()

    def _execute_in_thread(self, lane: _Lane, items: list[Item]) -> Answers[Answer]:
        answers = self._answers(items)
        if lane.connection is None and (connection := self._connect()):
            lane.connection = connection
            self._loop.call_soon_threadsafe(connection.start, self._loop)
        return answers

    def _answers(self, items: list[Item]) -> Answers[Answer]:
        try:
            return self._execute(items)
        except BrokerUnavailable as error:
            self._reset()
            return [error] * len(items)
        except Exception as error:  # one bad command must not fail the other commands of the set, nor end the thread
            self._reset()
            if len(items) > 1:
                half = len(items) // 2
                return [*self._answers(items[:half]), *self._answers(items[half:])]
            if isinstance(error, FaktoryError):
                return [error]
            logger.exception("command failed item=%s", _describe(items[0]))
            return [FaktoryError("internal error")]

    def _answer_set(self, command_set: CommandSet[Item, Answer], answers: Answers[Answer]) -> None:
        unavailable: list[BrokerUnavailable] = []
        for (item, answer), result in zip(command_set, answers, strict=True):
            try:
                if isinstance(result, BrokerUnavailable) and not isinstance(result, LockTimeout):
                    unavailable.append(result)
                    answer(BrokerUnavailable("database unavailable"))  # the driver's message must not reach clients
                else:
                    answer(result)
            except Exception:  # the other items of the set still need their answers
                logger.exception("answer failed item=%s", _describe(item))
        if unavailable:
            self._log_unavailable(len(unavailable), unavailable[0])

    def _log_unavailable(self, commands: int, error: object) -> None:
        self._failed += commands
        if (now := time.monotonic()) >= self._log_again_at:
            logger.warning("database unavailable commands=%d error=%s", self._failed, error)
            self._failed, self._log_again_at = 0, now + LOG_EVERY_S


_item_of = itemgetter(0)


def _describe(item: object) -> str:
    """Return the type and jid of an item for logs; never contents that a client sent."""
    return f"{type(item).__name__} {getattr(item, 'jid', '')}".rstrip()
