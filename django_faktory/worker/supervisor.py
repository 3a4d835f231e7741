"""Keeps child processes alive, and ends them. Knows no database, no broker and no thread: it forks, waits, signals.

What a child does is its role's. Rules: interface "Commands" (signals, exit codes); W20 for who reports the lost.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from .runner import new_wid

logger = logging.getLogger(__name__)

CLEAN, CANNOT_START, CRASHED = 0, 3, 70
"""Exit codes of a child; the last is anything but the first two."""

LONGEST_PAUSE_S = 30
STEADY_S = 30.0
"""A child that lived so long has started well: the next pause is short again."""

PARENT_CHECK_S = 0.5
"""How often to look whether the parent is still there, where that is asked for."""

SAME_ORDER_S = 0.5
"""Signals closer together are one order: `timeout`, `uv run` or honcho pass on what a terminal has sent already."""

ONE_RING_S = 0.1
"""A signal rings twice, by its number and by its handler: closer together they are one."""

MAX_LOST = 20
FAREWELL_S = 2
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGCHLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a child is told: who it is, and which wids before it died holding jobs."""

    wid: str
    lost: tuple[str, ...]
    lifeline: int

    def obey(self, *, stop: Callable[[], None], quiet: Callable[[], None] | None = None) -> None:
        """Take signals from now on; call it before any thread is started. `stop` also comes when the parent dies."""
        acts = {signal.SIGTERM: stop, signal.SIGTSTP: quiet or _nothing, signal.SIGTTIN: _tell_stacks}
        heard, bell = _bell()
        for number in acts:
            signal.signal(number, partial(_ring, bell))  # an event loop may take the wakeup_fd away from us
        signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        threading.Thread(target=self._watch, args=(heard, acts), name="faktory-watch", daemon=True).start()

    def _watch(self, heard: int, acts: Mapping[int, Callable[[], None]]) -> None:
        """Carry out what signals say: here, since Python's handlers wait until the main thread has woken up, and may
        not log. A signal rings twice, or once where the main thread sleeps on."""
        latest: dict[int, float] = {}
        while True:
            ready, _, _ = select.select([self.lifeline, heard], [], [])
            if self.lifeline in ready:  # nobody ever writes there: the parent is gone, however it went
                logger.error("the parent process is gone: ending pid=%d", os.getpid())
                acts[signal.SIGTERM]()
                return
            for number in os.read(heard, 100):
                if number in acts and time.monotonic() - latest.get(number, -1.0) >= ONE_RING_S:
                    latest[number] = time.monotonic()
                    acts[number]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One child process. `main` returns its exit code; it calls `launch.obey` before it starts threads."""

    name: str
    main: Callable[[Launch], int]
    ends: bool = False
    """Whether a clean exit means that it is done, and not to be started again."""


@dataclass(slots=True)
class _Child:
    role: Role
    pid: int = 0
    wid: str = ""
    lost: list[str] = field(default_factory=list)
    started_at: float = 0.0
    start_at: float | None = 0.0
    """When to start it; None: it runs, or is done."""
    crashes: int = 0


class Supervisor:
    """Starts the roles and runs until they are done, or until it is told to stop.

    `grace_s` is what children get between TERM and KILL. `farewell` hears, in a process of its own, the wids of
    those that had to be killed while stopping. `parent` ends it when that process is no longer its parent.
    """

    def __init__(
        self,
        roles: Iterable[Role],
        *,
        grace_s: float,
        farewell: Callable[[list[str]], None] = lambda _: None,
        parent: int | None = None,
    ) -> None:
        self._children = [_Child(role) for role in roles]
        self._grace_s = grace_s
        self._farewell = farewell
        self._parent = parent
        self._is_stopping = False
        self._stopping_since = 0.0
        self._kill_at: float | None = None
        self._killed: list[str] = []
        self._code = CLEAN

    def run(self) -> int:
        """Supervise; returns the exit code for the whole."""
        self._lifeline = os.pipe()
        self._heard, bell = _bell()
        before = {number: signal.signal(number, _nothing) for number in SIGNALS}
        # Written to at once; a handler in Python would wait until the main thread has woken up.
        before_bell = signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
        try:
            while self._is_needed():
                self._start_due()
                self._take_signals()
                self._reap()
            if self._killed:
                self._say_farewell()
        finally:
            signal.set_wakeup_fd(before_bell)
            for number, handler in before.items():
                signal.signal(number, handler)
            for end in (*self._lifeline, self._heard, bell):
                os.close(end)
        return self._code

    def _is_needed(self) -> bool:
        """Whether a child runs or is to be started; when all that may end have ended, the rest is stopped."""
        if not self._is_stopping:
            passing = [child for child in self._children if child.role.ends]
            if passing and not any(child.pid or child.start_at is not None for child in passing):
                self._stop()
        return any(child.pid or (child.start_at is not None and not self._is_stopping) for child in self._children)

    # --- signals ---

    def _take_signals(self) -> None:
        """Wait for signals, or until something else is due, and obey."""
        ready, _, _ = select.select([self._heard], [], [], self._patience_s())
        for number in os.read(self._heard, 100) if ready else b"":
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop()
            elif number in (signal.SIGTSTP, signal.SIGTTIN):
                self._send(number)
        if self._parent is not None and not self._is_stopping and os.getppid() != self._parent:
            self._stop()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill()

    def _patience_s(self) -> float | None:
        """How long there is nothing to do unless a signal comes; None: for ever."""
        dues = [child.start_at for child in self._children if child.start_at is not None and not self._is_stopping]
        if self._kill_at is not None:
            dues.append(self._kill_at)
        if self._parent is not None and not self._is_stopping:
            dues.append(time.monotonic() + PARENT_CHECK_S)
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def _stop(self) -> None:
        """The first time gently, the second at once."""
        if self._is_stopping:
            if time.monotonic() >= self._stopping_since + SAME_ORDER_S:
                self._kill()
            return
        logger.info("stopping")
        self._is_stopping, self._stopping_since = True, time.monotonic()
        self._kill_at = time.monotonic() + self._grace_s
        self._send(signal.SIGTERM)

    def _kill(self) -> None:
        logger.warning("stopping at once: what runs is given back and runs again")
        self._killed = [child.wid for child in self._children if child.pid] or self._killed
        self._kill_at = None
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for child in self._children:
            if child.pid:
                os.kill(child.pid, number)  # ours and not yet reaped: the pid cannot be another's

    # --- children ---

    def _start_due(self) -> None:
        for child in self._children:
            if child.start_at is not None and child.start_at <= time.monotonic() and not self._is_stopping:
                self._start(child)

    def _start(self, child: _Child) -> None:
        child.wid, child.start_at, child.started_at = new_wid(), None, time.monotonic()
        launch = Launch(wid=child.wid, lost=tuple(child.lost), lifeline=self._lifeline[0])
        sys.stdout.flush()
        sys.stderr.flush()
        # Blocked until the child has its own handlers: a TERM in between must not get lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        child.pid = os.fork()
        if child.pid == 0:
            os.close(self._lifeline[1])
            _live(child.role, launch)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        logger.debug("child started role=%s pid=%d", child.role.name, child.pid)

    def _reap(self) -> None:
        for child in self._children:
            if child.pid:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, code: int) -> None:
        """A child is gone: start another, or not."""
        pid, child.pid = child.pid, 0
        if self._is_stopping:
            return
        if code == CANNOT_START:
            self._code = CANNOT_START
            self._stop()
            return
        if code == CLEAN and child.role.ends:
            return
        if time.monotonic() - child.started_at >= STEADY_S:
            child.crashes, child.lost = 0, []
        if code != CLEAN:
            child.lost = [*child.lost, child.wid][-MAX_LOST:]
        pause_s = min(2**child.crashes, LONGEST_PAUSE_S)
        child.crashes += 1
        child.start_at = time.monotonic() + pause_s
        logger.log(
            logging.INFO if code == CLEAN else logging.ERROR,
            "child ended, starting another role=%s pid=%d wid=%s exit=%s pause=%d s",
            *(child.role.name, pid, child.wid, code if code >= 0 else signal.Signals(-code).name, pause_s),
        )

    def _say_farewell(self) -> None:
        """In a process of its own, with an alarm: the database may be what the children hung on."""
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(FAREWELL_S)
                self._farewell(self._killed)
            finally:
                os._exit(CLEAN)
        os.waitpid(pid, 0)


def _bell() -> tuple[int, int]:
    """The two ends of a pipe for signals."""
    heard, bell = os.pipe()
    os.set_blocking(bell, False)
    return heard, bell


def _ring(bell: int, number: int, _: object) -> None:
    with suppress(BlockingIOError):
        os.write(bell, bytes([number]))


def _nothing(*_: object) -> None:
    """A signal that is heard elsewhere, or means nothing."""


def _tell_stacks() -> None:
    logger.warning("stacks of all threads pid=%d\n%s", os.getpid(), stacks())


def stacks() -> str:
    """Where every thread of this process is."""
    frames = sys._current_frames()  # noqa: SLF001  (documented, and the only way)
    told = (
        f"Thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.ident in frames
    )
    return "".join(told).rstrip()


def _live(role: Role, launch: Launch) -> NoReturn:
    """A child's whole life. It leaves by _exit: threads stuck in user code keep nobody waiting."""
    code = CRASHED
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the parent says TERM
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = role.main(launch)
    except BaseException:
        logger.exception("child broke role=%s pid=%d", role.name, os.getpid())
    finally:
        with suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
