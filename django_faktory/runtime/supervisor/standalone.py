"""The supervisor without Django: `runfaktory` executes this once its processes run (ADR 0012).

Imports the supervisor and little of the standard library only. Replaces a dead child by running the project's own
command, which reads its role from its orders. Children write its log records, since they have the project's logging.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress

from . import reexec_pipe, supervisor
from .contract import LEVELS, NEWS_BYTES, SIGNALS, ChildSpec
from .supervisor import Child, Pipes, Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, NoReturn

HEAD_START_S = 2.0
"""Typical duration of a project's imports. The pause before a child's turn is used for them."""

UNREAD_S = 10.0
"""Log records that no child has read within this time are written to stderr."""

CANNOT_EXECUTE = 127
"""Exit code of a shell for a command that does not exist."""

LOST_REPORT_S = 12.0
"""Seconds that the report of killed children may take, imports included."""


class ExecLauncher:
    """The `Launcher` of a supervisor without Django: every task that needs Django runs the project's own command."""

    head_start_s = HEAD_START_S

    def __init__(self, *, command: Sequence[str], common: dict[str, Any], news: tuple[int, int], level: int) -> None:
        self._command = list(command)
        self._common = common
        self._log_reader, self._log_writer = news
        self._level = level
        self._unread_since: float | None = None
        self._lost_report: tuple[int, int] | None = None

    def start(self, name: str, child_spec: ChildSpec, lifeline_end: int) -> int:
        """Run the project's command as the child `name`; return its pid, as `Launcher.start`."""
        del lifeline_end  # closed by exec
        return self._execute({"role": name, "launch": vars(child_spec)}, child_spec.pipes())

    def log(self, level: int, message: str, *args: object) -> None:
        """Send the record to a child, which logs it, as `Launcher.log`.

        If no child reads it, `wait_s` or `report_killed` writes it to stderr.
        """
        if level < self._level:
            return
        fields = {"name": supervisor.__name__, "level": level, "pid": os.getpid()}
        record = json.dumps(fields | {"at": time.time(), "message": message, "args": args}).encode().ljust(NEWS_BYTES)
        self._unread_since = self._unread_since or time.monotonic()
        try:
            os.write(self._log_writer, record)
        except BlockingIOError:  # the pipe is full: no child reads it
            _write_to_stderr(record)

    def wait_s(self) -> float | None:
        """Write overdue records to stderr; return the seconds until the next are due, as `Launcher.wait_s`."""
        if self._unread_since is None:
            return None
        if not self._has_unread():
            self._unread_since = None
        elif time.monotonic() >= self._unread_since + UNREAD_S:
            self._write_unread()
        else:
            return self._unread_since + UNREAD_S - time.monotonic()
        return None

    def prepare_lost_report(self) -> None:
        """Start the process that reports killed children: it loads Django and waits for their wids."""
        reader, writer = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        # The mask survives exec, so that a signal to the process group does not end it early.
        pid = self._execute({"role": None, "killed": reader, "news": self._log_reader}, (reader, self._log_reader))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.close(reader)
        self._lost_report = pid, writer

    def report_killed(self, killed: Sequence[str]) -> None:
        """Report the killed children and write the remaining log records, as `Launcher.report_killed`."""
        if killed and self._lost_report is None:
            self.prepare_lost_report()
        if self._lost_report:
            pid, writer = self._lost_report
            if killed:
                os.write(writer, json.dumps(killed).encode())
            os.close(writer)
            # Without killed children it has nothing to report, and need not finish its imports.
            _wait_or_kill(pid, LOST_REPORT_S if killed else 0.0)
        self._write_unread()

    def _execute(self, orders: dict[str, Any], inherited: Iterable[int]) -> int:
        """Run the project's command with these orders; return its pid."""
        reader = reexec_pipe.write(self._common | orders)
        pid = os.fork()
        if pid == 0:
            try:
                for descriptor in inherited:
                    os.set_inheritable(descriptor, True)
                environment = {**os.environ, reexec_pipe.VARIABLE: str(reader)}
                os.execve(self._command[0], self._command, environment)  # noqa: S606  (our own command line)
            finally:
                # Reached only if exec failed: the fork must not continue as a second supervisor.
                os._exit(CANNOT_EXECUTE)
        os.close(reader)
        return pid

    def _has_unread(self) -> bool:
        return bool(select.select([self._log_reader], [], [], 0)[0])

    def _write_unread(self) -> None:
        self._unread_since = None
        with suppress(BlockingIOError):
            while record := os.read(self._log_reader, NEWS_BYTES):
                _write_to_stderr(record)


def main(reader: int) -> NoReturn:
    """Supervise the children that `reexec` left; the pipe `reader` contains its orders."""
    orders = reexec_pipe.read(reader)
    shared_pipes = Pipes(**{name: tuple(ends) for name, ends in orders["cords"].items()})
    # A child inherits only the pipes that `_execute` is given for it.
    for descriptor in shared_pipes.descriptors():
        os.set_inheritable(descriptor, False)
    launcher = ExecLauncher(
        command=orders["command"], common=orders["common"], news=shared_pipes.news, level=orders["level"]
    )
    children = [Child.from_dict(child) for child in orders["children"]]
    successor = Supervisor(
        children,
        launcher,
        grace_s=orders["grace_s"],
        silence_s=orders["silence_s"],
        parent=orders["parent"],
        shared_pipes=shared_pipes,
    )
    sys.exit(successor.run())


def _write_to_stderr(record: bytes) -> None:
    """Write a record to stderr in the format that runfaktory uses without project logging."""
    fields = json.loads(record)
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fields["at"]))
    text = fields["message"] % tuple(fields["args"])
    with suppress(OSError):
        level = LEVELS[fields["level"]]
        sys.stderr.write(f"{moment},{fields['at'] % 1 * 1000:03.0f} {level:7} {fields['pid']} {text}\n")


def _wait_or_kill(pid: int, timeout_s: float) -> None:
    """Wait until this child has ended; kill it after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    # Polled, since `os.waitpid` has no timeout.
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(0.01)
