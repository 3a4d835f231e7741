"""Keep child processes alive, replace unresponsive ones, and end them (`Supervisor`).

Uses no database, no broker and no thread: it forks children, reads their heartbeats, and sends signals. Rules:
docs/reference/signals.md; W20 for the report of lost workers. A fork is fast and shares the memory of the loaded
project (ADR 0038).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from ...core.logs import get_logger
from ...worker.process import CANNOT_START, CLEAN, RECYCLE, new_wid
from .child import Role, run_child
from .contract import (
    BEAT_BYTES,
    SIGNALS,
    SILENT_BEATS,
    STOPS,
    UNRESPONSIVE_BEATS,
    ChildSpec,
    make_wakeup_pipe,
    stop_signals,
)

logger = get_logger(__name__)

LONGEST_PAUSE_S = 30
"""Cap of the pause before a child is restarted; it doubles with each crash in a row."""

STEADY_S = 30.0
"""A child that lived this long has started well: its next pause is short again."""

PARENT_CHECK_S = 0.5
"""Interval of the check whether the parent still exists, if it is requested."""

SAME_ORDER_S = 0.5
"""Signals closer together count as one: `timeout`, `uv run` or honcho forward a signal that the terminal has already
sent.
"""

SILENT_STOP = 0.9
"""After this part of `grace_s`, a stopping supervisor kills children that have missed `STOP_BEATS` heartbeats: they
would not stop, and the work after a kill takes time too.
"""

STOP_BEATS = 3
"""Heartbeats missed in a row after which a stop does not wait for a child."""

MAX_LOST = 20
"""Maximum number of predecessors that a child reports as lost."""

LOST_REPORT_S = 2
"""Seconds that the report of killed children may take."""

INIT_PID = 1
"""Pid 1, which inherits every orphaned process; in a container it is this command."""


class Child:
    """State of one child, running or waiting for its start."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.pid, self.wid = 0, ""
        self.lost: list[str] = []
        self.started_at = 0.0
        self.start_at: float | None = 0.0
        """When to start it, by the monotonic clock; None if it runs or is done."""
        self.crashes = 0
        self.unresponsive: dict[str, int] = {}
        """The `lost` wids that were killed because they stopped responding, with their seconds of silence."""
        self.has_beaten = self.is_suspended = False
        """Before its first heartbeat a child is not watched: its start may take long."""
        self.missed = 0
        """Number of heartbeats missed in a row."""
        self.beat_at = 0.0

    def may_be_silent(self) -> bool:
        """Return whether silence is normal: it does not run, has just begun, or a signal has suspended it."""
        return not self.pid or not self.has_beaten or self.is_suspended


class Pipes:
    """The pipes between a supervisor and its children, each as (read end, write end).

    `parent_pipe` closes when the supervisor ends. `signals` receives the numbers of its signals. `beats` carries the
    children's heartbeats. `unresponsive` is readable while a child does not respond; any child may check it.
    """

    def __init__(self) -> None:
        self.parent_pipe, self.signals = os.pipe(), make_wakeup_pipe()
        self.beats, self.unresponsive = os.pipe(), os.pipe()
        for descriptor in (*self.beats, *self.unresponsive):
            os.set_blocking(descriptor, False)

    def close(self) -> None:
        """Close both ends of all pipes."""
        for descriptor in (*self.parent_pipe, *self.signals, *self.beats, *self.unresponsive):
            os.close(descriptor)


class Supervisor:
    """Start a child for each role, and run until they are done, or until a signal stops it.

    `unregister` is called with the wids of children that were killed while stopping, in a process of its own.
    `grace_s` is the time between TERM and KILL. `silence_s`: a child without heartbeats for this long is killed and
    replaced; None means that children are not watched. With `parent`, stop when that process is no longer its parent.
    """

    def __init__(
        self,
        roles: Iterable[Role],
        unregister: Callable[[Sequence[str]], None],
        *,
        grace_s: float,
        silence_s: float | None = None,
        parent: int | None = None,
    ) -> None:
        self._children = [Child(role) for role in roles]
        self._unregister = unregister
        self._grace_s = grace_s
        # Counts checks, not seconds: while the supervisor itself does not run, or the machine sleeps, no check is
        # made, and a pause of any length is one missed heartbeat (ADR 0038).
        self._check_every_s = None if silence_s is None else silence_s / (SILENT_BEATS + 1)
        self._check_at = time.monotonic() + (self._check_every_s or 0.0)
        self._has_unresponsive = False
        self._parent = parent
        self._pipes = Pipes()
        self._is_stopping = False
        self._stopping_since = 0.0
        self._kill_at: float | None = None
        self._kill_silent_at: float | None = None
        self._killed: list[str] = []
        self._exit_code = CLEAN

    def run(self) -> int:
        """Supervise until the end and return the exit code. Call it once."""
        wakeup_reader, wakeup_writer = self._pipes.signals
        handled_signals = (*stop_signals(), signal.SIGTSTP, signal.SIGTTIN, signal.SIGCHLD)
        previous_handlers = {number: signal.signal(number, _ignore_signal) for number in handled_signals}
        # C code writes to it at once; a Python handler would run only after `select` has returned.
        previous_wakeup_fd = signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            while self._is_needed():
                self._start_due()
                self._handle_signals(wakeup_reader)
                self._reap()
                self._check_beats()
            self._report_killed()
        finally:
            signal.set_wakeup_fd(previous_wakeup_fd)
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
            self._pipes.close()
        return self._exit_code

    def _is_needed(self) -> bool:
        """Return whether a child runs or waits for its start.

        When all children that may end have ended, the remaining ones are stopped.
        """
        if not self._is_stopping:
            ending_children = [child for child in self._children if child.role.ends]
            if ending_children and not any(child.pid or child.start_at is not None for child in ending_children):
                self._stop()
        return any(child.pid or (child.start_at is not None and not self._is_stopping) for child in self._children)

    # --- signals ---

    def _handle_signals(self, wakeup_reader: int) -> None:
        """Wait for signals, or until an action is due, and act on them."""
        ready, _, _ = select.select([wakeup_reader], [], [], self._wait_s())
        for number in os.read(wakeup_reader, 100) if ready else b"":
            if number in STOPS:
                self._stop()
            elif number in (signal.SIGTSTP, signal.SIGTTIN):
                self._send_signal(number)
        # When a parent ends, the kernel gives its children another parent.
        if self._parent is not None and not self._is_stopping and os.getppid() != self._parent:
            self._stop()
        if self._kill_silent_at is not None and time.monotonic() >= self._kill_silent_at:
            self._kill_silent_at = None
            self._kill_silent(STOP_BEATS)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill()

    def _wait_s(self) -> float | None:
        """Return the seconds until the next action is due; None to wait for a signal only."""
        now = time.monotonic()
        due_times = [due for due in (self._kill_at, self._kill_silent_at) if due is not None]
        if self._check_every_s is not None:
            due_times.append(self._check_at)
        if not self._is_stopping:
            due_times += [child.start_at for child in self._children if child.start_at is not None]
        if self._parent is not None and not self._is_stopping:
            due_times.append(now + PARENT_CHECK_S)
        return max(0.0, min(due_times) - now) if due_times else None

    def _stop(self) -> None:
        """Send TERM to the children at the first call, KILL at the second."""
        now = time.monotonic()
        if self._is_stopping:
            if now >= self._stopping_since + SAME_ORDER_S:
                self._kill()
            return
        logger.info("stopping")
        self._is_stopping, self._stopping_since = True, now
        self._kill_at, self._kill_silent_at = now + self._grace_s, now + SILENT_STOP * self._grace_s
        self._send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._killed += [child.wid for child in self._children if child.pid and child.wid not in self._killed]
        self._kill_at = self._kill_silent_at = None
        self._send_signal(signal.SIGKILL)
        logger.warning("stopping at once: running jobs are released and run again")

    def _send_signal(self, number: int) -> None:
        for child in self._children:
            if child.pid:
                os.kill(child.pid, number)  # not reaped yet, so the pid cannot belong to another process

    # --- heartbeats ---

    def _check_beats(self) -> None:
        """Read the heartbeats when a check is due, and kill the children that have missed too many."""
        if self._check_every_s is None or time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + self._check_every_s
        wids = _read_beats(self._pipes.beats[0])
        for child in self._children:
            if child.wid in wids:
                child.has_beaten, child.missed, child.beat_at = True, 0, time.monotonic()
            elif child.may_be_silent():
                child.missed, child.beat_at = 0, time.monotonic()
            else:
                child.missed += 1
        self._kill_silent(SILENT_BEATS)
        self._update_unresponsive_pipe()

    def _kill_silent(self, beats: int) -> None:
        """Kill each child that has missed this many heartbeats in a row, once."""
        for child in self._children:
            if child.pid and child.missed >= beats and child.wid not in child.unresponsive:
                self._kill_child(child)

    def _kill_child(self, child: Child) -> None:
        if self._is_stopping:
            self._killed.append(child.wid)
        silent_s = round(time.monotonic() - child.beat_at)
        child.unresponsive[child.wid] = silent_s
        os.kill(child.pid, signal.SIGKILL)  # no other signal reaches a thread that does not release the GIL
        logger.error(
            "process does not respond, killed it role=%s pid=%d wid=%s silent=%d s; its jobs are released",
            *(child.role.name, child.pid, child.wid, silent_s),
        )

    def _update_unresponsive_pipe(self) -> None:
        """Make the pipe readable while a child does not respond, so that probes report it."""
        has_unresponsive = any(child.missed >= UNRESPONSIVE_BEATS for child in self._children)
        if has_unresponsive and not self._has_unresponsive:
            os.write(self._pipes.unresponsive[1], b"!")
        elif self._has_unresponsive and not has_unresponsive:
            os.read(self._pipes.unresponsive[0], 1)
        self._has_unresponsive = has_unresponsive

    # --- children ---

    def _start_due(self) -> None:
        for child in self._children:
            if child.start_at is not None and not self._is_stopping and child.start_at <= time.monotonic():
                self._start(child)

    def _start(self, child: Child) -> None:
        child.wid, child.start_at, child.started_at = new_wid(), None, time.monotonic()
        child.has_beaten, child.is_suspended, child.missed = False, False, 0
        is_watched = self._check_every_s is not None
        child_spec = ChildSpec(
            wid=child.wid,
            lost=tuple(child.lost),
            unresponsive=child.unresponsive,
            parent_pipe=self._pipes.parent_pipe[0],
            beats=self._pipes.beats[1] if is_watched else -1,
            beat_every_s=self._check_every_s or 0.0,
            unresponsive_pipe=self._pipes.unresponsive[0] if is_watched else -1,
        )
        # Blocked until the child has its own handlers: a TERM in between must not be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        child.pid = _fork()
        if child.pid == 0:
            os.close(self._pipes.parent_pipe[1])  # it would keep the pipe open after the parent's end
            run_child(child.role, child_spec)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        logger.debug("child started role=%s pid=%d", child.role.name, child.pid)

    def _reap(self) -> None:
        for child in self._children:
            while child.pid:
                # Suspensions are reported too: a suspended child is not unresponsive (ADR 0038).
                pid, status = os.waitpid(child.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if not pid:
                    break
                if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                    child.is_suspended, child.missed = os.WIFSTOPPED(status), 0
                else:
                    self._schedule_replacement(child, os.waitstatus_to_exitcode(status))
        # Not while stopping: when process 1 ends, the kernel ends every other process.
        if os.getpid() == INIT_PID and not self._is_stopping:
            _reap_orphans({child.pid for child in self._children})

    def _schedule_replacement(self, child: Child, code: int) -> None:
        """Schedule the replacement of a child that has ended, if it needs one."""
        pid, child.pid = child.pid, 0
        if self._is_stopping:
            return
        # A restart would fail the same way, such as on a wrong password.
        if code == CANNOT_START:
            self._exit_code = CANNOT_START
            self._stop()
            return
        if code == CLEAN and child.role.ends:
            return
        if code == RECYCLE:  # the worker has logged the reason
            child.crashes, child.lost, child.unresponsive, child.start_at = 0, [], {}, time.monotonic()
            logger.debug("child is recycled role=%s pid=%d", child.role.name, pid)
            return
        if time.monotonic() - child.started_at >= STEADY_S:
            child.crashes, child.lost = 0, []
            child.unresponsive = {wid: silent for wid, silent in child.unresponsive.items() if wid == child.wid}
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

    def _report_killed(self) -> None:
        """Report the killed children from a forked process, which an alarm ends after `LOST_REPORT_S`.

        A process of its own, because the children may have been stuck on a database that does not answer.
        """
        if not self._killed:
            return
        pid = _fork()
        if pid == 0:
            try:
                # The default action ends the process wherever it waits.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(LOST_REPORT_S)
                self._unregister(self._killed)
            finally:
                # An ordinary exit would run the cleanup of the parent, such as `atexit`, a second time.
                os._exit(CLEAN)
        os.waitpid(pid, 0)


def _fork() -> int:
    """Fork this process, without buffered output: parent and child would both write it."""
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork()


def _ignore_signal(*_: object) -> None:
    """Do nothing: the wakeup fd reports the signal."""


def _read_beats(beats: int) -> set[str]:
    """Return the wids of the children that have sent a heartbeat since the last call."""
    wids: set[str] = set()
    with suppress(BlockingIOError):
        while data := os.read(beats, 1024 * BEAT_BYTES):
            starts = range(0, len(data), BEAT_BYTES)
            wids.update(data[start : start + BEAT_BYTES].decode() for start in starts)
    return wids


def _reap_orphans(child_pids: Collection[int]) -> None:
    """Reap ended processes that tasks have left behind; otherwise each would keep its pid."""
    with suppress(ChildProcessError):  # this process has no child
        # WNOWAIT: an ended child of the supervisor is left to `_reap`, which needs its status.
        while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and info.si_pid not in child_pids:
            os.waitpid(info.si_pid, os.WNOHANG)
