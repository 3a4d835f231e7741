"""Renew the leases of the locks of a worker's jobs and record the locks that are lost.

`LockRenewer` is the loop of one thread. It sends no statement while no job has a lock. An error costs one renewal, and
the next one comes sooner.
"""

from __future__ import annotations

import threading
import time

from ..brokers.base import WorkerBroker
from ..core.logs import get_logger
from .job_buffer import JobBuffer
from .outage_pause import OutagePause

logger = get_logger(__name__)

MAX_PAUSE_AFTER_ERROR_S = 1.0
"""Longest pause after a failed renewal."""

MAX_CHECK_INTERVAL_S = 1.0
"""Longest time between two checks for jobs with a lock; shorter if locks are renewed more often."""


class LockRenewer:
    """Renew lock leases in a loop; `run` is the target of a thread."""

    def __init__(self, broker: WorkerBroker, buffer: JobBuffer) -> None:
        self._broker = broker
        self._buffer = buffer
        self._every_s = broker.lock_heartbeat_s
        self._stopping = threading.Event()
        self._outage_pause = OutagePause("locks")
        self._renew_at = 0.0

    def run(self) -> None:
        """Renew leases until stopped; close the connection while no job has a lock."""
        pause_s = min(self._every_s, MAX_CHECK_INTERVAL_S)
        has_connection = False
        while not self._stopping.wait(pause_s):
            pause_s = min(self._every_s, MAX_CHECK_INTERVAL_S)
            tokens = self._buffer.jobs_with_locks().keys() - self._buffer.lost_locks
            if tokens and time.monotonic() >= self._renew_at:
                has_connection = True
                pause_s = min(pause_s, self._renew(tokens))
            elif not tokens and has_connection:
                # Locks are rare, so an idle worker should not occupy a connection for them.
                self._broker.close()
                has_connection = False
        self._broker.close()

    def stop(self) -> None:
        """End the loop; does not wait for it."""
        self._stopping.set()

    def _renew(self, tokens: set[int]) -> float:
        """Renew these locks; return the seconds until the next check."""
        pause = self._outage_pause
        lost = pause.call(self._broker, lambda: self._broker.extend_locks(tokens))
        if lost is None:
            return min(MAX_PAUSE_AFTER_ERROR_S, pause.pause_s)
        # 10 % early, so that the check just before the due time renews already.
        self._renew_at = time.monotonic() + self._every_s * 0.9
        for token, job in self._buffer.jobs_with_locks().items():
            if token in lost:
                self._buffer.lost_locks.add(token)
                logger.warning("lock is lost, another job of its key may run jid=%s token=%d", job.jid, token)
        return self._every_s
