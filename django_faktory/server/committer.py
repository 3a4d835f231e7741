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
from queue import SimpleQueue
from typing import Generic, TypeVar

from ..errors import BrokerUnavailable, FaktoryError
from ..logs import get_logger

logger = get_logger(__name__)

MAX_BATCH = 500
"""The weight of a transaction, a plain command being 1: so much that its own cost vanishes, so little that it
stays short."""

COMPLAIN_EVERY_S = 5.0
"""A database that is away is told of as often, however many commands it fails."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Lane(Generic[Item, Answer]):
    """One kind of verb. `carry_out` takes a list of items and returns an answer to each, in one of `width` threads."""

    def __init__(
        self,
        name: str,
        carry_out: Callable[[list[Item]], Sequence[Answer | FaktoryError]],
        *,
        width: int = 1,
        weigh: Callable[[Item], int] = lambda _: 1,
        reset: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._carry_out, self._weigh, self._reset, self._loop = carry_out, weigh, reset, loop
        self._free = width
        self._is_called = False
        self._failed = 0  # since it was last told
        self._complain_at = 0.0
        self._pending: deque[tuple[Item, Callable[[Answer | FaktoryError], object]]] = deque()
        self._batches: SimpleQueue[list[tuple[Item, Callable[[Answer | FaktoryError], object]]] | None] = SimpleQueue()
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = [
            threading.Thread(target=self._work, name=f"faktory-{name}-{number}", daemon=True) for number in range(width)
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

    def close(self) -> None:
        """End the threads when they have done what was given to them."""
        for _ in self._threads:
            self._batches.put(None)
        for thread in self._threads:
            thread.join(10)

    def _next(self) -> None:
        self._is_called = False
        if self._pending and self._free:
            self._free -= 1
            self._batches.put(self._take())
        elif self._free == len(self._threads):
            self._idle.set()

    def _take(self) -> list[tuple[Item, Callable[[Answer | FaktoryError], object]]]:
        """The next set: as many as are light enough together, and one in any case."""
        batch = [self._pending.popleft()]
        room = MAX_BATCH - self._weigh(batch[0][0])
        while self._pending and (room := room - self._weigh(self._pending[0][0])) >= 0:
            batch.append(self._pending.popleft())
        return batch

    def _done(
        self,
        batch: list[tuple[Item, Callable[[Answer | FaktoryError], object]]],
        answers: Sequence[Answer | FaktoryError],
    ) -> None:
        self._free += 1
        self._next()  # before the answers: the threads work while they are written
        for (item, answer), told in zip(batch, answers, strict=True):
            try:
                answer(told)
            except Exception:  # the others of the set wait for theirs
                logger.exception("answer failed item=%s", _named(item))

    def _work(self) -> None:
        while (batch := self._batches.get()) is not None:
            answers = self._answers([item for item, _ in batch])
            self._loop.call_soon_threadsafe(self._done, batch, answers)
        self._reset()

    def _answers(self, items: list[Item]) -> Sequence[Answer | FaktoryError]:
        try:
            return self._carry_out(items)
        except BrokerUnavailable as error:
            self._complain(len(items), error)
            self._reset()
            return [BrokerUnavailable("database unavailable")] * len(items)
        except Exception as error:  # one poisoned command must not fail its neighbours, nor end the lane
            self._reset()
            if len(items) > 1:
                return [answer for item in items for answer in self._answers([item])]
            if isinstance(error, FaktoryError):
                return [error]
            logger.exception("command failed item=%s", _named(items[0]))
            return [FaktoryError("internal error")]

    def _complain(self, commands: int, error: BrokerUnavailable) -> None:
        self._failed += commands
        if (now := time.monotonic()) >= self._complain_at:
            logger.warning("database unavailable commands=%d error=%s", self._failed, error)
            self._failed, self._complain_at = 0, now + COMPLAIN_EVERY_S


def _named(item: object) -> str:
    """What it is and which job it is about; never what a client wrote into it."""
    return f"{type(item).__name__} {getattr(item, 'jid', '')}".rstrip()
