"""`inline()`: runs jobs as soon as a worker could see them, in the test's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections, transaction

from ..brokers import get_broker
from ..brokers.atomic_tasks import is_in_transaction
from ..brokers.orm import OrmBroker
from ..tasks.batch import batch_committed
from ..tasks.compat import task_enqueued
from .draining import Ran, drain


@contextmanager
def inline(*, raise_errors: bool = False) -> Iterator[list[Ran]]:
    """Drain after each enqueue: at once outside of transactions, else when the outermost one commits.

    The transaction that TestCase opens around a test does not count. Because nothing commits inside of it, an atomic
    block of the test counts as committed when this context ends. Jobs that were ready before run too, because they
    precede the new ones in the queue. Yields the list of attempts, which grows; `raise_errors` is that of `drain`.
    """
    runs: list[Ran] = []
    runner = _InlineRunner(runs, raise_errors=raise_errors)
    # Both signals, because the commit of a batch can make a callback ready.
    for signal in (task_enqueued, batch_committed):
        signal.connect(runner.on_enqueued)
    try:
        yield runs
        runner.finish()
    finally:
        for signal in (task_enqueued, batch_committed):
            signal.disconnect(runner.on_enqueued)


class _InlineRunner:
    def __init__(self, runs: list[Ran], *, raise_errors: bool) -> None:
        self._runs = runs
        self._raise_errors = raise_errors
        self._is_running = False
        self._is_commit_pending = False

    def on_enqueued(self, **_: Any) -> None:
        """Handle the signal: a job may be ready."""
        broker = get_broker()
        alias = broker.alias if isinstance(broker, OrmBroker) else "default"
        if is_in_transaction(connections[alias]):
            self._is_commit_pending = True
            # As with a worker, which sees the job only after the commit.
            transaction.on_commit(self.run, using=alias)
        else:
            self.run()

    def finish(self) -> None:
        """Run jobs that wait for a commit that a test's transaction never performs."""
        if self._is_commit_pending:
            self.run()

    def run(self) -> None:
        """Drain, unless a task of the current drain enqueued this: the running loop will reach it."""
        if self._is_running:
            return
        self._is_running = True
        try:
            self._is_commit_pending = False
            self._runs += drain(raise_errors=self._raise_errors)
        finally:
            self._is_running = False
