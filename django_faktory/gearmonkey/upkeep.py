"""What time does to GearMonkey jobs, in a thread of every process of ours: no leader, each step may run twice."""

from __future__ import annotations

import threading
import time

from ..errors import FaktoryError
from ..logs import get_logger
from .station import Station

logger = get_logger(__name__)

SWEEP_EVERY_S = 2.0
AUDIT_EVERY_S = 61.0


class Upkeep:
    """The loop; `run` is a thread's."""

    def __init__(self, station: Station, *, audits: bool = False, every_s: float = SWEEP_EVERY_S) -> None:
        self._station = station
        self._audits = audits
        self._every_s = every_s
        self._audit_at = time.monotonic()
        self._stopping = threading.Event()

    def run(self) -> None:
        """Sweep, and audit where that is asked for, until stopped."""
        while not self._stopping.wait(self._every_s):
            self.run_once()

    def run_once(self) -> None:
        """One round. Raises nothing: a server that is away is looked at again in the next."""
        try:
            swept = self._station.sweep()
            if swept.back:
                logger.warning("jobs of workers that died are queued again jobs=%s", ",".join(swept.back))
            if swept.given_up:
                logger.error("jobs that kill their workers are given up jobs=%s", ",".join(swept.given_up))
            if self._audits and time.monotonic() >= self._audit_at:
                self._audit_at = time.monotonic() + AUDIT_EVERY_S
                again = self._station.audit()
                if again:
                    logger.warning("jobs that somebody lost are queued again jobs=%s", ",".join(again))
        except FaktoryError as error:
            logger.warning("the sweep waits for the server error=%s", error)
        except Exception:  # a loop
            logger.exception("the sweep failed")

    def stop(self) -> None:
        """End the loop; from any thread."""
        self._stopping.set()
