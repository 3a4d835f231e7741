"""Background loop of each of our processes: requeue the jobs of dead workers (sweep), and jobs in no queue (audit).

There is no leader: each step may run twice without harm.
"""

from __future__ import annotations

import time

from ...core.logs import get_logger
from ...errors import FaktoryError
from ...runtime.background_loops import Loop
from .redis_worker import RedisWorker

logger = get_logger(__name__)

SWEEP_EVERY_S = 2.0
# More than AUDIT_AFTER_S: the second audit of a lost job is late enough to queue it again.
AUDIT_EVERY_S = 61.0


class MaintenanceLoop(Loop):
    """Loop of sweeps, and of audits if `audits`."""

    def __init__(self, redis_worker: RedisWorker, *, audits: bool = False, every_s: float = SWEEP_EVERY_S) -> None:
        super().__init__()
        self._redis_worker = redis_worker
        self._audits = audits
        self._every_s = every_s
        self._audit_at = time.monotonic()

    def run(self) -> None:
        """Sweep, and audit if enabled, until stopped."""
        while not self._stopping.wait(self._every_s):
            self.run_once()

    def run_once(self) -> None:
        """Run one round. Raises nothing: an unreachable server is tried again in the next round."""
        try:
            result = self._redis_worker.sweep()
            if result.requeued:
                logger.warning("jobs of workers that died are queued again jobs=%s", ",".join(result.requeued))
            if result.given_up:
                logger.error("jobs that kill their workers are given up jobs=%s", ",".join(result.given_up))
            if self._audits and time.monotonic() >= self._audit_at:
                self._audit_at = time.monotonic() + AUDIT_EVERY_S
                requeued = self._redis_worker.audit()
                if requeued:
                    logger.warning("lost jobs queued again jobs=%s", ",".join(requeued))
        except FaktoryError as error:
            logger.warning("the sweep waits for the server error=%s", error)
        except Exception:  # log and continue
            logger.exception("the sweep failed")
