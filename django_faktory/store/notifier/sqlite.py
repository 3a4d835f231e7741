"""Notifications on SQLite: `PRAGMA data_version` changes when another connection has committed. Reads no job rows.

On Linux inotify indicates when to poll: the file is written just before the commit becomes visible, so after a write
the listener polls at short, growing intervals. Elsewhere it polls at fixed intervals. Measured on a virtual machine
where waking up is expensive (110 µs per poll, 3 µs of it in SQLite): a poll every 40 ms costs 0.28 % of a CPU, every
5 ms 2 %. So it polls often only for a while after a change.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import suppress

from django.db import Error, connections

from ...core.logs import get_logger
from .base import Listener, wait_readable
from .inotify import FileWatch

logger = get_logger(__name__)

EAGER_S = 0.005
"""Interval of the looks for `EAGER_FOR_S` after a change, if writes are not watched."""

IDLE_S = 0.040
"""Interval of later looks, if writes are not watched."""

EAGER_FOR_S = 1.0

SOON_S = 0.000_25
"""First pause after a write: a commit that does not wait for the disk is visible by then."""

GROWTH = 1.5
"""Factor between successive pauses; a commit is seen late by at most this growth of its own duration."""

FINE_S = 0.001
"""Pauses shorter than this do not use `poll`, which counts milliseconds.

A write during such a pause is noticed at its end.
"""

LATE_S = 0.1
"""Longest of these pauses. A commit that takes three times as long is found by the regular look."""

REGULAR_LOOK_S = 1.0
"""Interval of the regular looks while writes are watched: the watched file may have been replaced by another one."""


class SqliteListener(Listener):
    """Watches one database file over its own connection. Every commit notifies, including those of this process."""

    looks_twice = False  # no notification is dropped: each commit is seen

    def __init__(self, alias: str, *, look_every_s: float = REGULAR_LOOK_S) -> None:
        super().__init__()
        self._alias = alias
        self._look_every_s = look_every_s
        self._closed = threading.Event()
        self._close_reader, self._close_writer = os.pipe()
        self._watch: FileWatch | None = None
        self._pause_s: float | None = None  # pause before the next look after a write; None: no write
        self._connection_lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._version: int | None = None
        self._changed_at = time.monotonic()
        self._is_broken = False

    def close(self) -> None:
        """End the current wait and all later ones at once, and close the connection."""
        if not self._closed.is_set():
            self._closed.set()
            os.close(self._close_writer)  # end of file wakes the waiting thread
        with self._connection_lock:
            self._disconnect()

    def _wait_for_notification(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._closed.is_set():
            if self._has_changed():
                self._changed_at = time.monotonic()
                return True
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            self._wait_for_next_look(remaining_s)
        return False

    def _wait_for_next_look(self, longest_s: float) -> None:
        """Wait until another look is worthwhile, or until closed."""
        watch = self._watch
        if watch is None:
            is_eager = time.monotonic() - self._changed_at < EAGER_FOR_S
            self._closed.wait(min(longest_s, EAGER_S if is_eager else IDLE_S))
        elif self._pause_s is not None and self._pause_s < FINE_S:
            self._closed.wait(min(longest_s, self._pause_s))
            self._pause_s *= GROWTH
        else:
            with suppress(ValueError):  # `close` in another thread has closed the watch since it was read
                pause_s = min(longest_s, self._pause_s or self._look_every_s)
                wait_readable([watch.fileno(), self._close_reader], pause_s)
            self._pause_s = self._pause_s * GROWTH if self._pause_s and self._pause_s < LATE_S else None

    def _has_changed(self) -> bool:
        """Return whether another connection committed since the last look.

        True at the first look, since earlier commits were not seen.
        """
        with self._connection_lock:
            if self._closed.is_set():
                return False
            try:
                version = self._read_version()
            except (sqlite3.Error, Error) as error:
                self._disconnect()
                if not self._is_broken:
                    logger.warning("no notifications from SQLite, polling until it can be read again error=%s", error)
                self._is_broken, self.receives_all = True, False
                return False
            self._is_broken, self.receives_all = False, True
            previous, self._version = self._version, version
            return version != previous

    def _read_version(self) -> int:
        # Cleared before the read, so that a write after it counts as new. The write may belong to a commit that is not
        # visible yet, even if another commit is.
        if self._watch is not None and self._watch.clear():
            self._pause_s = SOON_S
        is_new = self._connection is None
        if self._connection is None:
            wrapper = connections[self._alias].copy()
            self._connection = wrapper.get_new_connection(wrapper.get_connection_params())
            self._version = None  # data_version values of two connections are not comparable
        [version] = self._connection.execute("PRAGMA data_version").fetchone()
        if is_new:  # the read created the WAL file, which exists as long as this connection
            _, _, path = self._connection.execute("PRAGMA database_list").fetchone()
            with suppress(OSError):
                self._watch = FileWatch([path, f"{path}-wal"])
        return int(version)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def __del__(self) -> None:
        self.close()
        os.close(self._close_reader)
