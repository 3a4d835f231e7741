"""Define `LoopConnection`, a connection to the database that an event loop owns (ADR 0005)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class LoopConnection(Protocol):
    """An open connection that no thread uses any more. Once closed it stays closed."""

    connection: Any
    """Django's connection."""

    def start(self, loop: Any) -> None:
        """Use the connection on this loop from now on."""

    def is_usable(self) -> bool:
        """Return whether it can execute calls. Does not block."""

    async def execute(self, calls: Sequence[Any]) -> Any:
        """Execute calls of `Dialect.build_exchange` as one transaction, and return their rows; one set at a time.

        Raises Django's error. Unless a value or a statement failed, the connection is closed then.
        """

    def close(self) -> None:
        """Close the connection; idempotent."""


class InThread(Protocol):
    """Runs a function that may block in a thread, and returns its result."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...
