"""Retry commands that met a lock of another transaction, so that they do not delay other commands (ADR 0024).

`LockWaits` tries such a command again, alone, in one of a few threads, until it succeeds or its time is over.
Commands with a common subject are tried one at a time, as they wait for the same lock. A command that arrives while
another one waits for its subject joins the queue without a first attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any
from weakref import WeakValueDictionary

from ..errors import LockTimeout
from .group_commit import CommitQueue
from .may_block import WAITED_TOO_LONG, MayBlock

WIDTH = 4
"""Concurrent attempts. Each is a thread with a database connection, opened when a command first meets a lock."""

STOPS_WITHIN_S = 1.0
"""Seconds that commands still wait for locks after the server began to stop."""

Answer = Callable[[Any], object]


class LockWaits:
    """The commands of a node that wait for locks. Used on the event loop only.

    The commit queues answer LockTimeout to a command that met a lock; "lock-wait" executes it again, alone. After
    `give_up_after_s` seconds a command is answered with LockTimeout, and nothing was changed.
    """

    def __init__(
        self,
        commit_queues: Mapping[str, CommitQueue[MayBlock, Any]],
        *,
        give_up_after_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._commit_queues, self._loop = commit_queues, loop
        self._give_up_after_s, self._stops_at = give_up_after_s, inf
        self._waiting: set[asyncio.Task[Any]] = set()
        self._slots = asyncio.Semaphore(WIDTH)
        self._subjects: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held during an attempt for the subject. Each waiting command keeps those of its subjects alive."""

    def __len__(self) -> int:
        """Return the number of waiting commands."""
        return len(self._waiting)

    def submit(self, command: MayBlock, answer: Answer, *, queue: str = "may-block") -> None:
        """Execute a command, first in this commit queue; call `answer` on the event loop.

        A large set of jobs is always tried there, as listing its subjects takes long.
        """
        # A first attempt would meet the lock for which the other commands of the subject wait.
        if self._subjects and queue != "bulk" and any(subject in self._subjects for subject in command.subjects):
            self._add(command, answer)
        else:
            self._commit_queues[queue].submit(command, partial(self._on_tried, command, answer))

    def stop(self) -> None:
        """Limit the wait of present and future commands to `STOPS_WITHIN_S`, and the attempt that is running."""
        self._stops_at = self._loop.time() + STOPS_WITHIN_S

    async def wait_idle(self) -> None:
        """Wait until all waiting commands are answered."""
        while self._waiting:
            await asyncio.wait(self._waiting)

    def _on_tried(self, command: MayBlock, answer: Answer, result: Any) -> None:
        if isinstance(result, LockTimeout):
            self._add(command, answer)
        else:
            answer(result)

    def _add(self, command: MayBlock, answer: Answer) -> None:
        # In one order, so that no two commands wait for each other.
        locks = [self._subjects.setdefault(subject, asyncio.Lock()) for subject in sorted(command.subjects)]
        ends_at = self._loop.time() + self._give_up_after_s
        task = self._loop.create_task(self._retry(command, [*locks, self._slots], ends_at))
        self._waiting.add(task)
        task.add_done_callback(partial(self._on_done, answer))

    def _on_done(self, answer: Answer, task: asyncio.Task[Any]) -> None:
        self._waiting.discard(task)
        answer(WAITED_TOO_LONG if isinstance(task.result(), LockTimeout) else task.result())

    async def _retry(self, command: MayBlock, turn: Sequence[asyncio.Lock | asyncio.Semaphore], ends_at: float) -> Any:
        while True:
            held: list[asyncio.Lock | asyncio.Semaphore] = []
            try:
                async with asyncio.timeout_at(ends_at):
                    for lock in turn:
                        await lock.acquire()
                        held.append(lock)
                if self._loop.time() >= min(ends_at, self._stops_at):
                    break
                result = await self._attempt(command)
            except TimeoutError:
                break
            finally:
                for lock in held:
                    lock.release()
            if not isinstance(result, LockTimeout):
                return result
        # Some jobs of a PUSHB may meet no lock: a last attempt stores these and rejects the others by jid.
        command.is_last = command.has_several_jobs
        return await self._attempt(command) if command.is_last else WAITED_TOO_LONG

    def _attempt(self, command: MayBlock) -> asyncio.Future[Any]:
        done = self._loop.create_future()
        self._commit_queues["lock-wait"].submit(command, done.set_result)
        return done
