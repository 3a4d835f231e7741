"""Run a child process of the supervisor: its signals, its heartbeats and its exit (`install_signals`, `run_child`).

Uses no database and no broker.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple, NoReturn

from ...core.logs import Lines, get_logger
from ...worker.process import CRASHED
from .contract import BEAT_BYTES, SIGNALS, ChildSpec, make_wakeup_pipe, stop_signals

logger = get_logger(__name__)

SAME_SIGNAL_S = 0.1
"""A signal is reported twice, by the wakeup fd and by its handler: two reports within this time count as one."""


class Role(NamedTuple):
    """The work of one child process.

    `main` returns the exit code of the child. It calls `install_signals` before it starts threads.
    """

    name: str
    main: Callable[[ChildSpec], int]
    ends: bool = False
    """True if a clean exit means that the work is done, so that the child is not restarted."""


def install_signals(
    child_spec: ChildSpec,
    *,
    stop: Callable[[], None],
    quiet: Callable[[], None] | None = None,
    responds: Callable[[], object] | None = None,
) -> None:
    """Install signal handlers and start heartbeats. Call it before any thread is started.

    `stop` is also called when the parent dies. `responds` blocks while this process does not do its work; each
    heartbeat waits for it. Without it, a heartbeat proves only that Python's threads run.
    """
    handlers: dict[int, Callable[[], None]] = {number: stop for number in stop_signals() if number != signal.SIGINT}
    handlers |= {signal.SIGTSTP: quiet or _ignore_signal, signal.SIGTTIN: _log_stacks}
    wakeup_reader, wakeup_writer = make_wakeup_pipe()
    for number in handlers:
        signal.signal(number, partial(_write_wakeup, wakeup_writer))  # an event loop may replace the wakeup fd
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    # The parent has blocked these signals until this process has its own handlers.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(
        target=_watch, args=(child_spec, wakeup_reader, handlers), name="faktory-watch", daemon=True
    ).start()
    if child_spec.beats >= 0:
        # A thread of its own: logging may block for long, and a handler that logs must not delay heartbeats.
        threading.Thread(target=_beat, args=(child_spec, responds), name="faktory-heartbeat", daemon=True).start()


def run_child(role: Role, child_spec: ChildSpec) -> NoReturn:
    """Run a child from its start to its exit.

    Exits with `os._exit`, since threads that user code blocks would keep an ordinary exit waiting.
    """
    code = CRASHED
    try:
        # The pipe of a forked child is the parent's: its own signals would reach the supervisor.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the parent sends TERM
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = role.main(child_spec)
    except BaseException:
        logger.exception("child broke role=%s pid=%d", role.name, os.getpid())
    finally:
        with suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def format_stacks() -> str:
    """Return the stack traces of all threads of this process."""
    frames = sys._current_frames()  # noqa: SLF001  (documented, and the only way)
    stacks = (
        f"Thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.ident in frames
    )
    return "".join(stacks).rstrip()


def _watch(child_spec: ChildSpec, wakeup_reader: int, handlers: Mapping[int, Callable[[], None]]) -> None:
    """Handle signals in this thread; stop when the parent has ended.

    Python runs signal handlers only when the main thread wakes up, and a handler must not log. A signal is reported
    twice, or once while the main thread sleeps.
    """
    handled_at: dict[int, float] = {}
    while True:
        ready, _, _ = select.select([child_spec.parent_pipe, wakeup_reader], [], [])
        # Never written to: readable only when the parent has ended, also by SIGKILL.
        if child_spec.parent_pipe in ready:
            logger.error("the parent process is gone: ending pid=%d", os.getpid())
            handlers[signal.SIGTERM]()
            return
        for number in os.read(wakeup_reader, 100) if wakeup_reader in ready else b"":
            if number in handlers and time.monotonic() - handled_at.get(number, -1.0) >= SAME_SIGNAL_S:
                handled_at[number] = time.monotonic()
                handlers[number]()


def _beat(child_spec: ChildSpec, responds: Callable[[], object] | None) -> None:
    """Send heartbeats to the parent until this process ends."""
    beat = child_spec.wid.encode()
    assert len(beat) == BEAT_BYTES, child_spec.wid  # noqa: S101  (`new_wid` makes them)
    while True:
        if responds:
            responds()
        with suppress(BlockingIOError, BrokenPipeError):  # full while the parent is suspended; closed when it has ended
            os.write(child_spec.beats, beat)
        time.sleep(child_spec.beat_every_s)


def _write_wakeup(wakeup_writer: int, number: int, _: object) -> None:
    with suppress(BlockingIOError):
        os.write(wakeup_writer, bytes([number]))


def _ignore_signal(*_: object) -> None:
    """Ignore a signal that has no meaning here."""


def _log_stacks() -> None:
    logger.warning("stacks of all threads pid=%d%s", os.getpid(), Lines(format_stacks()))
