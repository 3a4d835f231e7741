"""Group commit: commands that come while a transaction runs wait together for the next one.

A lane is a thread or two that carry out one kind of verb, a set at a time: with two, the next transaction begins
while the last one waits for the disk. Nobody waits on a timer: an idle lane takes a lone command at once. Answers
go back to the event loop after the broker has committed (W29).
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
from ..errors import BrokerUnavailable, FaktoryError, LockTimeout
from ..logs import get_logger

logger = get_logger(__name__)

MAX_BATCH = 500
"""The weight of a transaction, a plain command being 1: so much that its own cost vanishes, so little that it
stays short."""

COMPLAIN_EVERY_S = 5.0
"""A database that is away is told of as often, however many commands it fails."""

LOOK_S = 1.0
"""An answer that takes as long, or twice that, is looked for: were there ever one of which the event loop does not
tell, the lane would stand still, and with it all clients."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Batch = list[tuple[Item, Callable[[Answer | FaktoryError], object]]]


Answers = Sequence[Answer | FaktoryError]
Begin = Callable[[list[Item]], InFlight[Answers[Answer]] | None]
"""Sends a set without waiting for its answers, where it can go that way (ADR 0021)."""


class _Hand(Generic[Item, Answer]):
    """One thread of a lane, with its connection: the thread uses it, or the event loop does."""

    def __init__(self) -> None:
        self.begin: Begin[Item, Answer] | None = None
        self.flying: tuple[Batch[Item, Answer], InFlight[Answers[Answer]]] | None = None
        self.since = 0.0  # by the loop's clock
        self.fd: int | None = None
        self.work: SimpleQueue[tuple[Batch[Item, Answer], Callable[[], Answers[Answer]]] | None] = SimpleQueue()


class Lane(Generic[Item, Answer]):
    """One kind of verb. `carry_out` takes a list of items and returns an answer to each, in one of `width` threads.

    `lend` is called in such a thread when it has done something: until it has to do something again, the event loop
    sends sets by what was returned, and reads them.
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
        self._failed = 0  # since it was last told
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
        """Have this carried out with the next set; `answer` is called on the event loop."""
        self._pending.append((item, answer))
        if self._free and not self._is_called:
            self._is_called = True
            self._idle.clear()
            self._loop.call_soon(self._next)  # what else came with this read goes along

    async def drained(self) -> None:
        """Wait until everything submitted is answered."""
        await self._idle.wait()

    def take_back(self) -> None:
        """Have all connections left to their threads, which close them at the end."""
        for hand in self._free:
            self._take_back(hand)

    def close(self) -> None:
        """End the threads when they have done what was given to them."""
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
        except Exception:  # the thread finds out whose it is
            logger.exception("set not sent from the event loop items=%d", len(items))
            return None

    def _wait(self, hand: _Hand[Item, Answer], batch: Batch[Item, Answer], flight: InFlight[Answers[Answer]]) -> None:
        """Answer when the flight is read. Its connection is nobody else's until then."""
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
            self._take_back(hand)  # nothing was asked: the connection has ended, or is about to
            return
        batch, flight = hand.flying
        try:
            told = flight.read()
        except Exception:
            logger.exception("answer not read on the event loop items=%d", len(batch))
            told = _unavailable  # the thread closes the connection, on which anything may be left
        if told is None:
            return
        hand.flying = None
        if flight.is_last:
            self._take_back(hand)  # libuv, which told of the end with the answer, would not tell the next one
        if callable(told):
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
        """From now on the connection is the thread's."""
        hand.begin = None
        if hand.fd is not None:
            self._loop.remove_reader(hand.fd)
            self._loop.remove_writer(hand.fd)
            hand.fd = None

    def _give(self, hand: _Hand[Item, Answer], batch: Batch[Item, Answer], work: Callable[[], Answers[Answer]]) -> None:
        self._take_back(hand)
        hand.work.put((batch, work))

    def _take(self) -> Batch[Item, Answer]:
        """The next set: as many as are light enough together, and one in any case."""
        batch = [self._pending.popleft()]
        room = MAX_BATCH - self._weigh(batch[0][0])
        while self._pending and (room := room - self._weigh(self._pending[0][0])) >= 0:
            batch.append(self._pending.popleft())
        return batch

    def _done(self, hand: _Hand[Item, Answer], batch: Batch[Item, Answer], answers: Answers[Answer]) -> None:
        self._free.append(hand)
        self._next()  # before the answers: the threads work while they are written
        for (item, answer), told in zip(batch, answers, strict=True):
            try:
                answer(told)
            except Exception:  # the others of the set wait for theirs
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
        except Exception as error:  # one poisoned command must not fail its neighbours, nor end the lane
            self._reset()
            if len(items) > 1:
                return [answer for item in items for answer in self._answers([item], partial(self._carry_out, [item]))]
            if isinstance(error, FaktoryError):
                return [error]
            logger.exception("command failed item=%s", _named(items[0]))
            return [FaktoryError("internal error")]

    def _without_details(self, answers: Answers[Answer]) -> Answers[Answer]:
        """Log why commands failed that were answered by themselves: clients are not shown the driver's words."""
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
    """What it is and which job it is about; never what a client wrote into it."""
    return f"{type(item).__name__} {getattr(item, 'jid', '')}".rstrip()
