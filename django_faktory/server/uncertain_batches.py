"""Batches of which it is unknown whether they are stored: the connection was lost, and the client got an error.

An orphan would keep its parent open until it expires. So it is removed: its id was drawn before the attempt, and no
client knows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from ..errors import BrokerUnavailable, FaktoryError

CHECK_AFTER_S = 1.0
CHECKS = 3
"""A commit may still be under way in the database when its client has gone."""

CHECK_AGAIN_S = 10.0

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
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(CHECK_AFTER_S, self._check)

    def stop(self) -> None:
        """Leave what is left to its expiry."""
        self._checks.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        bids = list(self._checks)
        self._withdraw(bids, lambda error: self._checked(bids, error))

    def _checked(self, bids: Collection[str], error: FaktoryError | None) -> None:
        if not isinstance(error, BrokerUnavailable):
            left = {bid: self._checks[bid] - 1 for bid in bids if bid in self._checks}
            self._checks = {bid: checks for bid, checks in (self._checks | left).items() if checks > 0}
        if self._checks and self._timer is None:
            is_new = isinstance(error, BrokerUnavailable) or CHECKS in self._checks.values()
            self._timer = self._loop.call_later(CHECK_AFTER_S if is_new else CHECK_AGAIN_S, self._check)
