"""Order in which queues are fetched: as given, or random by weight for each fetch (`QueueOrder`). Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from ..core.payloads import queue_name
from ..errors import InvalidPayload

_weight = re.compile(r"0*[1-9][0-9]{0,8}", re.ASCII)


class QueueOrder:
    """The order of `["critical", "default"]` is strict; a weight on any queue (`"critical:5"`) makes it random."""

    def __init__(self, specs: Sequence[str]) -> None:
        """Parse names and weights; a name without a weight has weight 1.

        Raises InvalidPayload for an invalid name or weight, or without any queue.
        """
        self._weights: dict[str, int] = {}
        self._is_weighted = False
        for spec in specs:
            name, colon, weight = spec.strip().partition(":")
            if not name or (colon and not _weight.fullmatch(weight)):
                raise InvalidPayload(
                    f'expected names of queues, each "name" or "name:weight" with a whole weight above 0, got {spec!r}'
                )
            self._weights[queue_name(name)] = int(weight or 1)
            self._is_weighted = self._is_weighted or bool(colon)
        if not self._weights:
            raise InvalidPayload("expected the name of at least one queue, got none")
        self.names = tuple(self._weights)

    def draw(self, rng: Random) -> tuple[str, ...]:
        """Return the queues in the order for one fetch.

        With weights, the probability that a queue comes first is its share of the sum of all weights.
        """
        if not self._is_weighted:
            return self.names
        # Weighted sampling without replacement: the largest u^(1/w) is a draw by weight, the second largest a draw from
        # the remaining queues.
        return tuple(sorted(self.names, key=lambda name: rng.random() ** (1 / self._weights[name]), reverse=True))
