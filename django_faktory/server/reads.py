"""Execute commands that only read: equal commands that wait together share one read (ADR 0031).

A read serves only commands that arrived before it began, so no answer is older than a write that this node has answered
(W22).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..brokers.base import Broker
from ..errors import FaktoryError
from .may_block import execute_each

KEPT = 64
"""Number of results that are kept for waiting commands; bounded because clients choose the names in QUEUE LATENCY."""

CHEAP_S = 0.001
"""Duration of a read that needs no rest, as most of TRACK GET and BATCH STATUS."""

REST = 10
"""Rest after a read as a multiple of its duration, up to `SHORT_REST_S`: polling takes a tenth of a connection."""

SHORT_REST_S = 0.1
"""A longer read is followed by a rest of its own duration: more would delay the answer of a slow read too much."""

LONG_REST_S = 1.0
"""Maximum rest after a read."""

DISCONNECTED = FaktoryError("the client has disconnected")

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A method of the broker and its arguments, which can be compared and hashed."""


class Read(NamedTuple):
    """One command; `arrived_at` is by the monotonic clock."""

    has_disconnected: Callable[[], bool]
    call: Call
    arrived_at: float


class Reads:
    """Executes sets of reads, in one thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._latest: dict[Call, tuple[float, Any]] = {}  # when its read began, and the result or error

    def execute(self, reads: Sequence[Read]) -> list[Any]:
        """Return a result or an error for each command; reads of disconnected clients are skipped."""
        connected = [read for read in reads if not read.has_disconnected()]
        self._read(dict.fromkeys(read.call for read in connected if not self._has_result(read)))
        results = {read.call: self._latest[read.call][1] for read in connected}
        for call in list(self._latest)[:-KEPT]:
            del self._latest[call]
        return [results.get(read.call, DISCONNECTED) for read in reads]

    def _has_result(self, read: Read) -> bool:
        return read.call in self._latest and self._latest[read.call][0] >= read.arrived_at

    def _read(self, calls: Collection[Call]) -> None:
        began_at = time.monotonic()
        results = execute_each(self._broker, [partial(method, *args) for method, args in calls])
        for call, result in zip(calls, results, strict=True):
            self._latest.pop(call, None)  # moved to the end: the first result is the oldest
            self._latest[call] = began_at, result


def compute_rest_s(ran_s: float) -> float:
    """Return how long the reads rest after a set that took `ran_s`; others then use the database and the GIL."""
    if ran_s < CHEAP_S:
        return 0.0
    return min(max(ran_s, min(REST * ran_s, SHORT_REST_S)), LONG_REST_S)
