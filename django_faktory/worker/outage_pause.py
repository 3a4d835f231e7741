"""Call the broker from a worker's loops, which survive any error; pause with backoff during an outage (`OutagePause`).

Independent of jobs; `store.outages` logs the outage.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from ..brokers.base import WorkerBroker
from ..core.logs import get_logger
from ..errors import FaktoryError
from ..store import sharing
from ..store.outages import Outages, of_this_node

T = TypeVar("T")

logger = get_logger(__name__)

FIRST_PAUSE_S = 0.25
"""Maximum of the first pause; it doubles with each failure."""

LONGEST_PAUSE_S = 5.0
"""Cap of the pause."""

AFTER_BUG_S = 1.0
"""The pause after an unexpected error."""


class OutagePause:
    """Count the failures of one loop in a row. `loop_name` names the loop in the log."""

    def __init__(self, loop_name: str, outages: Outages = of_this_node) -> None:
        self._loop_name, self._outages = loop_name, outages
        self._failures = 0
        self.pause_s = 0.0
        """Seconds to wait after a failed `call`."""

    def call(self, broker: WorkerBroker, verb: Callable[[], T]) -> T | None:
        """Return the result of the verb, or None after an error."""
        try:
            result = verb()
        except FaktoryError as error:
            self.pause_s = self.record_failure(error)
        except Exception:  # the loop must survive any error
            logger.exception("call of the broker failed loop=%s", self._loop_name)
            broker.close()
            self.pause_s = AFTER_BUG_S
        else:
            self.record_success()
            return result
        return None

    def record_failure(self, error: Exception) -> float:
        """Record a failure; return the seconds to wait before the next try.

        The pause is random between half of its maximum and the maximum, so that the workers of a node do not try in
        step.
        """
        self._outages.record_failure(self._loop_name, error)
        self._failures += 1
        # The exponent is bounded: in a long outage the power would be too large for a float.
        max_pause_s = min(FIRST_PAUSE_S * 2 ** min(self._failures - 1, 10), LONGEST_PAUSE_S)
        return random.uniform(max_pause_s / 2, max_pause_s)

    def record_success(self) -> None:
        """Record a success: the next failure starts with the shortest pause. Ends a piece of work of the loop."""
        self._failures = 0
        self._outages.record_success()
        sharing.give_back()
