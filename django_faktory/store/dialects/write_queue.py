"""Queue the writers of one process in the order of their arrival, for a database that admits one writer at a time.

SQLite has no such queue: a writer that finds the database busy sleeps for up to 100 ms and tries again, so that a
thread with one transaction after another can keep a second thread waiting for seconds.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from types import TracebackType


class WriteQueue:
    """A lock that threads get in the order in which they ask for it. Not reentrant."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_taken = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()  # until the thread in front releases it

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False


_queues: defaultdict[str, WriteQueue] = defaultdict(WriteQueue)
os.register_at_fork(after_in_child=_queues.clear)  # the threads that the parent's queues wait for do not exist here


def write_queue(database: str) -> WriteQueue:
    """Return the queue of this process for a database, named by its file."""
    return _queues[database]
