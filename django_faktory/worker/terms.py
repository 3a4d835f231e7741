"""What a supervisor and its children have agreed on: exit codes, signals, pipes, and what a child is told at its start.

All that a supervisor without Django needs to know of its children; it imports neither logging nor typing, which would
be 1.7 megabytes there (ADR 0012).
"""

from __future__ import annotations

import os
import signal

CLEAN, CANNOT_START, SPENT, CRASHED = 0, 3, 4, 70
"""Exit codes of a child. SPENT is as good as CLEAN, and asks for another at once; the last is anything but these."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGCHLD)

NEWS_BYTES = 512
"""Of one piece of news, filled up with blanks. POSIX promises that as much goes through a pipe in one piece."""

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40
LEVELS = {DEBUG: "DEBUG", INFO: "INFO", WARNING: "WARNING", ERROR: "ERROR"}
"""Levels of news, and their names: those of `logging`."""


class Launch:
    """What a child is told: who it is, which wids before it died holding jobs, and when its turn begins.

    `lifeline` is a pipe that ends with the parent. From `news` it takes what its parent has to say.
    `not_before` is a reading of the monotonic clock, which is the machine's.
    """

    def __init__(self, *, wid: str, lost: tuple[str, ...], lifeline: int, news: int, not_before: float = 0.0) -> None:
        self.wid, self.lost = wid, lost
        self.lifeline, self.news = lifeline, news
        self.not_before = not_before


def new_wid() -> str:
    """A name no other worker process has had."""
    return os.urandom(8).hex()


def make_bell() -> tuple[int, int]:
    """The two ends of a pipe for signals."""
    heard, bell = os.pipe()
    os.set_blocking(bell, False)
    return heard, bell
