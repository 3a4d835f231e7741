"""The contract between a supervisor and its children: signals, heartbeats, pipes, and `ChildSpec`."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that stop gracefully. A terminal sends HUP when it hangs up, and QUIT for Ctrl-\\, to its process group."""

SIGNALS = (*STOPS, signal.SIGTSTP, signal.SIGTTIN, signal.SIGCHLD)
"""Signals that are blocked while a child is started."""

BEAT_BYTES = 16
"""Size of a heartbeat in the pipe to the supervisor: the wid of the child. Writes of this size are atomic."""

SILENT_BEATS = 9
"""A child that misses this many heartbeats in a row is killed and replaced."""

UNRESPONSIVE_BEATS = 6
"""Missed heartbeats after which probes report a child: with the default settings 13.5 s before it is killed.

Kubernetes restarts the whole node only after three failures in 30 s.
"""


class ChildSpec(NamedTuple):
    """The parameters of one child: its wid, and the wids that died before it with jobs.

    - `parent_pipe` closes when the parent ends.
    - `unresponsive` maps each of the `lost` wids that was killed because it stopped responding to its seconds of
      silence.
    - `beats` is the pipe for heartbeats, one every `beat_every_s`; -1 if the parent expects none.
    - `unresponsive_pipe` is readable while a child of the parent does not respond; -1 if there is none.
    """

    wid: str
    lost: tuple[str, ...]
    parent_pipe: int
    unresponsive: Mapping[str, int] = MappingProxyType({})
    beats: int = -1
    beat_every_s: float = 0.0
    unresponsive_pipe: int = -1


def stop_signals() -> tuple[int, ...]:
    """Return `STOPS` without HUP and QUIT if this process was started with them ignored, such as by `nohup`."""
    ignorable = (signal.SIGHUP, signal.SIGQUIT)
    return tuple(number for number in STOPS if not (number in ignorable and signal.getsignal(number) is signal.SIG_IGN))


def make_wakeup_pipe() -> tuple[int, int]:
    """Create the pipe for signals: read end and non-blocking write end."""
    wakeup_reader, wakeup_writer = os.pipe()
    # Required by `signal.set_wakeup_fd`: a full pipe must not block the process.
    os.set_blocking(wakeup_writer, False)
    return wakeup_reader, wakeup_writer
