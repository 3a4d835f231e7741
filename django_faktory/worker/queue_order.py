"""In which order queues are asked: strictly as given, or by weight, drawn anew for each fetch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ..errors import InvalidPayload
from ..payloads import queue_name


class QueueOrder:
    """`["critical", "default"]` in that order; with a weight on any (`"critical:5"`), by weighted chance."""

    def __init__(self, specs: Sequence[str]) -> None:
        """Read names and weights; a name without one weighs 1. Raises InvalidPayload saying what was expected."""
        self._weights: dict[str, int] = {}
        self._is_weighted = False
        for spec in specs:
            name, colon, weight = spec.strip().partition(":")
            if not name or (colon and not (weight.isascii() and weight.isdigit() and int(weight) > 0)):
                raise InvalidPayload(
                    f'expected names of queues, each "name" or "name:weight" with a whole weight above 0, got {spec!r}'
                )
            self._weights[queue_name(name)] = int(weight or 1)
            self._is_weighted = self._is_weighted or bool(colon)
        if not self._weights:
            raise InvalidPayload("expected the name of at least one queue, got none")
        self.names = tuple(self._weights)

    def draw(self, rng: Random) -> tuple[str, ...]:
        """The order for one fetch. A queue comes first as often as its share of all weights says."""
        if not self._is_weighted:
            return self.names
        # The largest of u^(1/w) is a draw by weight, the second largest a draw from the rest, and so on.
        return tuple(sorted(self.names, key=lambda name: rng.random() ** (1 / self._weights[name]), reverse=True))
