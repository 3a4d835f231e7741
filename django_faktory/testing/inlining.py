"""`inline()`: jobs run as soon as a worker could see them, in the test's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections, transaction

from ..batches import batch_committed
from ..brokers import get_broker
from ..brokers.orm import OrmBroker
from ..compat import task_enqueued
from .draining import Ran, drain


@contextmanager
def inline(*, raise_errors: bool = False) -> Iterator[list[Ran]]:
    """Drain after each enqueue: at once outside of transactions, otherwise when the outermost one commits.

    The transaction that TestCase puts around a test does not count as one; since nothing commits inside of it, a block
    of the test's own is taken as committed when this one ends. What was ready before is run too: it is ahead in the
    queue. Gives the list of what ran, which grows.
    """
    ran: list[Ran] = []
    inlined = _Inline(ran, raise_errors=raise_errors)
    for signal in (task_enqueued, batch_committed):
        signal.connect(inlined.enqueued)
    try:
        yield ran
        inlined.finish()
    finally:
        for signal in (task_enqueued, batch_committed):
            signal.disconnect(inlined.enqueued)


class _Inline:
    def __init__(self, ran: list[Ran], *, raise_errors: bool) -> None:
        self._ran = ran
        self._raise_errors = raise_errors
        self._is_running = False
        self._waits = False

    def enqueued(self, **_: Any) -> None:
        """The signal: something may be ready."""
        broker = get_broker()
        alias = broker.alias if isinstance(broker, OrmBroker) else "default"
        if _is_open(alias):
            self._waits = True
            transaction.on_commit(self.run, using=alias)
        else:
            self.run()

    def finish(self) -> None:
        """Run what waits for a commit that a test's transaction never does."""
        if self._waits:
            self.run()

    def run(self) -> None:
        """Drain, unless a task that is drained just now enqueued this: it comes in its turn."""
        if self._is_running:
            return
        self._is_running = True
        try:
            self._waits = False
            self._ran += drain(raise_errors=self._raise_errors)
        finally:
            self._is_running = False


def _is_open(alias: str) -> bool:
    """Whether a transaction is open that is not the test's own."""
    blocks = connections[alias].atomic_blocks
    return bool(blocks) and not getattr(blocks[-1], "_from_testcase", False)  # Django's mark for those of TestCase
