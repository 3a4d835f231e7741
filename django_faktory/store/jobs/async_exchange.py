"""Send exchanges from the event loop, on a database connection that an idle thread lends (ADR 0021).

`LentConnection.begin` sends without blocking; the loop reads the result when the socket is readable. Only exchanges
that are one round trip take this path. If the reply needs further queries, the result is a function that the
connection's thread runs, because it may block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.in_flight import InFlightExchange
from ...core.payloads import ExchangeReply, Reservation
from ...errors import BrokerUnavailable
from .. import transactions
from ..database_errors import first_line
from ..dialects import dialect_of
from ..dialects.base import Dialect, LoopSession
from ..dialects.values import AckResult, ClaimPlan
from .exchanges import NO_CLAIM, Exchange, execute
from .pushes import order_jobs

Result = TypeVar("Result")
Completion = Callable[[], Result]
"""Completes an exchange in the thread that owns the connection. May block and raise."""


def lend(connection: BaseDatabaseWrapper) -> LentConnection | None:
    """Return this idle connection of the calling thread for an event loop; None if the dialect cannot lend it now."""
    dialect = dialect_of(connection)
    session = dialect.lend(connection)
    return LentConnection(connection, dialect, session) if session else None


class _Sent(NamedTuple):
    """What `LentConnection` needs of an exchange that it has sent."""

    work: Exchange
    plan: ClaimPlan
    on_result: Callable[[ExchangeReply], Any]
    time_limit: AbstractContextManager[object]

    def schedule_checks(self) -> None:
        """Schedule checks of the claim, whose outcome is unknown. Without requests nothing was claimed."""
        if self.plan.claim is not None and self.work.requests:
            self.work.context.claim_numbers.schedule_checks(self.plan.claim)


class LentConnection:
    """A connection that the event loop uses until its thread uses it again."""

    def __init__(self, connection: BaseDatabaseWrapper, dialect: Dialect, session: LoopSession) -> None:
        self.dialect = dialect
        self.connection, self._session = connection, session

    def begin(self, work: Exchange, on_result: Callable[[ExchangeReply], Result]) -> InFlightExchange[Result] | None:
        """Send an exchange without blocking; `on_result` converts its reply into the result.

        Return None, with nothing sent, if a thread must run the exchange.
        """
        if not work.is_one_transaction() or (work.acks and work.may_hand_off_lock()):
            return None
        if transactions.leads_to_old_primary(self.connection):
            return None
        plan = NO_CLAIM
        if work.requests:
            plan = work.plan(work.context.claim_numbers.number())
            if not plan.slots and work.wants_jobs():
                return None  # the plan depends on the number of waiting jobs, which is another query
        # The time limit covers the whole round trip: it is entered here and left when the reply or an error is read.
        time_limit = transactions.limit_attempt(self.connection)
        time_limit.__enter__()
        in_flight = None
        try:
            jobs = order_jobs(work.jobs) if work.jobs else []
            calls, convert = self.dialect.build_exchange(self.connection, jobs, work.acks, plan, work.context.now)
            sent = _Sent(work, plan, on_result, time_limit)
            in_flight = self._session.begin(calls, partial(self._on_rows, sent, convert), partial(self._on_error, sent))
        except Error:  # an invalid value or a lost connection: the thread's attempt reports which
            pass
        finally:
            if in_flight is None:
                time_limit.__exit__(None, None, None)
        return in_flight

    @staticmethod
    def _on_rows(
        sent: _Sent, convert: Callable[[Any], tuple[AckResult, list[Reservation]]], rows: Sequence[Any]
    ) -> Any:
        """Return the converted result, or the function that makes it with further queries."""
        sent.time_limit.__exit__(None, None, None)
        reply = convert(rows)
        if sent.work.needs_no_query(sent.plan, *reply):
            return sent.on_result(sent.work.conclude(sent.plan, *reply))

        def complete() -> Any:
            try:
                result = sent.work.conclude(sent.plan, *reply)
            except BaseException:
                sent.schedule_checks()
                raise
            return sent.on_result(result)

        return complete

    def _on_error(self, sent: _Sent, error: Error) -> Completion[Any]:
        """Return the function that executes the exchange again, or reports that the connection is lost."""
        sent.time_limit.__exit__(None, None, None)
        if not self.connection.connection.closed:
            # A failed statement undid the whole exchange. The thread runs it again, and finds the failing command.
            return lambda: sent.on_result(execute(sent.work))
        sent.schedule_checks()  # the exchange may or may not be committed

        def raise_lost() -> Any:
            self.connection.close()
            raise BrokerUnavailable(f"database unavailable: {first_line(error)}") from error

        return raise_lost
