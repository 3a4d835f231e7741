"""Queue the writers of a server in the order of their arrival, for a database that admits one writer at a time.

SQLite has no such queue: a writer that finds the database busy sleeps for up to 100 ms and tries again, so that a
thread with one transaction after another can keep a second thread waiting for seconds (933 ms were measured for BEAT).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

# Reentrant and without state, so all threads may share it.
NO_QUEUE = nullcontext()


class WriteQueue:
    """A reentrant lock that threads acquire in the order of their requests.

    It is reentrant because hooks that run after a commit may write again.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        thread_id = threading.get_ident()
        # Read without the mutex: only this thread writes its own id.
        if self._owner != thread_id:
            self._await_turn()
            self._owner = thread_id
        self._depth += 1

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        with self._mutex:
            self._owner = None
            if self._waiting:
                self._owner = -1  # no thread's id: the queue is taken until the next thread runs
                self._waiting.popleft().release()

    def _await_turn(self) -> None:
        with self._mutex:
            if self._owner is None:
                self._owner = -1
                return
            # One lock per waiting thread: a shared lock or condition does not wake threads in the order of arrival.
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()  # until the thread in front releases it


_queues: dict[str, WriteQueue] | None = None


def queue_writers() -> None:
    """Queue the writers of this process from now on.

    Only for processes with threads that are never interrupted by an exception: a thread of a worker that is interrupted
    between its turn and its transaction would keep the queue forever.
    """
    global _queues  # noqa: PLW0603  (a property of the process)
    _queues = {}


def _forget() -> None:
    global _queues  # noqa: PLW0603
    _queues = None


os.register_at_fork(after_in_child=_forget)  # the threads that it waits for do not exist in the child


def write_queue(database: str) -> AbstractContextManager[object]:
    """Return the queue of this process for a database, named by its file; one without effect if there is none."""
    return NO_QUEUE if _queues is None else _queues.setdefault(database, WriteQueue())
