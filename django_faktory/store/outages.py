"""Log the outages of a node: one line when one begins, one each minute that it lasts, one when it has ended.

A node has many threads and processes, and an outage hits all of them. They share the state by a piece of memory, so
create `Outages` before processes are forked.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from typing import NamedTuple

from ..core.logs import get_logger

logger = get_logger(__name__)

OVER_AFTER_S = 10.0
"""Seconds without a failure after which an outage is over: longer than the longest pause of a loop."""

REPEAT_S = 60.0
"""Seconds between two lines about the same outage."""

_LAYOUT = struct.Struct("ddddd")


class _State(NamedTuple):
    began_at: float = 0.0
    """On the clock of `time.monotonic`; 0 if there is no outage."""
    failed_at: float = 0.0
    logged_at: float = 0.0
    failures: float = 0.0
    released: float = 0.0


class Outages:
    """The outages of one node. Safe from any thread and process; two that race may log a line twice."""

    def __init__(self, *, over_after_s: float = OVER_AFTER_S, repeat_s: float = REPEAT_S) -> None:
        self._over_after_s, self._repeat_s = over_after_s, repeat_s
        self._memory = mmap.mmap(-1, _LAYOUT.size)
        self._lock = threading.Lock()

    def record_failure(self, source: str, error: object, *, released: int = 0) -> None:
        """Record a failure of the loop `source`, which may have made it release jobs."""
        now = time.monotonic()
        with self._lock:
            state = self._read()
            if not state.began_at or now - state.failed_at > self._over_after_s:
                logger.warning("the broker is unavailable, retrying loop=%s error=%s", source, error)
                state = _State(began_at=now, logged_at=now)
            elif now - state.logged_at >= self._repeat_s:
                logger.warning(
                    "the broker is still unavailable at times loop=%s failures=%d released=%d error=%s",
                    *(source, state.failures, state.released, error),
                )
                state = state._replace(logged_at=now)
            self._write(state._replace(failed_at=now, failures=state.failures + 1, released=state.released + released))

    def record_success(self) -> None:
        """Record a success of any loop: it ends the outage if there was no failure for a while."""
        if not self._read().began_at:  # the usual case costs no lock
            return
        with self._lock:
            state = self._read()
            if state.began_at and time.monotonic() - state.failed_at > self._over_after_s:
                self._write(_State())
                logger.info(
                    "the broker is available again seconds=%.1f failures=%d released=%d",
                    *(state.failed_at - state.began_at, state.failures, state.released),
                )

    def forget(self) -> None:
        """Forget the current outage: for tests, which share a process."""
        self._write(_State())

    def _read(self) -> _State:
        return _State(*_LAYOUT.unpack_from(self._memory))

    def _write(self, state: _State) -> None:
        _LAYOUT.pack_into(self._memory, 0, *state)


of_this_node = Outages()
"""The outages of this process, and of those that it forks."""
