"""Define `InFlightExchange`, by which the event loop reads what it sent to the database without waiting (ADR 0021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Result_co = TypeVar("Result_co", covariant=True)


class InFlightExchange(Protocol[Result_co]):
    """An exchange that was sent on a connection which its thread has lent to the event loop."""

    @property
    def fd(self) -> int:
        """Return the file descriptor; it is readable when a part of the answer has arrived."""

    @property
    def is_sent(self) -> bool:
        """Return whether the whole exchange was sent.

        If not, call `send` when `fd` is writable, then `read`.
        """

    def send(self) -> None:
        """Send the next part; never blocks. The next `read` reports a failure of the database."""

    def read(self) -> Result_co | Callable[[], Result_co] | None:
        """Return the result, or a callable that completes the exchange, or None until the answer is complete.

        The callable must run in the thread that owns the connection: it may block and raise. `read` itself does not
        block, and no failure of the database makes it raise.
        """

    @property
    def is_last(self) -> bool:
        """Return, after the read, whether more input followed the answer, such as the end of the connection.

        If so, only the thread that owns the connection may use it next.
        """
