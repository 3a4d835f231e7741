"""The contract between a supervisor and its children: exit codes, signals, pipes, and `ChildSpec`.

A supervisor without Django imports this module. It imports neither logging nor typing, which would take 1.7 MB there
(ADR 0012).
"""

from __future__ import annotations

import os
import signal

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that stop gracefully. A terminal sends HUP when it hangs up, and QUIT for Ctrl-\\, to its process group."""

SIGNALS = (*STOPS, signal.SIGTSTP, signal.SIGTTIN, signal.SIGCHLD)
"""Signals that are blocked while a child is started."""

BEAT_BYTES = 16
"""Size of a heartbeat in the pipe to the supervisor: the wid of the child. Writes of this size are atomic."""

SILENT_BEATS = 9
"""A child that misses this many heartbeats in a row is killed and replaced."""

ALARM_BEATS = 6
"""Missed heartbeats from which on probes report a child: late enough that Kubernetes, with its usual three failures in
30 s, does not restart the whole node for one process that is about to be replaced (15 s with the default settings).
"""

NEWS_BYTES = 512
"""Size of one log record in the pipe, padded with blanks. POSIX guarantees that a write of 512 bytes is atomic."""

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40
"""Levels of log records and their names: the same as in `logging`."""

LEVELS = {DEBUG: "DEBUG", INFO: "INFO", WARNING: "WARNING", ERROR: "ERROR"}
"""Names of the levels, as in `logging`."""


class ChildSpec:
    """The parameters of one child: its wid, the wids that died before it with jobs, and when its turn begins.

    - `lifeline` is a pipe that closes when the parent ends. `news` carries log records of the parent.
    - `not_before` is a time of the monotonic clock, which all processes of a machine share.
    - `unresponsive` maps each of the `lost` wids that was killed because it stopped responding to its seconds of
      silence.
    - `beats` is the pipe for heartbeats, one every `beat_every_s`; -1 if the parent expects none.
    - `alarm` is a pipe that is readable while a child of the parent does not respond; -1 if there is none.
    """

    def __init__(
        self,
        *,
        wid: str,
        lost: tuple[str, ...],
        lifeline: int,
        news: int,
        not_before: float = 0.0,
        unresponsive: dict[str, int] | None = None,
        beats: int = -1,
        beat_every_s: float = 0.0,
        alarm: int = -1,
    ) -> None:
        # The names are keys of JSON that code of another release may read (`reexec.child_spec_of`).
        self.wid, self.lost = wid, lost
        self.lifeline, self.news = lifeline, news
        self.not_before = not_before
        self.unresponsive = unresponsive or {}
        self.beats, self.beat_every_s, self.alarm = beats, beat_every_s, alarm

    def pipes(self) -> tuple[int, ...]:
        """Return the file descriptors that the child needs."""
        return tuple(descriptor for descriptor in (self.lifeline, self.news, self.beats, self.alarm) if descriptor >= 0)


def stop_signals() -> tuple[int, ...]:
    """Return `STOPS` without HUP and QUIT if this process was started with them ignored, as by `nohup`."""
    ignorable = (signal.SIGHUP, signal.SIGQUIT)
    return tuple(number for number in STOPS if not (number in ignorable and signal.getsignal(number) is signal.SIG_IGN))


def make_wakeup_pipe() -> tuple[int, int]:
    """Create the pipe for signals: read end and non-blocking write end."""
    wakeup_reader, wakeup_writer = os.pipe()
    # Required by `signal.set_wakeup_fd`: a full pipe must not block the process.
    os.set_blocking(wakeup_writer, False)
    return wakeup_reader, wakeup_writer
