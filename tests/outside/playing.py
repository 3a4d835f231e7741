"""Run one attempt at a job as its script says, and note each event. Uses neither Django nor the store.

A script is the last argument of a job: `ms` is its duration, `fails` is how often it fails before it succeeds.
"""

import itertools
import os
import threading
import time
from pathlib import Path

from tests.faults.history import Scribe

SLICE_S = 0.05
PULSE_S = 0.1
GAP_S = 1.0
"""A process that did not run for this many seconds notes a gap: it was stopped, or the machine was busy."""

ALWAYS = 99
"""`fails` of a job that never succeeds."""


class Stage:
    """Play scripts in one process, and write its notes."""

    def __init__(self, folder, name):
        self.folder = Path(folder)
        self._scribe = Scribe(folder, name)
        self._numbers = itertools.count()
        threading.Thread(target=self._pulse, daemon=True).start()

    note = property(lambda self: self._scribe.note)

    def _pulse(self):
        before = time.monotonic()
        while True:
            time.sleep(PULSE_S)
            now = time.monotonic()
            if now - before > GAP_S:
                self.note("gap", str(os.getpid()), f"{before:.6f}", f"{now - before:.3f}")
            before = now

    def play(self, jid, executor, script):
        """Run one attempt; return True if it must fail."""
        run = (jid, executor, str(os.getpid()), str(next(self._numbers)))
        self.note("begin", *run)
        try:
            until = time.monotonic() + script["ms"] / 1000
            while (rest_s := until - time.monotonic()) > 0:
                time.sleep(min(rest_s, SLICE_S))
        except BaseException:
            self.note("end", *run, "cut")
            raise
        fails = self._fails(jid, script["fails"])
        self.note("end", *run, "fail" if fails else "ok")
        return fails

    def _fails(self, jid, times):
        """Return True if it has failed fewer than `times` times; the count is a file, which survives the process."""
        if times == 0:
            return False
        file = os.open(self.folder / f"{jid}.fails", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if os.fstat(file).st_size >= times:
                return False
            os.write(file, b"x")
            return True
        finally:
            os.close(file)
