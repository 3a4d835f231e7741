"""Send a worker's heartbeats (`Heartbeat`). Rules: W19 to W21.

A BEAT extends the leases of the worker's jobs, and its reply may carry an order: to become quiet or to terminate.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Set

from ..brokers.base import WorkerBroker
from ..core.logs import get_logger
from ..core.payloads import Beat
from ..errors import FaktoryError, UnknownWorker
from .outage_pause import OutagePause

logger = get_logger(__name__)

FRESH_BEATS = 2
"""A wid counts as alive for at least this many beat intervals after its latest BEAT (check W004)."""

QUIET, TERMINATE, LOST = "quiet", "terminate", "lost"


class Heartbeat:
    """Send a BEAT every `interval_s`; `run` is the target of a thread.

    `on_order` is called with QUIET, TERMINATE or LOST. `held_attempts` returns jid and attempt of the jobs in this
    process. A BEAT names, and so extends, only jobs that were already here at the BEAT before: a claim reserves a job
    for longer than one interval. The BEATs of a worker with short jobs name none.
    """

    def __init__(
        self,
        broker: WorkerBroker,
        *,
        wid: str,
        interval_s: float,
        on_order: Callable[[str], None],
        held_attempts: Callable[[], Set[tuple[str, int]]] = frozenset,
    ) -> None:
        self._broker = broker
        self._held_attempts = held_attempts
        self._previous_attempts: Set[tuple[str, int]] = frozenset()
        self._wid = wid
        self._interval_s = interval_s
        self._on_order = on_order
        self._state = ""
        self._due = threading.Event()
        self._is_stopped = False
        self._pause_s = interval_s
        self._answered_at = float("-inf")
        self._outage_pause = OutagePause("beats")

    def run(self) -> None:
        """Send BEATs until stopped, the first one after a pause. After an error the next one comes sooner."""
        while not self._is_stopped:
            self._due.wait(self._pause_s)
            self._due.clear()
            # `stop` wakes this loop too.
            if not self._is_stopped:
                self.beat()
        self._broker.close()

    def is_fresh(self) -> bool:
        """Return whether the broker has recently answered a BEAT of this worker, and knew its wid.

        A process that was suspended must check this before it fetches: its wid may already count as lost, and then no
        later loss of the wid would return the new jobs to their queues.
        """
        return time.monotonic() - self._answered_at < FRESH_BEATS * self._interval_s

    def set_state(self, state: str) -> None:
        """Send `state` (QUIET or TERMINATE) with every BEAT from now on, the first at once."""
        self._state = state
        self._due.set()

    def stop(self) -> None:
        """End the loop; does not wait for it."""
        self._is_stopped = True
        self._due.set()

    def beat(self) -> None:
        """Send one BEAT and call `on_order` with the order in its reply. Never raises."""
        self._pause_s = self._interval_s
        attempts = self._held_attempts()
        still_held, self._previous_attempts = tuple(sorted(attempts & self._previous_attempts)), attempts
        # Before the request: a process that is suspended until the reply arrives must not count as fresh.
        sent_at = time.monotonic()
        beat = Beat(wid=self._wid, current_state=self._state, rss_kb=rss_kb(), held=still_held)
        pause = self._outage_pause
        answers = pause.call(self._broker, lambda: self._broker.beat([beat]))
        if answers is None:
            # Sooner than usual: without an accepted BEAT the wid counts as lost after a few intervals.
            self._pause_s = min(self._interval_s, pause.pause_s)
            return
        [answer] = answers
        if isinstance(answer, UnknownWorker):
            # `_answered_at` is not updated: a wid that the broker does not know must not count as fresh.
            self._on_order(LOST)
            return
        self._answered_at = sent_at
        if isinstance(answer, FaktoryError):
            logger.error("beat was refused wid=%s error=%s", self._wid, answer)
        elif answer in (QUIET, TERMINATE):
            self._on_order(answer)


def rss_kb() -> int:
    """Return the resident memory of this process in KB: current on Linux, peak elsewhere."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024
    except OSError:  # pragma: no cover  (no /proc on this platform)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # ru_maxrss is in bytes on macOS and in KB elsewhere.
        return peak // 1024 if sys.platform == "darwin" else peak
