"""Notifications between the processes of one node, for databases that send none, such as MariaDB. Reads no job rows.

One pipe per process, made before the processes are forked, so that a restarted one can use the pipe of its predecessor.
Work of other nodes is found by polling.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from contextlib import suppress

from .base import Listener, wait_readable


class LocalPipes:
    """The pipes between `count` processes of a node. Create it in the parent process."""

    def __init__(self, count: int) -> None:
        self._pipes = [os.pipe() for _ in range(count)]
        for end in (end for pipe in self._pipes for end in pipe):
            os.set_blocking(end, False)

    def wake(self, queues: Collection[str] | None = None) -> None:  # noqa: ARG002
        """Wake all listeners of the node, from any of its processes, for any queue."""
        for _, write_end in self._pipes:
            # A full pipe has bytes that its reader has not seen yet: it wakes anyway.
            with suppress(BlockingIOError):
                os.write(write_end, b".")

    def listener(self, index: int) -> LocalPipeListener:
        """Return the listener of the process with this index."""
        return LocalPipeListener(self._pipes[index][0])

    def close(self) -> None:
        """Close the pipes once the node has ended."""
        for end in (end for pipe in self._pipes for end in pipe):
            os.close(end)


class LocalPipeListener(Listener):
    """Receives from its pipe. Several bytes that are read together count as one notification."""

    looks_twice = False  # no notification is dropped: each commit writes to the pipe

    def __init__(self, read_end: int) -> None:
        super().__init__()
        self._read_end = read_end
        self._closed = threading.Event()
        self._close_reader, self._close_writer = os.pipe()

    def close(self) -> None:
        """End the current wait and all later ones at once."""
        if not self._closed.is_set():
            self._closed.set()
            os.close(self._close_writer)  # end of file wakes the waiting thread

    def _wait_for_notification(self, timeout_s: float) -> bool:
        if self._closed.is_set():
            return False
        ready = wait_readable([self._read_end, self._close_reader], timeout_s)
        if self._closed.is_set() or self._read_end not in ready:
            return False
        with suppress(BlockingIOError):
            # Discards all pending bytes: one look covers them all.
            os.read(self._read_end, 65_536)
        return True

    def __del__(self) -> None:
        self.close()
        os.close(self._close_reader)
