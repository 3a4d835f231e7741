"""Programs under test: started, read along line by line, and ended by their process id, whatever happens."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from tests.own_servers import ending_with_us
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent

WITH_US = ending_with_us(signal.SIGKILL)
"""Words before a command that make the kernel end it with the thread that started it: a run of the tests that is killed
leaves no worker behind that takes the next run's jobs."""

PR_SET_PDEATHSIG = 1


def end_with_parent():
    """Let the kernel end this process with its parent: xdist's processes outlive a killed pytest by 10 s and more."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)


class Program:
    """A Python program in a process group of its own; `lines` grows with what it says."""

    def __init__(self, *args, **environment):
        self.lines = []
        self._process = subprocess.Popen(
            [*WITH_US, sys.executable, "-u", *args],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._family = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))

    def said(self, *words, times=1, timeout_s=60):
        """Wait for `times` lines that have all these words, and return them."""

        def found():
            return [line for line in list(self.lines) if all(word in line for word in words)]

        with suppress(AssertionError):
            wait_until(lambda: len(found()) >= times or not self._reader.is_alive(), timeout_s)
        lines = found()
        assert len(lines) >= times, f"expected {words} to be said, got:\n{self.text}"
        return lines

    @property
    def text(self):
        return "\n".join(self.lines)

    def is_alive(self):
        return self._process.poll() is None

    def children(self):
        """Its child processes now."""
        found = psutil.Process(self.pid).children()
        self._family = [*{*self._family, *found}]
        return found

    def signal(self, number):
        os.kill(self.pid, number)

    def insist(self, number, *words):
        """Signal again and again until it says these words."""
        wait_until(lambda: all(word in self.text for word in words) or self.signal(number), 60, every_s=0.1)

    def code(self, timeout_s=40):
        """Wait for its end; the exit code, negative for a signal."""
        code = self._process.wait(timeout_s)
        self._reader.join(5)
        return code

    def clean_up(self):
        """End it and all it started."""
        if self._process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                self._family += psutil.Process(self.pid).children(recursive=True)
            self.signal(signal.SIGKILL)
        self._process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # those whose parent is gone hold its output open
        for process in self._family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._reader.join(10)
        self._process.stdout.close()
