"""What a supervisor and its children have agreed on: exit codes, signals, pipes, and what a child is told at its start.

All that a supervisor without Django needs to know of its children; it imports neither logging nor typing, which would
be 1.7 megabytes there (ADR 0012).
"""

from __future__ import annotations

import os
import signal

CLEAN, CANNOT_START, SPENT, CRASHED = 0, 3, 4, 70
"""Exit codes of a child. SPENT is as good as CLEAN, and asks for another at once; the last is anything but these."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that stop gracefully. A terminal sends HUP when it hangs up, and QUIT for Ctrl-\\, to its process group."""

SIGNALS = (*STOPS, signal.SIGTSTP, signal.SIGTTIN, signal.SIGCHLD)

BEAT_BYTES = 16
"""Size of a heartbeat in the pipe to the supervisor: the wid of the child. Writes of this size are atomic."""

SILENT_BEATS = 9
"""A child that misses this many heartbeats in a row is killed and replaced."""

ALARM_BEATS = 6
"""From then on probes report it: late enough that a Kubernetes with its usual three failures in 30 s does not restart
the whole node for one process that is about to be replaced (15 s with the default settings)."""

NEWS_BYTES = 512
"""Of one piece of news, filled up with blanks. POSIX promises that as much goes through a pipe in one piece."""

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40
LEVELS = {DEBUG: "DEBUG", INFO: "INFO", WARNING: "WARNING", ERROR: "ERROR"}
"""Levels of news, and their names: those of `logging`."""


class Launch:
    """What a child is told: who it is, which wids before it died holding jobs, and when its turn begins.

    `lifeline` is a pipe that ends with the parent. From `news` it takes what its parent has to say.
    `not_before` is a reading of the monotonic clock, which is the machine's.
    `unresponsive`: for each of the `lost` that was killed because it stopped responding, the seconds it was silent.
    `beats` is the pipe for heartbeats, one every `beat_every_s`; -1: the parent expects none.
    `alarm` is a pipe that is readable while a child of the parent does not respond; -1: unknown.
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
        self.wid, self.lost = wid, lost
        self.lifeline, self.news = lifeline, news
        self.not_before = not_before
        self.unresponsive = unresponsive or {}
        self.beats, self.beat_every_s, self.alarm = beats, beat_every_s, alarm

    def pipes(self) -> tuple[int, ...]:
        """The file descriptors that the child needs."""
        return tuple(end for end in (self.lifeline, self.news, self.beats, self.alarm) if end >= 0)


def stops() -> tuple[int, ...]:
    """`STOPS` without HUP and QUIT where this process was started with them ignored, as `nohup` does."""
    kept = (signal.SIGHUP, signal.SIGQUIT)
    return tuple(number for number in STOPS if not (number in kept and signal.getsignal(number) is signal.SIG_IGN))


def new_wid() -> str:
    """A name no other worker process has had."""
    return os.urandom(8).hex()


def make_bell() -> tuple[int, int]:
    """The two ends of a pipe for signals."""
    heard, bell = os.pipe()
    os.set_blocking(bell, False)
    return heard, bell
