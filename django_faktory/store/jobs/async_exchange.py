"""Send exchanges from the event loop, on a database connection that an idle thread lends (ADR 0021).

`LentConnection.begin` sends without blocking and returns a `SentExchange`, which the loop reads when the socket is
readable. Only exchanges that are one round trip take this path. If the reply needs further queries, `SentExchange.read`
returns a function that the connection's thread runs, because it may block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Generic, TypeVar

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.payloads import ExchangeReply
from ...errors import BrokerUnavailable
from .. import transactions
from ..dialects import dialect_of
from ..dialects.base import ClaimPlan, Dialect, LoopSession, PendingReply
from ..transactions import first_line
from .exchanges import NO_CLAIM, Exchange, execute
from .pushes import order_jobs

Result = TypeVar("Result")


def lend(connection: BaseDatabaseWrapper) -> LentConnection | None:
    """Return this idle connection of the calling thread for an event loop; None if the dialect cannot lend it now."""
    dialect = dialect_of(connection)
    session = dialect.lend(connection)
    return LentConnection(connection, dialect, session) if session else None


class LentConnection:
    """A connection that the event loop uses until its thread uses it again."""

    def __init__(self, connection: BaseDatabaseWrapper, dialect: Dialect, session: LoopSession) -> None:
        self.dialect = dialect
        self.connection, self._session = connection, session

    def begin(self, work: Exchange, on_result: Callable[[ExchangeReply], Result]) -> SentExchange[Result] | None:
        """Send an exchange without blocking; `on_result` converts its result.

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
        # The time limit covers the whole round trip: it is entered here and left by `SentExchange.read`.
        time_limit = transactions.limit_attempt(self.connection)
        time_limit.__enter__()
        try:
            jobs = order_jobs(work.jobs) if work.jobs else []
            pending = self._session.begin(jobs, work.acks, plan, work.context.now)
        except Error:  # an invalid value or a lost connection: the thread's attempt reports which
            pending = None
        except BaseException:
            time_limit.__exit__(None, None, None)
            raise
        if pending is None:
            time_limit.__exit__(None, None, None)
            return None
        return SentExchange(self.connection, work, plan, on_result, pending=pending, time_limit=time_limit)


class SentExchange(Generic[Result]):
    """An exchange that was sent. Call `read` when `fd` is readable, and `send` when it is writable unless `is_sent`."""

    def __init__(
        self,
        connection: BaseDatabaseWrapper,
        work: Exchange,
        plan: ClaimPlan,
        on_result: Callable[[ExchangeReply], Result],
        *,
        pending: PendingReply,
        time_limit: AbstractContextManager[object],
    ) -> None:
        self._connection, self._work, self._plan, self._on_result = connection, work, plan, on_result
        self._pending, self._time_limit, self.fd = pending, time_limit, pending.fd
        self.is_sent: bool = pending.is_sent
        """Whether the socket has accepted the whole message."""
        self.is_last = False
        """Whether more data followed the reply, such as the end of the connection: then return it to its thread."""

    def send(self) -> None:
        """Send more of the message. Never raises: the next `read` reports errors."""
        with suppress(Error):
            self._pending.send()
        self.is_sent = self._pending.is_sent

    def read(self) -> Result | Callable[[], Result] | None:
        """Return the converted result, or a function that the thread must run to get it, or None if more is to come.

        Never blocks and never raises; the returned function may do both.
        """
        try:
            reply = self._pending.read()
        except Error as error:
            self._time_limit.__exit__(None, None, None)
            if self._connection.connection.closed:
                return self._handle_lost_connection(error)
            # A failed statement undid the whole exchange. Run it again in the thread, which finds the failing command.
            return lambda: self._on_result(execute(self._work))
        if reply is None:
            return None
        self._time_limit.__exit__(None, None, None)
        self.is_last = self._pending.is_last
        if self._work.needs_no_query(self._plan, *reply):
            return self._on_result(self._work.conclude(self._plan, *reply))

        def finish() -> Result:
            try:
                result = self._work.conclude(self._plan, *reply)
            except BaseException:
                self._schedule_checks()
                raise
            return self._on_result(result)

        return finish

    def _handle_lost_connection(self, error: Error) -> Callable[[], Result]:
        """Schedule checks of the claim, and return the function that reports the lost connection.

        The exchange may or may not be committed.
        """
        self._schedule_checks()

        def raise_lost() -> Result:
            self._connection.close()
            raise BrokerUnavailable(f"database unavailable: {first_line(error)}") from error

        return raise_lost

    def _schedule_checks(self) -> None:
        # Without requests the exchange has claimed nothing.
        if self._plan.claim is not None and self._work.requests:
            self._work.context.claim_numbers.schedule_checks(self._plan.claim)
