"""Remove batches that may have been stored although the client got an error, after a lost database connection.

Such an orphan would keep its parent batch open until it expires. `UncertainBatches` removes it by its id, which was
chosen before the attempt. Removal is safe, since no client has received the id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from ..errors import BrokerUnavailable, FaktoryError

CHECK_EVERY_S = 2.0
CHECKS = 5
"""Checks of each batch: the database may still be committing after the connection was lost."""

MAX_AT_ONCE = 500
"""Maximum number of batches that one check removes."""

MAX_BATCHES = 10_000
"""Batches that are remembered; after a long outage the oldest are left to expire."""

Withdraw = Callable[[Collection[str], Callable[[FaktoryError | None], None]], None]


class UncertainBatches:
    """Uncertain batches of the node. `withdraw` calls `Broker.withdraw_batches` and passes an error or None on."""

    def __init__(self, withdraw: Withdraw, loop: asyncio.AbstractEventLoop) -> None:
        self._withdraw, self._loop = withdraw, loop
        self._checks: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, bid: str) -> None:
        """Remove this batch, if it is stored, once the database is available."""
        self._checks[bid] = CHECKS
        if len(self._checks) > MAX_BATCHES:
            del self._checks[next(iter(self._checks))]
        self._check_later()

    def stop(self) -> None:
        """Stop checking; remaining orphans are left to expire."""
        self._checks.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _check_later(self) -> None:
        if self._timer is None and self._checks:
            self._timer = self._loop.call_later(CHECK_EVERY_S, self._check)

    def _check(self) -> None:
        bids = list(self._checks)[:MAX_AT_ONCE]
        self._withdraw(bids, lambda error: self._on_checked(bids, error))

    def _on_checked(self, bids: Collection[str], error: FaktoryError | None) -> None:
        self._timer = None
        # While the database is unavailable a check does not count.
        for bid in () if isinstance(error, BrokerUnavailable) else bids:
            checks = self._checks.pop(bid, 0)
            if checks > 1:
                self._checks[bid] = checks - 1  # at the end, so that each batch gets its turn
        self._check_later()
