"""Open the transaction of an atomic task in this Django database (ADR 0007). Independent of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from .base import Transaction


@contextmanager
def atomic(alias: str) -> Iterator[Transaction]:
    """Open a transaction of this database; see `Broker.atomic`."""
    state = Transaction()
    connection = connections[alias]
    state.is_nested = connection.in_atomic_block
    state.is_untouched = lambda: not state.is_nested and _is_untouched(connection)
    with transaction.atomic(using=alias):
        transaction.on_commit(partial(setattr, state, "is_committed", True), using=alias)
        yield state


def _is_untouched(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the transaction has run no statement, and has no commit hook except our own.

    PostgreSQL's drivers send BEGIN with the first statement, and report the transaction's status. With other databases
    the answer is unknown, and therefore False.
    """
    if connection.vendor != "postgresql" or connection.connection is None or connection.needs_rollback:
        return False
    # Django does not record whether a statement ran, so ask the driver. One hook is our own: it sets `is_committed`.
    is_begun = connection.connection.info.transaction_status != 0  # libpq's PQTRANS_IDLE
    return not is_begun and len(connection.run_on_commit) == 1
