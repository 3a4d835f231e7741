"""A worker's heartbeat: it extends the reservations of the worker's jobs, and brings back orders. Rules: W19 to W21."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Set

from ..brokers.base import Broker
from ..errors import FaktoryError, UnknownWorker
from ..logs import get_logger
from ..payloads import Beat
from .patience import Patience

logger = get_logger(__name__)

FRESH_BEATS = 2
"""A wid lives at least so many intervals after its BEAT (check W004)."""

QUIET, TERMINATE, LOST = "quiet", "terminate", "lost"


class Heartbeat:
    """Beats every `interval_s`; `run` is a thread's. `obey` is called with QUIET, TERMINATE or LOST.

    `known` returns jid and attempt of the jobs that this process has: a beat names those that it had at the beat before
    too. A claim reserves a job for longer than that, and the beats of short jobs name none.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        wid: str,
        interval_s: float,
        obey: Callable[[str], None],
        known: Callable[[], Set[tuple[str, int]]] = frozenset,
    ) -> None:
        self._broker = broker
        self._known = known
        self._known_before: Set[tuple[str, int]] = frozenset()
        self._wid = wid
        self._interval_s = interval_s
        self._obey = obey
        self._state = ""
        self._due = threading.Event()
        self._is_stopped = False
        self._pause_s = interval_s
        self._answered_at = float("-inf")
        self._patience = Patience("beats")

    def run(self) -> None:
        """Beat until stopped, the first time after a pause. An error costs one beat, and the next comes sooner."""
        while not self._is_stopped:
            self._due.wait(self._pause_s)
            self._due.clear()
            if not self._is_stopped:
                self.beat()
        self._broker.close()

    def is_fresh(self) -> bool:
        """Whether the broker has lately taken this worker for alive. Who stood still must ask before it fetches: its
        wid may have been given up, and nobody would miss it if it died holding new jobs."""
        return time.monotonic() - self._answered_at < FRESH_BEATS * self._interval_s

    def tell(self, state: str) -> None:
        """Say from now on, first at once, that this worker is QUIET or to TERMINATE."""
        self._state = state
        self._due.set()

    def stop(self) -> None:
        """End the loop."""
        self._is_stopped = True
        self._due.set()

    def beat(self) -> None:
        """Beat once, and pass on the order that came back. Raises nothing."""
        self._pause_s = self._interval_s
        known = self._known()
        held, self._known_before = tuple(sorted(known & self._known_before)), known
        beat = Beat(wid=self._wid, current_state=self._state, rss_kb=rss_kb(), held=held)
        try:
            [answer] = self._broker.beat([beat])
        except FaktoryError as error:
            self._pause_s = min(self._interval_s, self._patience.after(error))
            return
        except Exception:  # a loop: a worker that stops beating loses its jobs
            logger.exception("beat failed wid=%s", self._wid)
            self._broker.close()
            self._pause_s = min(self._interval_s, 1.0)
            return
        self._patience.rewarded()
        if isinstance(answer, UnknownWorker):
            self._obey(LOST)
            return
        self._answered_at = time.monotonic()
        if isinstance(answer, FaktoryError):
            logger.error("beat was refused wid=%s error=%s", self._wid, answer)
        elif answer in (QUIET, TERMINATE):
            self._obey(answer)


def rss_kb() -> int:
    """Memory of this process, in KB: what it has now on Linux, the most it ever had elsewhere."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024
    except OSError:  # pragma: no cover  (no /proc on this platform)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most // 1024 if sys.platform == "darwin" else most
