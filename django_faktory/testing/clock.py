"""Adjustable time for tests: moves `timezone.now()` and the broker's clock together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from unittest import mock

from django.utils import timezone

from ..brokers.orm import OrmBroker


class Clock:
    """Clock that runs `shift` ahead of the real one. While `shift` is None, the broker uses the database's clock."""

    def __init__(self) -> None:
        self._real = timezone.now  # a test may have frozen it: the frozen clock counts as the real one
        self.shift: timedelta | None = None

    def now(self) -> datetime:
        """Return the current time of this clock."""
        return self._real() + (self.shift or timedelta(0))

    def for_store(self) -> datetime | None:
        """Return the current time, or None for the database's clock if this one was not moved."""
        return None if self.shift is None else self.now()

    def move_to(self, moment: datetime) -> None:
        self.shift = moment - self._real()

    @contextmanager
    def install(self, broker: OrmBroker) -> Iterator[None]:
        """Make the broker and `timezone.now()` use this clock inside the block."""
        previous_clock = broker.clock
        broker.clock = self.for_store
        try:
            # Patched in the module, where `timezone.now()` is looked up; `from … import now` stays unpatched.
            with mock.patch.object(timezone, "now", self.now):
                yield
        finally:
            broker.clock = previous_clock
