"""Share reads between the callers of one process: at most one runs at a time, and its result is reused for a while.

The time grows with the cost of the read, so that polling takes at most a tenth of a database connection.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from django.db import connections

KEPT_S = 1.0
"""Minimum seconds a result is reused."""

COST = 10
"""A result is reused for this many times the duration of its read."""

MAX_READS = 64
"""Number of different reads that are kept; bounded because URLs choose what a page reads."""

T = TypeVar("T")


class Result(NamedTuple):
    """A result or an error, with the times at which its read began and ended."""

    value: Any
    error: Exception | None
    began_at: float
    ended_at: float

    @property
    def took_s(self) -> float:
        """Seconds that the read took."""
        return self.ended_at - self.began_at


class SharedRead(Generic[T]):
    """One read and its latest result. Thread-safe; callers that arrive while it runs wait for it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_reading = False
        self._latest: Result | None = None

    def get(self, read: Callable[[], T]) -> T:
        """Return the kept result if it is recent enough, otherwise the result of `read`.

        Raises the exception of `read`, also in the callers that waited.
        """
        called_at = time.monotonic()
        with self._condition:
            while (result := self._find_usable(called_at)) is None:
                if not self._is_reading:
                    self._is_reading = True
                    break
                self._condition.wait()
        if result is None:
            result = self._read(read)
        if result.error is not None:
            raise result.error
        value: T = result.value
        return value

    def _find_usable(self, called_at: float) -> Result | None:
        latest = self._latest
        # A read that began after the call is exact for this caller, however it ended.
        if latest is None or latest.began_at >= called_at:
            return latest
        if latest.error is not None:  # an error counts only for the callers that waited for it
            return latest if latest.ended_at >= called_at else None
        return latest if time.monotonic() - latest.began_at <= max(KEPT_S, COST * latest.took_s) else None

    def _read(self, read: Callable[[], T]) -> Result:
        began_at = time.monotonic()
        result = self._latest
        try:
            try:
                result = Result(read(), None, began_at, time.monotonic())
            except Exception as error:  # noqa: BLE001  (the callers that wait get it too)
                result = Result(None, error, began_at, time.monotonic())
        finally:
            with self._condition:
                self._latest = result
                self._is_reading = False
                self._condition.notify_all()
        return result


_lock = threading.Lock()
_reads: dict[tuple[str, Hashable], SharedRead[Any]] = {}


def shared(key: Hashable, read: Callable[[], T], *, using: str) -> T:
    """Return the result of `read`, or a recent one with the same key and database; see `SharedRead.get`.

    Inside a transaction, which may see uncommitted rows, only call `read`.
    """
    # The result must neither come from before this transaction's writes nor reach callers outside of it.
    if not _sees_committed_rows(using):
        return read()
    with _lock:
        shared_read = _reads.pop((using, key), None) or SharedRead()
        _reads[using, key] = shared_read  # moved to the end: the first key is the least recently used
        if len(_reads) > MAX_READS:
            del _reads[next(iter(_reads))]
    result: T = shared_read.get(read)
    return result


def _sees_committed_rows(using: str) -> bool:
    """Return whether a read on this thread's connection sees committed rows only.

    ATOMIC_REQUESTS is allowed: a transaction around a request changes nothing before a page shows its counts.
    """
    connection = connections[using]
    return not connection.in_atomic_block or bool(connection.settings_dict.get("ATOMIC_REQUESTS"))


def forget() -> None:
    """Drop all results. A forked process starts empty: a read that its parent was running would never end here."""
    # Another thread of the parent may have held its lock at the fork, so the child needs a new one.
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _reads.clear()


os.register_at_fork(after_in_child=forget)
