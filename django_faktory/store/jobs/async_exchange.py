"""Send exchanges from the event loop, on a database connection that an idle thread lends (ADR 0021).

`begin` sends without blocking and returns an `InFlight`, which the loop reads when the socket is readable. Only
exchanges that are one round trip take this path. If the reply needs further queries, `InFlight.read` returns a function
that the connection's thread runs, because it may block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Generic, TypeVar

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from ...errors import BrokerUnavailable
from .. import transactions
from ..dialects import dialect_of
from ..dialects.base import Plan, Underway
from ..transactions import first_line
from .exchanges import Exchanged, Turn, carry_out

Told = TypeVar("Told")


def begin(connection: BaseDatabaseWrapper, turn: Turn, then: Callable[[Exchanged], Told]) -> InFlight[Told] | None:
    """Send a turn without blocking; `then` converts its result.

    Return None, with nothing sent, if a thread must run the turn.
    """
    dialect = dialect_of(connection)
    if not transactions.is_at_hand(connection) or not turn.is_one() or turn.may_be_relay(dialect):
        return None
    plan = turn.plan(turn.claiming.unanswered.number())
    if turn.asks() and not plan.slots:
        return None  # the plan depends on the number of waiting jobs, which is another query
    # The time limit covers the whole round trip: it is entered here and closed by `InFlight.read`.
    with ExitStack() as limit:
        limit.enter_context(transactions.around(connection))
        try:
            underway = dialect.begin(connection, turn.placed(), turn.acks, plan, turn.claiming.now)
        except Error:  # an invalid value or a lost connection: the thread's attempt reports which
            return None
        if underway is None:
            return None
        flight = InFlight(connection, turn, plan, then)
        flight.sent(underway, limit.pop_all())
        return flight


class InFlight(Generic[Told]):
    """A turn that was sent. Call `read` when `fd` is readable, and `send` when it is writable unless `is_sent`."""

    def __init__(
        self,
        connection: BaseDatabaseWrapper,
        turn: Turn,
        plan: Plan,
        then: Callable[[Exchanged], Told],
    ) -> None:
        self._connection, self._turn, self._plan, self._then = connection, turn, plan, then

    def sent(self, underway: Underway, limit: ExitStack) -> None:
        """Store the pending reply and the time limit, which `read` closes."""
        self._underway, self._limit, self.fd = underway, limit, underway.fd

    @property
    def is_sent(self) -> bool:
        """Whether the socket has accepted the whole message."""
        return self._underway.is_sent

    @property
    def is_last(self) -> bool:
        """Whether more data followed the reply, such as the end of the connection: then return it to its thread."""
        return self._underway.is_last

    def send(self) -> None:
        """Send more of the message. Never raises: the next `read` reports errors."""
        with suppress(Error):
            self._underway.send()

    def read(self) -> Told | Callable[[], Told] | None:
        """Return the converted result, or a function that the thread must run to get it, or None if more is to come.

        Never blocks and never raises; the returned function may do both.
        """
        try:
            found = self._underway.read()
        except Error as error:
            self._limit.close()
            if self._connection.connection.closed:
                return self._lost(error)
            # A failed statement undid the whole turn. Run it again in the thread, which finds the failing command.
            return lambda: self._then(carry_out(self._turn))
        if found is None:
            return None
        self._limit.close()
        if self._turn.ends_here(self._plan, *found):
            return self._then(self._turn.concluded(self._plan, *found))

        def rest() -> Told:
            try:
                told = self._turn.concluded(self._plan, *found)
            except BaseException:
                self._expect()
                raise
            return self._then(told)

        return rest

    def _lost(self, error: Error) -> Callable[[], Told]:
        """Schedule checks of the claim, and return the function that reports the lost connection.

        The turn may or may not be committed.
        """
        self._expect()

        def tell() -> Told:
            self._connection.close()
            raise BrokerUnavailable(f"database unavailable: {first_line(error)}") from error

        return tell

    def _expect(self) -> None:
        if self._plan.claim is not None and self._turn.requests:
            self._turn.claiming.unanswered.expect(self._plan.claim)
