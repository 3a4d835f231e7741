"""Group commit: commands that arrive while a transaction runs share the next one (ADR 0005).

A `Lane` is a queue with one or two threads for one kind of verb. With two, the next transaction begins while the last
one waits for the disk. There is no timer: an idle queue executes a single command at once. Answers return to the event
loop after the broker has committed (W29).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Generic, NoReturn, TypeVar

from ..brokers.base import InFlight
from ..core.logs import get_logger
from ..errors import BrokerUnavailable, FaktoryError, LockTimeout

logger = get_logger(__name__)

MAX_BATCH = 500
"""Maximum weight of a transaction; a plain command weighs 1. Large enough to hide the cost of the commit, small enough
to keep the transaction short."""

COMPLAIN_EVERY_S = 5.0
"""Minimum seconds between log lines about an unavailable database, however many commands fail."""

LOOK_S = 1.0
"""Read an answer after 1 to 2 times this, even without an event: a lost event would block the queue and all
clients."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Batch = list[tuple[Item, Callable[[Answer | FaktoryError], object]]]


Answers = Sequence[Answer | FaktoryError]
Begin = Callable[[list[Item]], InFlight[Answers[Answer]] | None]
"""Send a set without waiting for its answers; return None if it needs a thread (ADR 0021)."""


class _Hand(Generic[Item, Answer]):
    """One thread of a queue and its connection, which is used either by the thread or by the event loop."""

    def __init__(self) -> None:
        self.begin: Begin[Item, Answer] | None = None
        self.flying: tuple[Batch[Item, Answer], InFlight[Answers[Answer]]] | None = None
        self.since = 0.0  # by the loop's clock
        self.fd: int | None = None
        self.work: SimpleQueue[tuple[Batch[Item, Answer], Callable[[], Answers[Answer]]] | None] = SimpleQueue()


class Lane(Generic[Item, Answer]):
    """Commit queue for one kind of verb.

    `carry_out` takes a list of items and returns one answer for each; it runs in one of `width` threads. `weigh`
    returns the weight of an item. After each set the thread calls `lend`: with its result the event loop sends the next
    sets on the thread's connection and reads their answers, until the thread is needed again. `reset` closes the
    connection.
    """

    def __init__(
        self,
        name: str,
        carry_out: Callable[[list[Item]], Answers[Answer]],
        *,
        width: int = 1,
        weigh: Callable[[Item], int] = lambda _: 1,
        lend: Callable[[], Begin[Item, Answer] | None] = lambda: None,
        reset: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._carry_out, self._weigh, self._lend, self._reset, self._loop = carry_out, weigh, lend, reset, loop
        self._is_called = False
        self._look: asyncio.TimerHandle | None = None
        self._failed = 0  # commands since the last log line
        self._complain_at = 0.0
        self._pending: deque[tuple[Item, Callable[[Answer | FaktoryError], object]]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._hands: list[_Hand[Item, Answer]] = [_Hand() for _ in range(width)]
        self._free = [*self._hands]
        self._threads = [
            threading.Thread(target=self._work, args=(hand,), name=f"faktory-{name}-{number}", daemon=True)
            for number, hand in enumerate(self._hands)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, item: Item, answer: Callable[[Answer | FaktoryError], object]) -> None:
        """Execute an item with the next set; `answer` is called on the event loop with its result or error."""
        self._pending.append((item, answer))
        if self._free and not self._is_called:
            self._is_called = True
            self._idle.clear()
            self._loop.call_soon(self._next)  # not now: commands of the same read of the socket join the set

    async def drained(self) -> None:
        """Wait until all submitted items are answered."""
        await self._idle.wait()

    def take_back(self) -> None:
        """Return all idle connections to their threads, which close them at the end."""
        for hand in self._free:
            self._take_back(hand)

    def close(self) -> None:
        """End the threads after their current work; blocks up to 10 s for each."""
        for hand in self._hands:
            hand.work.put(None)
        for thread in self._threads:
            thread.join(10)

    def _next(self) -> None:
        self._is_called = False
        if self._pending and self._free:
            hand, batch = self._free.pop(), self._take()
            items = [item for item, _ in batch]
            flight = self._begin(hand, items)
            if flight is None:
                self._give(hand, batch, partial(self._carry_out, items))
            else:
                self._wait(hand, batch, flight)
        elif len(self._free) == len(self._hands):
            self._idle.set()

    @staticmethod
    def _begin(hand: _Hand[Item, Answer], items: list[Item]) -> InFlight[Answers[Answer]] | None:
        try:
            return hand.begin(items) if hand.begin else None
        except Exception:  # the thread executes the set again and finds the item at fault
            logger.exception("set not sent from the event loop items=%d", len(items))
            return None

    def _wait(self, hand: _Hand[Item, Answer], batch: Batch[Item, Answer], flight: InFlight[Answers[Answer]]) -> None:
        """Answer when the exchange has been read. Until then nothing else uses its connection."""
        hand.flying, hand.since = (batch, flight), self._loop.time()
        if self._look is None:
            self._look = self._loop.call_later(LOOK_S, self._look_for_late_ones)
        if hand.fd is None:
            hand.fd = flight.fd
            self._loop.add_reader(hand.fd, self._read, hand)
        if not flight.is_sent:
            self._loop.add_writer(flight.fd, self._send, hand)

    def _look_for_late_ones(self) -> None:
        self._look = None
        flying = [hand for hand in self._hands if hand.flying is not None]
        if flying:
            self._look = self._loop.call_later(LOOK_S, self._look_for_late_ones)
        before = self._loop.time() - LOOK_S
        for hand in flying:
            if hand.since <= before:
                self._read(hand)

    def _read(self, hand: _Hand[Item, Answer]) -> None:
        if hand.flying is None:
            self._take_back(hand)  # readable without a request: the database has closed the connection, or is about to
            return
        batch, flight = hand.flying
        try:
            told = flight.read()
        except Exception:
            logger.exception("answer not read on the event loop items=%d", len(batch))
            told = _unavailable  # the thread closes the connection: parts of an answer may be left on it
        if told is None:
            return
        hand.flying = None
        if flight.is_last:
            # libuv reports a reset once: it was reported with this answer, so the next set would wait in vain.
            self._take_back(hand)
        if callable(told):  # the work that is left, such as a job that needs a lock (ADR 0021)
            self._give(hand, batch, told)
        else:
            self._done(hand, batch, told)

    def _send(self, hand: _Hand[Item, Answer]) -> None:
        assert hand.flying is not None and hand.fd is not None  # noqa: S101, PT018  (only while it flies)
        _, flight = hand.flying
        flight.send()
        if flight.is_sent:
            self._loop.remove_writer(hand.fd)
        self._read(hand)

    def _take_back(self, hand: _Hand[Item, Answer]) -> None:
        """Return the connection to its thread: the event loop neither reads nor writes it from now on."""
        hand.begin = None
        if hand.fd is not None:
            self._loop.remove_reader(hand.fd)
            self._loop.remove_writer(hand.fd)
            hand.fd = None

    def _give(self, hand: _Hand[Item, Answer], batch: Batch[Item, Answer], work: Callable[[], Answers[Answer]]) -> None:
        self._take_back(hand)
        hand.work.put((batch, work))

    def _take(self) -> Batch[Item, Answer]:
        """Remove and return the next set: one item of any weight, and more up to a total of `MAX_BATCH`."""
        batch = [self._pending.popleft()]
        room = MAX_BATCH - self._weigh(batch[0][0])
        while self._pending and (room := room - self._weigh(self._pending[0][0])) >= 0:
            batch.append(self._pending.popleft())
        return batch

    def _done(self, hand: _Hand[Item, Answer], batch: Batch[Item, Answer], answers: Answers[Answer]) -> None:
        self._free.append(hand)
        self._next()  # before the answers: the next set runs while these are written
        for (item, answer), told in zip(batch, answers, strict=True):
            try:
                answer(told)
            except Exception:  # the other items of the set still need their answers
                logger.exception("answer failed item=%s", _named(item))

    def _work(self, hand: _Hand[Item, Answer]) -> None:
        while (given := hand.work.get()) is not None:
            batch, work = given
            answers = self._answers([item for item, _ in batch], work)
            hand.begin = self._lend()
            self._loop.call_soon_threadsafe(self._done, hand, batch, answers)
        self._reset()

    def _answers(self, items: list[Item], work: Callable[[], Answers[Answer]]) -> Answers[Answer]:
        try:
            return self._without_details(work())
        except BrokerUnavailable as error:
            self._complain(len(items), error)
            self._reset()
            return [BrokerUnavailable("database unavailable")] * len(items)
        except Exception as error:  # one bad command must not fail the other commands of the set, nor end the thread
            self._reset()
            if len(items) > 1:
                return [answer for item in items for answer in self._answers([item], partial(self._carry_out, [item]))]
            if isinstance(error, FaktoryError):
                return [error]
            logger.exception("command failed item=%s", _named(items[0]))
            return [FaktoryError("internal error")]

    def _without_details(self, answers: Answers[Answer]) -> Answers[Answer]:
        """Log errors of single commands and replace their text: the driver's message must not reach clients."""
        lost = [answer for answer in answers if _is_lost(answer)]
        if not lost:
            return answers
        self._complain(len(lost), lost[0])
        return [BrokerUnavailable("database unavailable") if _is_lost(answer) else answer for answer in answers]

    def _complain(self, commands: int, error: object) -> None:
        self._failed += commands
        if (now := time.monotonic()) >= self._complain_at:
            logger.warning("database unavailable commands=%d error=%s", self._failed, error)
            self._failed, self._complain_at = 0, now + COMPLAIN_EVERY_S


def _is_lost(answer: object) -> bool:
    return isinstance(answer, BrokerUnavailable) and not isinstance(answer, LockTimeout)


def _unavailable() -> NoReturn:
    raise BrokerUnavailable("internal error")


def _named(item: object) -> str:
    """Return the type and jid of an item for logs; never contents that a client sent."""
    return f"{type(item).__name__} {getattr(item, 'jid', '')}".rstrip()
