"""Hints between the processes of one node: for databases that send none, such as MariaDB. Knows no job rows.

A pipe for each process, made before they are forked, so that one which is started anew hears its pipe too. Other nodes'
work is found by polling.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Collection
from contextlib import suppress

from .base import Listener


class Neighbours:
    """The pipes of a node with so many processes; make it in the parent."""

    def __init__(self, count: int) -> None:
        self._pipes = [os.pipe() for _ in range(count)]
        for end in (end for pipe in self._pipes for end in pipe):
            os.set_blocking(end, False)

    def ring(self, queues: Collection[str] | None = None) -> None:  # noqa: ARG002
        """Wake all that wait, whatever for. From any process of the node; a pipe that is full has been rung enough."""
        for _, bell in self._pipes:
            with suppress(BlockingIOError):
                os.write(bell, b".")

    def listener(self, place: int) -> NeighbourListener:
        """The ear of one of the processes."""
        return NeighbourListener(self._pipes[place][0])

    def close(self) -> None:
        """Let go of the pipes: the node has ended."""
        for end in (end for pipe in self._pipes for end in pipe):
            os.close(end)


class NeighbourListener(Listener):
    """Hears its pipe. Rings that came together are one hint."""

    looks_twice = False  # nothing is left out: each commit rings

    def __init__(self, heard: int) -> None:
        super().__init__()
        self._heard = heard
        self._closed = threading.Event()
        self._end, self._bell = os.pipe()

    def close(self) -> None:
        """See Listener."""
        if not self._closed.is_set():
            self._closed.set()
            os.close(self._bell)  # its reader is woken by that

    def _hear(self, timeout_s: float) -> bool:
        if self._closed.is_set():
            return False
        ready, _, _ = select.select([self._heard, self._end], [], [], timeout_s)
        if self._closed.is_set() or self._heard not in ready:
            return False
        with suppress(BlockingIOError):
            os.read(self._heard, 65_536)
        return True

    def __del__(self) -> None:
        self.close()
        os.close(self._end)
