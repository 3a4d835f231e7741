"""Start children by forking this process: fast, and they share its memory (`ForkLauncher`)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence

from ...core.logs import get_logger
from ...worker.process import CLEAN
from . import supervisor
from .child import Role, run_child
from .contract import ChildSpec

LOST_REPORT_S = 2
"""Seconds that the report of killed children may take."""


class ForkLauncher:
    """The `Launcher` of a supervisor in a process that has the project loaded.

    `unregister` is called, in a process of its own, with the wids of children that were killed while stopping.
    """

    head_start_s = 0.0

    def __init__(self, roles: Iterable[Role], unregister: Callable[[Sequence[str]], None]) -> None:
        self._roles = {role.name: role for role in roles}
        self._unregister = unregister

    def start(self, name: str, child_spec: ChildSpec, lifeline_end: int) -> int:
        """Fork the child `name` and return its pid, as `Launcher.start`."""
        # Buffered output would be written by parent and child.
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(lifeline_end)
            run_child(self._roles[name], child_spec)
        return pid

    def log(self, level: int, message: str, *args: object) -> None:
        """Log through the project's logging, as `Launcher.log`."""
        get_logger(supervisor.__name__).log(level, message, *args)

    def wait_s(self) -> float | None:
        """Return None: records are logged at once, so none is pending."""
        return None

    def prepare_lost_report(self) -> None:
        """Do nothing: a fork needs no preparation."""

    def report_killed(self, killed: Sequence[str]) -> None:
        """Report the killed children from a forked process, which an alarm ends after `LOST_REPORT_S`.

        A process of its own, because the children may have been stuck on a database that does not answer.
        """
        if not killed:
            return
        pid = os.fork()
        if pid == 0:
            try:
                # The default action ends the process wherever it waits.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(LOST_REPORT_S)
                self._unregister(killed)
            finally:
                # An ordinary exit would run the cleanup of the parent, such as `atexit`, a second time.
                os._exit(CLEAN)
        os.waitpid(pid, 0)
