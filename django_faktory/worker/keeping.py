"""Keeps the locks of the jobs that a worker holds: extends them in time, and says which are lost. Knows no job's end.

One thread. It sleeps as long as no job holds a lock; an error costs one extension, and the next comes sooner.
"""

from __future__ import annotations

import threading
import time

from ..brokers.base import Broker
from ..errors import FaktoryError
from ..logs import get_logger
from .held import HeldJobs
from .patience import Patience

logger = get_logger(__name__)

AFTER_TROUBLE_S = 1.0
LONGEST_LOOK_S = 1.0
"""Between two looks whether a job holds a lock, or less where locks are to be extended more often."""


class LockKeeper:
    """The loop; `run` is a thread's."""

    def __init__(self, broker: Broker, held: HeldJobs) -> None:
        self._broker = broker
        self._held = held
        self._every_s = broker.lock_heartbeat_s
        self._stopping = threading.Event()
        self._patience = Patience("locks")
        self._extend_at = 0.0

    def run(self) -> None:
        """Extend until stopped."""
        pause_s = min(self._every_s, LONGEST_LOOK_S)
        has_connection = False
        while not self._stopping.wait(pause_s):
            pause_s = min(self._every_s, LONGEST_LOOK_S)
            tokens = self._held.locked().keys() - self._held.lost_locks
            if tokens and time.monotonic() >= self._extend_at:
                has_connection = True
                pause_s = min(pause_s, self._extend(tokens))
            elif not tokens and has_connection:
                self._broker.close()
                has_connection = False
        self._broker.close()

    def stop(self) -> None:
        """End the loop."""
        self._stopping.set()

    def _extend(self, tokens: set[int]) -> float:
        """Extend these; returns after how long to look again."""
        try:
            lost = self._broker.extend_locks(tokens)
        except FaktoryError as error:
            return min(AFTER_TROUBLE_S, self._patience.after(error))
        except Exception:  # a loop: a worker that stops extending loses its locks
            logger.exception("locks could not be extended")
            self._broker.close()
            return AFTER_TROUBLE_S
        self._patience.rewarded()
        self._extend_at = time.monotonic() + self._every_s * 0.9  # the look that comes just before counts
        for token, job in self._held.locked().items():
            if token in lost:
                self._held.lost_locks.add(token)
                logger.warning("lock is lost, another job of its key may run jid=%s token=%d", job.jid, token)
        return self._every_s
