"""Start Python programs fast: fork them from a process that has imported Django.

A server takes 0.48 s of CPU time until it listens if it is a new interpreter, 0.24 s if it is forked. The fork server
imports no module of this project: each program imports its own, as in a new interpreter.
"""

import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
PR_SET_PDEATHSIG = 1
MAX_MESSAGE_BYTES = 1 << 17

READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OPENSSL_", "SSL_", "PSYCOPG_", "COVERAGE_")
"""Prefixes of variables that are read before the program runs: by the interpreter, C libraries or imported modules."""

IMPORTED = (
    "django.db.backends.postgresql.base", "django.contrib.admin.apps", "django.contrib.auth.apps", "django.views.debug",
    "cronsim", "msgspec", "sqlite3",
)  # fmt: skip
"""Modules that import nearly all modules of other packages that a server or a worker needs, and read no setting."""


class ForkServer:
    """The client's side of a fork server, which ends with the thread that started it. `prefix` precedes its command."""

    @staticmethod
    def is_possible():
        """Return True if the system has what a ForkedProcess needs; macOS has not."""
        return hasattr(os, "pidfd_open")

    def __init__(self, prefix):
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-u", "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                env=self._environment,
                pass_fds=[theirs.fileno()],
            )

    @property
    def pid(self):
        return self._process.pid

    def close(self):
        """End the server, and with it its programs."""
        self._control.close()
        self._process.wait()

    def can_start(self, args, environment):
        """Return True if a fork does the same as `python -u *args` in this environment."""
        changed = dict(environment.items() ^ self._environment.items())
        return args[0] == "-m" and not any(name.startswith(READ_AT_START) for name in changed)

    def start(self, args, environment, output):
        """Start `python -u *args` in a session of its own and return its pid. `output` is a file descriptor."""
        return self._ask([args, environment], output)

    def reap(self, pid):
        """Wait until the program has ended; return its exit code, negative for a signal."""
        return self._ask(pid)

    def _ask(self, request, *descriptors):
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            reply = self._control.recv(MAX_MESSAGE_BYTES)
        assert reply, "the fork server has ended"
        return json.loads(reply)


class ForkedProcess:
    """A program forked by a server, with the part of `subprocess.Popen` that `Program` uses."""

    def __init__(self, server, args, environment):
        reader, writer = os.pipe()
        self.stdout = os.fdopen(reader, encoding="utf-8", errors="replace")
        try:
            self.pid = server.start(args, environment, writer)
        finally:
            os.close(writer)
        self._server, self._code = server, None
        # Ready to read once the program has ended, although it is no child of this process.
        self._pidfd = os.pidfd_open(self.pid)

    def poll(self):
        """Return the exit code, or None while the program runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._code

    def wait(self, timeout):
        """Wait up to `timeout` seconds until the program ends; return its exit code, negative for a signal."""
        if self._code is None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._code = self._server.reap(self.pid)
            os.close(self._pidfd)
        return self._code


def main():
    """Serve until the client closes its socket. A forked process returns from here when its program has ended."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        with suppress(ImportError):
            import_module(name)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if not message:
            return
        request = json.loads(message)
        if isinstance(request, int):
            reply = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
        else:
            reply = os.fork()
            if reply == 0:
                control.close()
                run(*request, *descriptors)
                return
            os.close(*descriptors)
        control.send(json.dumps(reply).encode())


def run(args, environment, output):
    """Do what `python -u *args` does, in this process."""
    os.setsid()
    end_with_parent()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    _, module, *sys.argv[1:] = args
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def ignored_signals():
    """Return the signals that this process ignores, and so does each program that it starts."""
    return frozenset(number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN)


def end_with_parent():
    """Make the kernel end this process with its parent, for example when pytest is killed."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
