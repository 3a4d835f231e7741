"""Retry commands that met a lock of another transaction, so that they do not delay other commands (ADR 0028).

`LockWaits` tries such a command again, alone, in one of a few threads, until it succeeds or its time is over.
Commands with a common subject are tried one at a time, as they wait for the same lock. A command that arrives while
another one waits for its subject joins the queue without a first attempt.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import LockTimeout
from .group_commit import CommitQueue
from .may_block import WAITED_TOO_LONG, MayBlock

WIDTH = 4
"""Concurrent attempts. Each is a thread with a database connection, opened when a command first meets a lock."""

STOPS_WITHIN_S = 1.0
"""Seconds that commands still wait for locks after the server began to stop."""

Answer = Callable[[Any], object]


@dataclass(slots=True, eq=False)
class _WaitingCommand:
    command: MayBlock
    answer: Answer
    ends_at: float
    has_waited: bool = False


class LockWaits:
    """The commands of a node that wait for locks. Used on the event loop only.

    `first` executes sets of commands, `again` single ones that met a lock; both answer LockTimeout if they meet one.
    After `give_up_after_s` seconds a command is answered with LockTimeout, and nothing was changed.
    """

    def __init__(
        self,
        first: CommitQueue[MayBlock, Any],
        again: CommitQueue[MayBlock, Any],
        *,
        give_up_after_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._first, self._again, self._loop = first, again, loop
        self._give_up_after_s = give_up_after_s
        self._pending: list[_WaitingCommand] = []
        self._running: list[_WaitingCommand] = []
        self._subjects: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """Return the number of waiting commands."""
        return len(self._pending) + len(self._running)

    def submit(
        self, command: MayBlock, answer: Answer, *, commit_queue: CommitQueue[MayBlock, Any] | None = None
    ) -> None:
        """Execute a command, first in `commit_queue` (default: `first`); call `answer` on the event loop.

        A large set of jobs is always tried in its own commit queue, as listing its subjects takes long.
        """
        is_small = not isinstance(command.work, list) or commit_queue is None
        # A first attempt would meet the lock for which the other commands of the subject wait.
        if self._subjects and is_small and any(subject in self._subjects for subject in command.subjects):
            self._add(command, answer)
        else:
            (commit_queue or self._first).submit(command, partial(self._on_tried, command, answer))

    def stop(self) -> None:
        """Limit the wait of present and future commands to `STOPS_WITHIN_S`."""
        self._give_up_after_s = STOPS_WITHIN_S
        ends_at = self._loop.time() + STOPS_WITHIN_S
        for waiting in (*self._pending, *self._running):
            waiting.ends_at = min(waiting.ends_at, ends_at)
        self._check_overdue()

    async def wait_idle(self) -> None:
        """Wait until all waiting commands are answered."""
        await self._idle.wait()

    def _on_tried(self, command: MayBlock, answer: Answer, result: Any) -> None:
        if isinstance(result, LockTimeout):
            self._add(command, answer)
        else:
            answer(result)

    def _add(self, command: MayBlock, answer: Answer) -> None:
        self._idle.clear()
        self._pending.append(_WaitingCommand(command, answer, self._loop.time() + self._give_up_after_s))
        self._subjects.update(command.subjects)
        if self._timer is None:
            self._check_overdue()
        self._next()

    def _next(self) -> None:
        while len(self._running) < WIDTH and (waiting := self._choose_next()):
            self._pending.remove(waiting)
            self._running.append(waiting)
            self._again.submit(waiting.command, partial(self._on_retried, waiting))

    def _choose_next(self) -> _WaitingCommand | None:
        """Return the oldest command with no subject that is being tried, or None.

        Last attempts come first, then commands without an attempt here: their lock may be free already.
        """
        busy = {subject for waiting in self._running for subject in waiting.command.subjects}
        # A last attempt is due now: it does not wait for the end of another attempt for its subject.
        free = (
            waiting for waiting in self._pending if waiting.command.is_last or busy.isdisjoint(waiting.command.subjects)
        )
        return min(free, key=lambda waiting: (not waiting.command.is_last, waiting.has_waited), default=None)

    def _on_retried(self, waiting: _WaitingCommand, result: Any) -> None:
        self._running.remove(waiting)
        if not isinstance(result, LockTimeout) or waiting.command.is_last:
            self._end(waiting, result)
        else:
            waiting.has_waited = True
            self._pending.append(waiting)
            self._give_up_overdue()  # its time may have ended during the attempt
        self._next()

    def _check_overdue(self) -> None:
        """End overdue commands and schedule the next check."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._give_up_overdue()
        self._next()
        if self._pending or self._running:
            ends_at = min(waiting.ends_at for waiting in (*self._pending, *self._running))
            # Not at once: an overdue command may be in an attempt, and nothing changes before that attempt ends.
            self._timer = self._loop.call_at(max(ends_at, self._loop.time() + 0.1), self._check_overdue)

    def _give_up_overdue(self) -> None:
        now = self._loop.time()
        ended: list[_WaitingCommand] = []
        for waiting in self._pending:
            if waiting.ends_at <= now and not waiting.command.is_last:
                # Some jobs of a PUSHB may meet no lock: a last attempt stores these and rejects the others by jid.
                if waiting.command.has_several_jobs:
                    waiting.command.is_last = True
                else:
                    ended.append(waiting)
        for waiting in ended:
            self._pending.remove(waiting)
        # Last: an answered client may send its next command at once, which re-enters this method.
        for waiting in ended:
            self._end(waiting, WAITED_TOO_LONG)

    def _end(self, waiting: _WaitingCommand, result: Any) -> None:
        # `-=` also removes subjects with a count of zero, so `submit` finds only subjects in use.
        self._subjects -= Counter(waiting.command.subjects)
        if not self._pending and not self._running:
            self._idle.set()
        waiting.answer(WAITED_TOO_LONG if isinstance(result, LockTimeout) else result)
