"""How a loop of the worker bears an outage of the broker: one line when it begins, one when it ends, growing pauses.

Knows no broker and no job.
"""

from __future__ import annotations

import random

from ..logs import get_logger

logger = get_logger(__name__)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0


class Patience:
    """One loop's. `what` says which, in the log."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._failures = 0

    def after(self, error: Exception) -> float:
        """Note a failure; returns how many seconds to wait before the next try, with jitter."""
        if not self._failures:
            logger.warning("the broker is away, trying until it is back loop=%s error=%s", self._what, error)
        self._failures += 1
        longest = min(FIRST_PAUSE_S * 2 ** min(self._failures - 1, 10), LONGEST_PAUSE_S)
        return random.uniform(longest / 2, longest)

    def rewarded(self) -> None:
        """Note a success."""
        if self._failures:
            logger.info("the broker is back loop=%s tries=%d", self._what, self._failures)
            self._failures = 0
