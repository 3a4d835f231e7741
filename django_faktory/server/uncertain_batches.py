"""Batches of which it is unknown whether they are stored: the connection was lost, and the client got an error.

An orphan would keep its parent open until it expires. So it is removed: its id was drawn before the attempt, and no
client knows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from ..errors import BrokerUnavailable, FaktoryError

CHECK_EVERY_S = 2.0
CHECKS = 5
"""A commit may still be under way in the database when its client has gone."""

MOST_AT_ONCE = 500
MOST_KNOWN = 10_000
"""After a long outage the oldest are left to their expiry."""

Withdraw = Callable[[Collection[str], Callable[[FaktoryError | None], None]], None]


class UncertainBatches:
    """Those of the node. `withdraw` carries out `Broker.withdraw_batches`, and calls back with its answer."""

    def __init__(self, withdraw: Withdraw, loop: asyncio.AbstractEventLoop) -> None:
        self._withdraw, self._loop = withdraw, loop
        self._checks: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, bid: str) -> None:
        """Remove this batch when the database can be reached, if it is stored."""
        self._checks[bid] = CHECKS
        if len(self._checks) > MOST_KNOWN:
            del self._checks[next(iter(self._checks))]
        self._check_later()

    def stop(self) -> None:
        """Leave what is left to its expiry."""
        self._checks.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _check_later(self) -> None:
        if self._timer is None and self._checks:
            self._timer = self._loop.call_later(CHECK_EVERY_S, self._check)

    def _check(self) -> None:
        bids = list(self._checks)[:MOST_AT_ONCE]
        self._withdraw(bids, lambda error: self._checked(bids, error))

    def _checked(self, bids: Collection[str], error: FaktoryError | None) -> None:
        self._timer = None
        for bid in () if isinstance(error, BrokerUnavailable) else bids:
            checks = self._checks.pop(bid, 0)
            if checks > 1:
                self._checks[bid] = checks - 1  # behind those with more checks to come
        self._check_later()
