"""The transaction of an atomic task, in this Django database (ADR 0007). Knows no job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from .base import Transaction


@contextmanager
def atomic(alias: str) -> Iterator[Transaction]:
    """Open it; see `Broker.atomic`."""
    told = Transaction()
    connection = connections[alias]
    told.is_nested = connection.in_atomic_block
    told.is_untouched = lambda: not told.is_nested and _is_untouched(connection)
    with transaction.atomic(using=alias):
        transaction.on_commit(partial(setattr, told, "is_committed", True), using=alias)
        yield told


def _is_untouched(connection: BaseDatabaseWrapper) -> bool:
    """Whether a transaction has neither a statement nor a hook beside our own. PostgreSQL's drivers begin it at the
    server with its first statement, and tell; elsewhere nobody knows."""
    if connection.vendor != "postgresql" or connection.connection is None or connection.needs_rollback:
        return False
    is_begun = connection.connection.info.transaction_status != 0  # libpq's PQTRANS_IDLE
    return not is_begun and len(connection.run_on_commit) == 1
