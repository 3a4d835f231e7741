"""Where commands wait for locks of other transactions, so that no other command of the node waits with them.

A command that met a lock is tried again, alone, by one of a few threads, until it succeeds or its time is over.
Commands with a common subject are tried one at a time, as they wait for the same lock. One that comes while others of
its subject wait joins them at once (ADR 0028).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import LockTimeout
from .committer import Lane
from .may_block import WAITED_TOO_LONG, MayBlock

WIDTH = 4
"""Attempts at once; each is a thread with a database connection, which is opened when a command meets a lock."""

STOPS_WITHIN_S = 1.0
"""How long commands still wait when the server stops."""

Answer = Callable[[Any], object]


@dataclass(slots=True, eq=False)
class _Waiting:
    command: MayBlock
    answer: Answer
    ends_at: float
    has_waited: bool = False


class LockWaits:
    """The waiting commands of a node. Used on the event loop only.

    `first` takes sets of commands, `again` single ones that met a lock; both answer LockTimeout where they met one.
    """

    def __init__(
        self,
        first: Lane[MayBlock, Any],
        again: Lane[MayBlock, Any],
        *,
        give_up_after_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._first, self._again, self._loop = first, again, loop
        self._give_up_after_s = give_up_after_s
        self._pending: list[_Waiting] = []
        self._running: list[_Waiting] = []
        self._subjects: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """How many commands wait."""
        return len(self._pending) + len(self._running)

    def submit(self, command: MayBlock, answer: Answer, *, lane: Lane[MayBlock, Any] | None = None) -> None:
        """Carry out a command, by `lane` first; call `answer` on the event loop.

        A large set of jobs is always tried in its lane: to list its subjects takes long.
        """
        is_small = not isinstance(command.work, list) or lane is None
        if self._subjects and is_small and any(subject in self._subjects for subject in command.subjects):
            self._add(command, answer)
        else:
            (lane or self._first).submit(command, partial(self._tried, command, answer))

    def stop(self) -> None:
        """From now on a command waits for a moment only."""
        self._give_up_after_s = STOPS_WITHIN_S
        ends_at = self._loop.time() + STOPS_WITHIN_S
        for waiting in (*self._pending, *self._running):
            waiting.ends_at = min(waiting.ends_at, ends_at)
        self._look()

    async def drained(self) -> None:
        """Wait until every command that waits is answered."""
        await self._idle.wait()

    def _tried(self, command: MayBlock, answer: Answer, result: Any) -> None:
        if isinstance(result, LockTimeout):
            self._add(command, answer)
        else:
            answer(result)

    def _add(self, command: MayBlock, answer: Answer) -> None:
        self._idle.clear()
        self._pending.append(_Waiting(command, answer, self._loop.time() + self._give_up_after_s))
        self._subjects.update(command.subjects)
        if self._timer is None:
            self._look()
        self._next()

    def _next(self) -> None:
        while len(self._running) < WIDTH and (waiting := self._chosen()):
            self._pending.remove(waiting)
            self._running.append(waiting)
            self._again.submit(waiting.command, partial(self._tried_again, waiting))

    def _chosen(self) -> _Waiting | None:
        """The oldest command of which no subject is being tried: last attempts first, then those without an attempt."""
        busy = {subject for waiting in self._running for subject in waiting.command.subjects}
        free = (one for one in self._pending if one.command.is_last or busy.isdisjoint(one.command.subjects))
        return min(free, key=lambda one: (not one.command.is_last, one.has_waited), default=None)

    def _tried_again(self, waiting: _Waiting, result: Any) -> None:
        self._running.remove(waiting)
        if not isinstance(result, LockTimeout) or waiting.command.is_last:
            self._end(waiting, result)
        else:
            waiting.has_waited = True
            self._pending.append(waiting)
            self._give_up_overdue()
        self._next()

    def _look(self) -> None:
        """Give up what is overdue, and look again when the next command is."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._give_up_overdue()
        self._next()
        if self._pending or self._running:
            ends_at = min(waiting.ends_at for waiting in (*self._pending, *self._running))
            self._timer = self._loop.call_at(max(ends_at, self._loop.time() + 0.1), self._look)

    def _give_up_overdue(self) -> None:
        now = self._loop.time()
        for waiting in [one for one in self._pending if one.ends_at <= now and not one.command.is_last]:
            if waiting.command.has_several_jobs:
                waiting.command.is_last = True
            else:
                self._pending.remove(waiting)
                self._end(waiting, WAITED_TOO_LONG)

    def _end(self, waiting: _Waiting, result: Any) -> None:
        self._subjects -= Counter(waiting.command.subjects)
        if not self._pending and not self._running:
            self._idle.set()
        waiting.answer(WAITED_TOO_LONG if isinstance(result, LockTimeout) else result)
