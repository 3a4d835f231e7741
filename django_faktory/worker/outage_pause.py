"""Compute the pauses of a worker's loops during an outage of the broker, with backoff (`OutagePause`).

Logs one line when the outage begins and one when it ends. Independent of brokers and jobs.
"""

from __future__ import annotations

import random

from ..core.logs import get_logger

logger = get_logger(__name__)

FIRST_PAUSE_S = 0.25
"""Maximum of the first pause; it doubles with each failure."""

LONGEST_PAUSE_S = 5.0
"""Cap of the pause."""


class OutagePause:
    """Count the failures of one loop in a row. `loop_name` names the loop in the log."""

    def __init__(self, loop_name: str) -> None:
        self._loop_name = loop_name
        self._failures = 0

    def record_failure(self, error: Exception) -> float:
        """Record a failure; return the seconds to wait before the next try.

        The pause is random between half of its maximum and the maximum, so that the workers of a node do not try in
        step.
        """
        if not self._failures:
            logger.warning("the broker is unavailable, retrying loop=%s error=%s", self._loop_name, error)
        self._failures += 1
        # The exponent is bounded: in a long outage the power would be too large for a float.
        max_pause_s = min(FIRST_PAUSE_S * 2 ** min(self._failures - 1, 10), LONGEST_PAUSE_S)
        return random.uniform(max_pause_s / 2, max_pause_s)

    def record_success(self) -> None:
        """Record a success: the next failure starts with the shortest pause."""
        if self._failures:
            logger.info("the broker is available again loop=%s tries=%d", self._loop_name, self._failures)
            self._failures = 0
