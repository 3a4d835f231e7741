"""Time as a test wants it: what `timezone.now()` tells, and what the broker writes down, moved together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from unittest import mock

from django.utils import timezone

from ..brokers.orm import OrmBroker


class Clock:
    """Goes on as the real one does, `shift` away from it; None: the real one, and the database's."""

    def __init__(self) -> None:
        self._real = timezone.now  # the test may have frozen it: that is the real one here
        self.shift: timedelta | None = None

    def now(self) -> datetime:
        """The moment it is."""
        return self._real() + (self.shift or timedelta(0))

    def for_store(self) -> datetime | None:
        """The same for the store's verbs, which ask the database where nothing was moved."""
        return None if self.shift is None else self.now()

    def move_to(self, moment: datetime) -> None:
        """Let it be `moment` now."""
        self.shift = moment - self._real()

    @contextmanager
    def ticking(self, broker: OrmBroker) -> Iterator[None]:
        """Everybody in this process goes by this clock."""
        before = broker.clock
        broker.clock = self.for_store
        try:
            with mock.patch.object(timezone, "now", self.now):
                yield
        finally:
            broker.clock = before
