"""Start programs under test, read their output by line, and always end them by process id."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import psutil

from tests.fork_server import ROOT, ForkedProcess, ForkServer, ignored_signals
from tests.own_servers import ending_with_us
from tests.waiting import LONGEST_WAIT_S, wait_until

WITH_US = ending_with_us(signal.SIGKILL)
"""Command prefix that makes the kernel end the program with the thread that started it: if a test run is killed, it
leaves no worker behind that takes jobs of the next run.
"""

ENDS_WITHIN_S = 5
"""Time for a measured program to end before it is killed."""

fork_servers = {}
"""The fork servers, by what they pass on: their client, because a forked pytest process must not use its parent's, and
the signals that they ignore.
"""


def obey_signals():
    """End on INT, QUIT and HUP. A background job ignores the first two, nohup the third, and programs inherit this."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Program:
    """A Python program in a process group of its own; `lines` collects its output."""

    def __init__(self, *args, **environment):
        self.lines = []
        self._process = start(args, {**os.environ, "PYTHONPATH": str(ROOT), **environment})
        self.pid = self._process.pid
        self._family = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_for_log(self, *words, times=1, timeout_s=LONGEST_WAIT_S):
        """Wait for `times` lines that contain all these words, and return them."""

        def found():
            return [line for line in list(self.lines) if all(word in line for word in words)]

        with suppress(AssertionError):
            wait_until(lambda: len(found()) >= times or not self._reader.is_alive(), timeout_s)
        lines = found()
        assert len(lines) >= times, f"expected {words} in the log, got:\n{self.text}"
        return lines

    @property
    def text(self):
        return "\n".join(self.lines)

    def is_alive(self):
        return self._process.poll() is None

    def children(self):
        """Return its current child processes."""
        found = psutil.Process(self.pid).children()
        self._family = [*{*self._family, *found}]
        return found

    def signal(self, number):
        os.kill(self.pid, number)

    def insist(self, number, *words):
        """Send the signal repeatedly until the output contains these words."""
        wait_until(lambda: all(word in self.text for word in words) or self.signal(number), every_s=0.1)

    def code(self, timeout_s=LONGEST_WAIT_S):
        """Wait until it ends; return the exit code, negative for a signal."""
        code = self._process.wait(timeout_s)
        self._reader.join(10)  # orphans may keep its output open
        return code

    def clean_up(self):
        """Kill the program and all processes that it started; let it end first if its coverage is measured."""
        if self._process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                self._family += psutil.Process(self.pid).children(recursive=True)
            if "COVERAGE_PROCESS_CONFIG" in os.environ:  # a killed process writes no coverage
                self.signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(ENDS_WITHIN_S)
            if self._process.poll() is None:
                self.signal(signal.SIGKILL)
        self._process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # orphaned processes keep its output open
        for process in self._family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._reader.join(60)
        self._process.stdout.close()


def start(args, environment):
    """Start `python -u *args` in a session of its own, with a pipe for its output; by a fork if that does the same."""
    server = fork_server()
    if server and server.can_start(args, environment):
        return ForkedProcess(server, args, environment)
    return subprocess.Popen(
        [*WITH_US, sys.executable, "-u", *args],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def fork_server():
    """Return the fork server of this process and its ignored signals, or None if there can be none."""
    key = os.getpid(), ignored_signals()
    # A server ends with the thread that started it, so only the main thread starts one.
    if key not in fork_servers and ForkServer.is_possible() and threading.current_thread() is threading.main_thread():
        fork_servers[key] = ForkServer(WITH_US)
    return fork_servers.get(key)
