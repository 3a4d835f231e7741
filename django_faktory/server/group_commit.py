"""Group commit: commands that arrive while a transaction runs share the next one (ADR 0005).

A `CommitQueue` is a queue with one or a few threads for one kind of verb. With two, the next transaction begins while
the last one waits for the disk. There is no timer: an idle queue executes a single command at once. Answers return to
the event loop after the broker has committed (W29).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from queue import SimpleQueue
from typing import Generic, NoReturn, TypeVar

from ..core.in_flight import InFlightExchange
from ..core.logs import get_logger
from ..errors import BrokerUnavailable, FaktoryError, LockTimeout
from ..store import sharing

logger = get_logger(__name__)

MAX_SET_WEIGHT = 500
"""Maximum weight of a transaction; a plain command weighs 1. Large enough to hide the cost of the commit, small enough
to keep the transaction short."""

LOG_EVERY_S = 5.0
"""Minimum seconds between log lines about an unavailable database, however many commands fail."""

READ_ANYWAY_S = 1.0
"""Read an answer after 1 to 2 times this, even without an event: a missed event would block the queue and all
clients."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")
CommandSet = list[tuple[Item, Callable[[Answer | FaktoryError], object]]]
Answers = Sequence[Answer | FaktoryError]
Begin = Callable[[list[Item]], InFlightExchange[Answers[Answer]] | None]
"""Send a set without waiting for its answers; return None if it needs a thread (ADR 0021)."""


class _CommitThread(Generic[Item, Answer]):
    """One thread of a queue and its connection, which is used either by the thread or by the event loop."""

    def __init__(self) -> None:
        self.begin: Begin[Item, Answer] | None = None
        self.in_flight: tuple[CommandSet[Item, Answer], InFlightExchange[Answers[Answer]]] | None = None
        self.since = 0.0  # by the loop's clock
        self.fd: int | None = None
        self.work: SimpleQueue[tuple[CommandSet[Item, Answer], Callable[[], Answers[Answer]]] | None] = SimpleQueue()


class CommitQueue(Generic[Item, Answer]):
    """Commit queue for one kind of verb.

    `execute` takes a list of items and returns one answer for each; it runs in one of `width` threads. `weigh`
    returns the weight of an item. After each set the thread calls `lend`: with its result the event loop sends the next
    sets on the thread's connection and reads their answers, until the thread is needed again. `reset` closes the
    connection. `pause_s` returns how long a thread waits after a set, from the set and its duration in seconds.
    """

    def __init__(
        self,
        name: str,
        execute: Callable[[list[Item]], Answers[Answer]],
        *,
        width: int = 1,
        weigh: Callable[[Item], int] = lambda _: 1,
        lend: Callable[[], Begin[Item, Answer] | None] = lambda: None,
        pause_s: Callable[[list[Item], float], float] | None = None,
        read_anyway_s: float = READ_ANYWAY_S,
        reset: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._execute, self._weigh, self._lend, self._reset, self._loop = execute, weigh, lend, reset, loop
        self._pause_s, self._read_anyway_s = pause_s, read_anyway_s
        self.before_set: Callable[[], object] | None = None
        """Called before a set is made; may submit items that join it."""
        self._is_scheduled = False
        self._read_timer: asyncio.TimerHandle | None = None
        self._failed = 0  # failed commands since the last log line
        self._log_again_at = 0.0
        self._pending: deque[tuple[Item, Callable[[Answer | FaktoryError], object]]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._commit_threads: list[_CommitThread[Item, Answer]] = [_CommitThread() for _ in range(width)]
        self._free = [*self._commit_threads]
        self._threads = [
            threading.Thread(target=self._work, args=(commit_thread,), name=f"faktory-{name}-{number}", daemon=True)
            for number, commit_thread in enumerate(self._commit_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, item: Item, answer: Callable[[Answer | FaktoryError], object]) -> None:
        """Execute an item with the next set; `answer` is called on the event loop with its result or error."""
        self._pending.append((item, answer))
        if self._free and not self._is_scheduled:
            self._is_scheduled = True
            self._idle.clear()
            self._loop.call_soon(self._next)  # not now: commands of the same read of the socket join the set

    @property
    def is_idle(self) -> bool:
        """Return whether all submitted items are answered and no thread pauses."""
        return self._idle.is_set()

    async def wait_idle(self) -> None:
        """Wait until all submitted items are answered."""
        await self._idle.wait()

    def return_connections(self) -> None:
        """Return all idle connections to their threads, which close them at the end."""
        for commit_thread in self._free:
            self._return_connection(commit_thread)

    def close(self) -> None:
        """End the threads after their current work; blocks up to 10 s for each."""
        for commit_thread in self._commit_threads:
            commit_thread.work.put(None)
        for thread in self._threads:
            thread.join(10)

    def _next(self) -> None:
        self._is_scheduled = False
        if self._pending and self._free:
            if self.before_set:
                self.before_set()
            commit_thread, command_set = self._free.pop(), self._pop_set()
            items = list(map(_item_of, command_set))
            flight = self._begin(commit_thread, items)
            if flight is None:
                self._run_in_thread(commit_thread, command_set, partial(self._execute, items))
            else:
                self._read_when_ready(commit_thread, command_set, flight)
        elif len(self._free) == len(self._commit_threads):
            self._idle.set()

    @staticmethod
    def _begin(
        commit_thread: _CommitThread[Item, Answer], items: list[Item]
    ) -> InFlightExchange[Answers[Answer]] | None:
        try:
            return commit_thread.begin(items) if commit_thread.begin else None
        except Exception:  # the thread executes the set again and finds the item at fault
            logger.exception("set not sent from the event loop items=%d", len(items))
            return None

    def _read_when_ready(
        self,
        commit_thread: _CommitThread[Item, Answer],
        command_set: CommandSet[Item, Answer],
        flight: InFlightExchange[Answers[Answer]],
    ) -> None:
        """Read the result of an exchange when it arrives. Until then nothing else uses the connection."""
        commit_thread.in_flight, commit_thread.since = (command_set, flight), self._loop.time()
        if self._read_timer is None:
            self._read_timer = self._loop.call_later(self._read_anyway_s, self._poll_overdue)
        if commit_thread.fd is None:
            commit_thread.fd = flight.fd
            self._loop.add_reader(commit_thread.fd, self._read, commit_thread)
        if not flight.is_sent:
            self._loop.add_writer(flight.fd, self._send, commit_thread)

    def _poll_overdue(self) -> None:
        self._read_timer = None
        in_flight = [commit_thread for commit_thread in self._commit_threads if commit_thread.in_flight is not None]
        if in_flight:
            self._read_timer = self._loop.call_later(self._read_anyway_s, self._poll_overdue)
        before = self._loop.time() - self._read_anyway_s
        for commit_thread in in_flight:
            if commit_thread.since <= before:
                self._read(commit_thread)

    def _read(self, commit_thread: _CommitThread[Item, Answer]) -> None:
        if commit_thread.in_flight is None:
            # Readable without a request: the database has closed the connection, or is about to.
            self._return_connection(commit_thread)
            return
        command_set, flight = commit_thread.in_flight
        try:
            result = flight.read()
        except Exception:
            logger.exception("answer not read on the event loop items=%d", len(command_set))
            result = _unavailable  # the thread closes the connection: parts of an answer may be left on it
        if result is None:
            return
        commit_thread.in_flight = None
        if flight.is_last:
            # uvloop reports a reset connection once, here with this answer: the next set would wait for an event that
            # never comes.
            self._return_connection(commit_thread)
        if callable(result):  # the remaining work, such as a job that needs a lock (ADR 0021)
            self._run_in_thread(commit_thread, command_set, result)
        else:
            self._answer_set(commit_thread, command_set, result)

    def _send(self, commit_thread: _CommitThread[Item, Answer]) -> None:
        assert commit_thread.in_flight is not None and commit_thread.fd is not None  # noqa: S101, PT018  (only while a set is in flight)
        _, flight = commit_thread.in_flight
        flight.send()
        if flight.is_sent:
            self._loop.remove_writer(commit_thread.fd)
        self._read(commit_thread)

    def _return_connection(self, commit_thread: _CommitThread[Item, Answer]) -> None:
        """Return the connection to its thread: the event loop neither reads nor writes it from now on."""
        commit_thread.begin = None
        if commit_thread.fd is not None:
            self._loop.remove_reader(commit_thread.fd)
            self._loop.remove_writer(commit_thread.fd)
            commit_thread.fd = None

    def _run_in_thread(
        self,
        commit_thread: _CommitThread[Item, Answer],
        command_set: CommandSet[Item, Answer],
        work: Callable[[], Answers[Answer]],
    ) -> None:
        self._return_connection(commit_thread)
        commit_thread.work.put((command_set, work))

    def _pop_set(self) -> CommandSet[Item, Answer]:
        """Remove and return the next set: one item of any weight, and more up to a total of `MAX_SET_WEIGHT`."""
        command_set = [self._pending.popleft()]
        if self._pending:
            room = MAX_SET_WEIGHT - self._weigh(command_set[0][0])
            while self._pending and (room := room - self._weigh(self._pending[0][0])) >= 0:
                command_set.append(self._pending.popleft())
        return command_set

    def _answer_set(
        self,
        commit_thread: _CommitThread[Item, Answer],
        command_set: CommandSet[Item, Answer],
        answers: Answers[Answer],
        ran_s: float = 0.0,
    ) -> None:
        if self._pause_s and (pause_s := self._pause_s([item for item, _ in command_set], ran_s)):
            self._loop.call_later(pause_s, self._free_thread, commit_thread)
        else:
            self._free_thread(commit_thread)  # before the answers: the next set runs while these are written
        for (item, answer), result in zip(command_set, answers, strict=True):
            try:
                answer(result)
            except Exception:  # the other items of the set still need their answers
                logger.exception("answer failed item=%s", _describe(item))

    def _free_thread(self, commit_thread: _CommitThread[Item, Answer]) -> None:
        self._free.append(commit_thread)
        self._next()

    def _work(self, commit_thread: _CommitThread[Item, Answer]) -> None:
        while (task := commit_thread.work.get()) is not None:
            command_set, work = task
            began_at = time.monotonic()
            answers = self._answers([item for item, _ in command_set], work)
            sharing.give_back()
            commit_thread.begin = None if sharing.is_needed() else self._lend()
            ran_s = time.monotonic() - began_at
            self._loop.call_soon_threadsafe(self._answer_set, commit_thread, command_set, answers, ran_s)
        self._reset()

    def _answers(self, items: list[Item], work: Callable[[], Answers[Answer]]) -> Answers[Answer]:
        try:
            return self._without_details(work())
        except BrokerUnavailable as error:
            self._log_unavailable(len(items), error)
            self._reset()
            return [BrokerUnavailable("database unavailable")] * len(items)
        except Exception as error:  # one bad command must not fail the other commands of the set, nor end the thread
            self._reset()
            if len(items) > 1:
                parts = items[: len(items) // 2], items[len(items) // 2 :]
                return [answer for part in parts for answer in self._answers(part, partial(self._execute, part))]
            if isinstance(error, FaktoryError):
                return [error]
            logger.exception("command failed item=%s", _describe(items[0]))
            return [FaktoryError("internal error")]

    def _without_details(self, answers: Answers[Answer]) -> Answers[Answer]:
        """Log errors of single commands and replace their text: the driver's message must not reach clients."""
        unavailable = [answer for answer in answers if _is_unavailable(answer)]
        if not unavailable:
            return answers
        self._log_unavailable(len(unavailable), unavailable[0])
        return [BrokerUnavailable("database unavailable") if _is_unavailable(answer) else answer for answer in answers]

    def _log_unavailable(self, commands: int, error: object) -> None:
        self._failed += commands
        if (now := time.monotonic()) >= self._log_again_at:
            logger.warning("database unavailable commands=%d error=%s", self._failed, error)
            self._failed, self._log_again_at = 0, now + LOG_EVERY_S


_item_of = itemgetter(0)


def _is_unavailable(answer: object) -> bool:
    return isinstance(answer, BrokerUnavailable) and not isinstance(answer, LockTimeout)


def _unavailable() -> NoReturn:
    raise BrokerUnavailable("internal error")


def _describe(item: object) -> str:
    """Return the type and jid of an item for logs; never contents that a client sent."""
    return f"{type(item).__name__} {getattr(item, 'jid', '')}".rstrip()
