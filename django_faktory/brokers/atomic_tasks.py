"""Open the transaction of an atomic task or a step in this Django database (ADR 0007, 0051). Independent of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from django.db import Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..errors import CannotBegin, ConnectionLost, FaktoryError
from ..store import sharing
from ..store.database_errors import exceeds_session_limit, first_line
from ..store.transactions import replace_unusable_session
from .base import Transaction


@contextmanager
def atomic(alias: str) -> Iterator[Transaction]:
    """Open a transaction of this database; see `Broker.atomic`."""
    state = Transaction()
    with ExitStack() as stack:
        connection = _enter(stack, alias, state)
        session = connection.connection
        state.is_untouched = lambda: not state.is_nested and _is_untouched(connection)
        transaction.on_commit(partial(setattr, state, "is_committed", True), using=alias)
        leaving = stack.pop_all()
    try:
        with leaving:
            yield state
    except FaktoryError:  # raised on purpose: by the task, by a stop of it, or for its end
        raise
    except Exception as error:
        if not (state.is_nested or state.is_committed) and _was_lost(connection, session, error):
            raise ConnectionLost(first_line(error)) from error
        raise


def _enter(stack: ExitStack, alias: str, state: Transaction) -> BaseDatabaseWrapper:
    """Begin the transaction. Raises CannotBegin, whatever prevents that: the task is not at fault."""
    try:
        connection = connections[alias]
        state.is_nested = connection.in_atomic_block
        state.is_in_test = state.is_nested and not is_in_transaction(connection)
        if not state.is_nested:
            replace_unusable_session(connection)
        stack.enter_context(transaction.atomic(using=alias))
    except Exception as error:
        if state.is_nested:  # only the owner of the outer transaction can end it
            raise
        with suppress(Error):  # closing a broken connection may fail too; Django drops it anyway
            connections[alias].close()
        sharing.record(error)
        raise CannotBegin(f"database unavailable: {first_line(error)}") from error
    return connection


def is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether an atomic block is open that Django's TestCase has not opened around a test."""
    blocks = connection.atomic_blocks
    return bool(blocks) and not getattr(blocks[-1], "_from_testcase", False)


def _was_lost(connection: BaseDatabaseWrapper, session: Any, error: Exception) -> bool:
    """Return whether the server or the network has ended the session, so that the transaction was rolled back.

    Django replaces a session whose rollback fails. A task that closed it, or exceeded a limit of its session, is itself
    at fault.
    """
    return connection.connection is not session and not (
        connection.closed_in_transaction or exceeds_session_limit(error)
    )


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
