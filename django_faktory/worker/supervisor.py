"""Keeps child processes alive, and ends them. Knows no database, no broker and no thread: it starts, waits, signals.

How a child is started is its `Ways`', what it does its role's. Little of the standard library only: it may run
without Django (ADR 0012). Rules: interface "Commands" (signals, exit codes); W20 for who reports the lost.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

from .terms import CANNOT_START, CLEAN, DEBUG, ERROR, INFO, SIGNALS, SPENT, WARNING, Launch, make_bell, new_wid

TYPE_CHECKING = False  # `typing` itself would be a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from typing import Any, Protocol
else:
    Protocol = object

LONGEST_PAUSE_S = 30
STEADY_S = 30.0
"""A child that lived so long has started well: the next pause is short again."""

PARENT_CHECK_S = 0.5
"""How often to look whether the parent is still there, where that is asked for."""

SAME_ORDER_S = 0.5
"""Signals closer together are one order: `timeout`, `uv run` or honcho pass on what a terminal has sent already."""

SLOW_STOP_S = 2.0
"""Who has not stopped after that may have to be killed: the farewell is prepared."""

MAX_LOST = 20
FIRST = 1
"""The process that inherits all whose parent has ended: in a container, the command itself."""


class Ways(Protocol):
    """How a supervisor does what depends on what its process has loaded."""

    head_start_s: float
    """How long before its turn a child is started: what it needs to load itself."""

    def start(self, name: str, launch: Launch, lifeline_end: int) -> int:
        """Start the child `name`; its pid. Signals are blocked; it may not keep `lifeline_end` open."""

    def tell(self, level: int, message: str, *args: object) -> None:
        """Log this, as the project has it."""

    def patience_s(self) -> float | None:
        """How long nothing is to be done about what was told; None: for ever. Does what is due."""

    def prepare_farewell(self) -> None:
        """Somebody may have to be killed soon."""

    def finish(self, killed: Sequence[str]) -> None:
        """All children have ended; these wids were killed while stopping, and hold jobs."""


class Child:
    """One child, running or to be started. `ends`: a clean exit means that it is done."""

    def __init__(self, name: str, *, ends: bool = False) -> None:
        self.name, self.ends = name, ends
        self.pid, self.wid = 0, ""
        self.lost: list[str] = []
        self.started_at = 0.0
        self.start_at: float | None = 0.0
        """When its turn begins; None: it runs, or is done."""
        self.crashes = 0

    @classmethod
    def again(cls, told: dict[str, Any]) -> Child:
        """The child of which `vars` has told."""
        child = cls(told["name"])
        vars(child).update(told)
        return child


class Cords:
    """The pipes between a supervisor and its children, and from signals to it; each is (what is read, what is written).

    `lifeline` ends with the supervisor. `news` are records for a child to log.
    """

    def __init__(self, *, lifeline: tuple[int, int], signals: tuple[int, int], news: tuple[int, int]) -> None:
        self.lifeline, self.signals, self.news = lifeline, signals, news

    @classmethod
    def make(cls) -> Cords:
        """New ones."""
        news = os.pipe()
        for end in news:
            os.set_blocking(end, False)
        return cls(lifeline=os.pipe(), signals=make_bell(), news=news)

    def ends(self) -> tuple[int, ...]:
        """All file descriptors."""
        return (*self.lifeline, *self.signals, *self.news)


class Supervisor:
    """Starts the children and runs until they are done, or until it is told to stop.

    `grace_s` is what children get between TERM and KILL. `parent` ends it when that process is no longer its parent.
    """

    def __init__(
        self,
        children: Iterable[Child],
        ways: Ways,
        *,
        grace_s: float,
        parent: int | None = None,
        cords: Cords | None = None,
    ) -> None:
        self._children = list(children)
        self._ways = ways
        self._grace_s = grace_s
        self._parent = parent
        self._cords = cords
        self._is_stopping = False
        self._stopping_since = 0.0
        self._kill_at: float | None = None
        self._prepare_at: float | None = None
        self._killed: list[str] = []
        self._code = CLEAN

    def run(self, *, then: Callable[[Sequence[Child], Cords], None] | None = None) -> int:
        """Supervise; returns the exit code for the whole. `then` comes once the children have been started."""
        self._cords = self._cords or Cords.make()
        heard, bell = self._cords.signals
        before = {number: signal.signal(number, _nothing) for number in SIGNALS}
        # Written to at once; a handler in Python would wait until the main thread has woken up.
        before_bell = signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            while self._is_needed():
                self._start_due(self._cords)
                if then:
                    then(self._children, self._cords)
                    then = None
                self._take_signals(heard)
                self._reap()
            self._ways.finish(self._killed)
        finally:
            signal.set_wakeup_fd(before_bell)
            for number, handler in before.items():
                signal.signal(number, handler)
            for end in self._cords.ends():
                os.close(end)
        return self._code

    def _is_needed(self) -> bool:
        """Whether a child runs or is to be started; when all that may end have ended, the rest is stopped."""
        if not self._is_stopping:
            passing = [child for child in self._children if child.ends]
            if passing and not any(child.pid or child.start_at is not None for child in passing):
                self._stop()
        return any(child.pid or (child.start_at is not None and not self._is_stopping) for child in self._children)

    # --- signals ---

    def _take_signals(self, heard: int) -> None:
        """Wait for signals, or until something else is due, and obey."""
        ready, _, _ = select.select([heard], [], [], self._patience_s())
        for number in os.read(heard, 100) if ready else b"":
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop()
            elif number in (signal.SIGTSTP, signal.SIGTTIN):
                self._send(number)
        if self._parent is not None and not self._is_stopping and os.getppid() != self._parent:
            self._stop()
        if self._prepare_at is not None and time.monotonic() >= self._prepare_at:
            self._prepare_at = None
            self._ways.prepare_farewell()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill()

    def _patience_s(self) -> float | None:
        """How long there is nothing to do unless a signal comes; None: for ever."""
        now = time.monotonic()
        dues = [due for due in (self._kill_at, self._prepare_at) if due is not None]
        if not self._is_stopping:
            dues += [child.start_at - self._ways.head_start_s for child in self._children if child.start_at is not None]
        if self._parent is not None and not self._is_stopping:
            dues.append(now + PARENT_CHECK_S)
        if (patience_s := self._ways.patience_s()) is not None:
            dues.append(now + patience_s)
        return max(0.0, min(dues) - now) if dues else None

    def _stop(self) -> None:
        """The first time gently, the second at once."""
        now = time.monotonic()
        if self._is_stopping:
            if now >= self._stopping_since + SAME_ORDER_S:
                self._kill()
            return
        self._ways.tell(INFO, "stopping")
        self._is_stopping, self._stopping_since = True, now
        self._kill_at, self._prepare_at = now + self._grace_s, now + SLOW_STOP_S
        self._send(signal.SIGTERM)

    def _kill(self) -> None:
        self._killed = [child.wid for child in self._children if child.pid] or self._killed
        self._kill_at = self._prepare_at = None
        self._send(signal.SIGKILL)
        # Only now: who is to log it must not be killed with it in hand.
        self._ways.tell(WARNING, "stopping at once: what runs is given back and runs again")

    def _send(self, number: int) -> None:
        for child in self._children:
            if child.pid:
                os.kill(child.pid, number)  # ours and not yet reaped: the pid cannot be another's

    # --- children ---

    def _start_due(self, cords: Cords) -> None:
        for child in self._children:
            turn = child.start_at
            if turn is not None and not self._is_stopping and turn - self._ways.head_start_s <= time.monotonic():
                self._start(child, turn, cords)

    def _start(self, child: Child, turn: float, cords: Cords) -> None:
        child.wid, child.start_at = new_wid(), None
        child.started_at = max(turn, time.monotonic())
        launch = Launch(
            wid=child.wid, lost=tuple(child.lost), lifeline=cords.lifeline[0], news=cords.news[0], not_before=turn
        )
        # Blocked until the child has its own handlers: a TERM in between must not get lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        child.pid = self._ways.start(child.name, launch, cords.lifeline[1])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._ways.tell(DEBUG, "child started role=%s pid=%d", child.name, child.pid)

    def _reap(self) -> None:
        for child in self._children:
            if child.pid:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    self._ended(child, os.waitstatus_to_exitcode(status))
        if os.getpid() == FIRST and not self._is_stopping:  # when it ends the system clears up
            _bury_others({child.pid for child in self._children})

    def _ended(self, child: Child, code: int) -> None:
        """A child is gone: start another, or not."""
        pid, child.pid = child.pid, 0
        if self._is_stopping:
            return
        if code == CANNOT_START:
            self._code = CANNOT_START
            self._stop()
            return
        if code == CLEAN and child.ends:
            return
        if code == SPENT:  # its own line says why
            child.crashes, child.lost, child.start_at = 0, [], time.monotonic()
            self._ways.tell(DEBUG, "child has done its share role=%s pid=%d", child.name, pid)
            return
        if time.monotonic() - child.started_at >= STEADY_S:
            child.crashes, child.lost = 0, []
        if code != CLEAN:
            child.lost = [*child.lost, child.wid][-MAX_LOST:]
        pause_s = min(2**child.crashes, LONGEST_PAUSE_S)
        child.crashes += 1
        child.start_at = time.monotonic() + pause_s
        self._ways.tell(
            INFO if code == CLEAN else ERROR,
            "child ended, starting another role=%s pid=%d wid=%s exit=%s pause=%d s",
            *(child.name, pid, child.wid, code if code >= 0 else signal.Signals(-code).name, pause_s),
        )


def _nothing(*_: object) -> None:
    """A signal that is heard elsewhere."""


def _bury_others(ours: Collection[int]) -> None:
    """What tasks started and left behind, and has ended: it would keep its process number for ever."""
    with suppress(ChildProcessError):  # there is no child at all
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid not in ours:
            os.waitpid(found.si_pid, os.WNOHANG)
