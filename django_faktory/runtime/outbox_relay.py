"""Send outbox entries that their callers could not send, because of an outage or an early exit (`OutboxRelay`).

Each node runs one loop. A lease keeps two nodes from sending the same rows.
"""

from __future__ import annotations

from django.db import connections

from .. import brokers
from ..brokers.outbox import TARGET_FAILURES, Outbox
from ..core.logs import get_logger
from ..store import sharing
from .background_loops import Loop

logger = get_logger(__name__)

EVERY_S = 1.0
"""Seconds between two runs."""
LONGEST_PAUSE_S = 15.0
"""Longest pause in seconds while the target is unreachable."""


class OutboxRelay(Loop):
    """Loop that sends the entries."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def run(self) -> None:
        """Send every `EVERY_S` until stopped. While the target is unreachable, double the pause, up to a limit."""
        pause_s = EVERY_S
        while not self._stopping.is_set():
            # Backoff: each attempt at an unreachable target costs its connect timeout.
            pause_s = EVERY_S if self.run_once() else min(pause_s * 2, LONGEST_PAUSE_S)
            sharing.give_back()
            self._stopping.wait(pause_s)
        self._outbox.target.close()
        for alias in self._outbox.aliases:
            connections[alias].close()

    def run_once(self) -> bool:
        """Send all waiting entries; return False if some could not be sent."""
        results = [self._relay(alias) for alias in self._outbox.aliases]  # a list: one failure skips no alias
        return all(results)

    def _relay(self, alias: str) -> bool:
        try:
            count = self._outbox.relay(alias)
        except TARGET_FAILURES as error:
            logger.warning("the outbox waits for its target alias=%s error=%s", alias, error)
            return False
        except Exception:  # the loop must survive: log and continue
            logger.exception("the outbox could not be relayed alias=%s", alias)
            # The connection may be in an unknown state after an unexpected error.
            connections[alias].close()
            return False
        if count:
            logger.info("outbox relayed alias=%s jobs=%d", alias, count)
        return True


def make_outbox_relay() -> OutboxRelay | None:
    """Return the relay for this project's settings, or None if transactions store the jobs directly."""
    producer = brokers.get_producer()
    return OutboxRelay(producer) if isinstance(producer, Outbox) else None
