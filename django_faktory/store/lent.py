"""Exchanges on a connection that its thread has lent: sent and read by the event loop, which must not wait (ADR 0021).

Only what is one round trip goes this way. Whatever else comes to light on it is left to the thread, which may wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Generic, TypeVar

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from ..errors import BrokerUnavailable
from . import transactions
from .dialects import dialect_of
from .dialects.base import Plan, Underway
from .jobs import Exchanged, Turn, carry_out
from .transactions import first_line

Told = TypeVar("Told")


def begin(connection: BaseDatabaseWrapper, turn: Turn, then: Callable[[Exchanged], Told]) -> InFlight[Told] | None:
    """Send a turn, whose answer `then` is told; None where it cannot go this way, and nothing was done."""
    dialect = dialect_of(connection)
    if not transactions.is_at_hand(connection) or not turn.is_one() or turn.may_be_relay(dialect):
        return None
    plan = turn.plan(turn.claiming.unanswered.number())
    if turn.asks() and not plan.slots:
        return None  # who gets what takes a look at what waits
    with ExitStack() as limit:
        limit.enter_context(transactions.around(connection))
        try:
            underway = dialect.begin(connection, turn.placed(), turn.acks, plan, turn.claiming.now)
        except Error:  # a value that PostgreSQL does not take, a lost connection: the long way tells
            return None
        if underway is None:
            return None
        flight = InFlight(connection, turn, plan, then)
        flight.sent(underway, limit.pop_all())
        return flight


class InFlight(Generic[Told]):
    """A turn that was sent. `read` it when `fd` is readable; where not all `is_sent`, `send` when it is writable."""

    def __init__(
        self,
        connection: BaseDatabaseWrapper,
        turn: Turn,
        plan: Plan,
        then: Callable[[Exchanged], Told],
    ) -> None:
        self._connection, self._turn, self._plan, self._then = connection, turn, plan, then

    def sent(self, underway: Underway, limit: ExitStack) -> None:
        """It is on its way, for as long as the limit says."""
        self._underway, self._limit, self.fd = underway, limit, underway.fd

    @property
    def is_sent(self) -> bool:
        """Whether the socket took all of it."""
        return self._underway.is_sent

    @property
    def is_last(self) -> bool:
        """Whether its connection may have ended behind the answer."""
        return self._underway.is_last

    def send(self) -> None:
        """Send more. What goes wrong is told by `read`, which is due then."""
        with suppress(Error):
            self._underway.send()

    def read(self) -> Told | Callable[[], Told] | None:
        """What there is to tell; or what is left to do for it, in the thread; None while the answer is on its way."""
        try:
            found = self._underway.read()
        except Error as error:
            self._limit.close()
            if self._connection.connection.closed:
                return self._lost(error)
            return lambda: self._then(carry_out(self._turn))  # it was not carried out; the thread finds out why
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
        """Perhaps it was carried out, perhaps not."""
        self._expect()

        def tell() -> Told:
            self._connection.close()
            raise BrokerUnavailable(f"database unavailable: {first_line(error)}") from error

        return tell

    def _expect(self) -> None:
        if self._plan.claim is not None and self._turn.requests:
            self._turn.claiming.unanswered.expect(self._plan.claim)
