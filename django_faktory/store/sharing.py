"""Share too few database connections among the threads and processes of a node.

While a database has refused a connection lately because there are too many, every thread of `runfaktory` returns its
connection after each piece of work, and nothing listens for notifications. Otherwise idle threads would keep the
connections that a thread with a job, or with the end of one, needs. Processes share the state by a piece of memory that
is created before they are forked.
"""

from __future__ import annotations

import mmap
import time
from contextlib import suppress

from django.db import Error, connections

from .database_errors import lacks_connections

SHARE_S = 60.0
"""Seconds after a refusal in which connections are shared."""

until = memoryview(mmap.mmap(-1, 8)).cast("d")
"""When sharing ends, on the clock of `time.monotonic`: `until[0]` is 0 unless there was a shortage. What runs for each
job checks that first, since a call would cost each job more."""


class _Process:
    shares = False


def enable() -> None:
    """Share the connections of this process when there are too few."""
    _Process.shares = True


def record(error: BaseException) -> None:
    """Record an error of a database; connections are shared from now on if it has too few of them."""
    if lacks_connections(error):
        record_shortage()


def record_shortage() -> None:
    """Share connections from now on, for `SHARE_S`."""
    until[0] = time.monotonic() + SHARE_S


def is_needed() -> bool:
    """Return whether this process should return its connections."""
    return _Process.shares and time.monotonic() < until[0]


def give_back() -> None:
    """Close this thread's connections, except those in a transaction, if connections are shared at present.

    Loops call it after each piece of work. Not after each transaction: hooks that run after its commit would reconnect.
    """
    if not is_needed():
        return
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            with suppress(Error):  # closing a broken connection may fail too; Django drops it anyway
                connection.close()
