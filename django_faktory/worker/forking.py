"""Children that are forked from this very process: quick to start, and they share its memory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence

from ..logs import get_logger
from . import supervisor
from .launch import Role, live
from .terms import CLEAN, Launch

FAREWELL_S = 2


class Forking:
    """The supervisor's ways in a process that has everything loaded. `farewell` hears, in a process of its own, the
    wids of those that had to be killed while stopping."""

    head_start_s = 0.0

    def __init__(self, roles: Iterable[Role], farewell: Callable[[Sequence[str]], None]) -> None:
        self._roles = {role.name: role for role in roles}
        self._farewell = farewell

    def start(self, name: str, launch: Launch, lifeline_end: int) -> int:
        """See `Ways`."""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(lifeline_end)
            live(self._roles[name], launch)
        return pid

    def tell(self, level: int, message: str, *args: object) -> None:
        """See `Ways`."""
        get_logger(supervisor.__name__).log(level, message, *args)

    def patience_s(self) -> float | None:
        """See `Ways`: nothing waits here."""
        return None

    def prepare_farewell(self) -> None:
        """See `Ways`: a fork needs no preparation."""

    def finish(self, killed: Sequence[str]) -> None:
        """See `Ways`. In a process of its own, with an alarm: the database may be what the children hung on."""
        if not killed:
            return
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(FAREWELL_S)
                self._farewell(killed)
            finally:
                os._exit(CLEAN)
        os.waitpid(pid, 0)
