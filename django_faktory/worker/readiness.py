"""Keep threads that cannot begin jobs from taking any, until the broker lets them begin one (`Readiness`; ADR 0025).

Independent of tasks and SQL.
"""

from __future__ import annotations

import threading
import time

from ..brokers.base import WorkerBroker
from ..errors import FaktoryError
from ..store import sharing
from ..store.outages import of_this_node
from .job_buffer import JobBuffer
from .outage_pause import OutagePause

PATIENCE_S = 5.0
"""Seconds that a job waits in its thread until it can begin; then it is released, for a worker that may be able to."""


PAUSE_S = 1.0
"""Seconds of `Readiness.pause`."""


class Readiness:
    """Wait for the broker in threads that cannot begin a job; the worker claims nothing for them meanwhile."""

    def __init__(self, broker: WorkerBroker, buffer: JobBuffer, *, patience_s: float = PATIENCE_S) -> None:
        self._broker = broker
        self._buffer = buffer
        self._patience_s = patience_s
        self._closing = threading.Event()

    def close(self) -> None:
        """End all waits, now and later. Safe from any thread."""
        self._closing.set()

    def wait_with_job(self, began_at: float) -> bool:
        """Wait until this thread can begin the job that it took at `began_at`; return False if that takes too long.

        The thread then has a connection, which also serves a task that begins no transaction.
        """
        return self._wait(began_at + self._patience_s)

    def wait_without_job(self) -> None:
        """Wait until this thread can begin a job, however long that takes."""
        with self._buffer.blocked_thread():
            self._wait(float("inf"))
        sharing.give_back()

    def pause(self) -> None:
        """Take no job for a moment, since something other than the broker keeps this process from beginning jobs."""
        with self._buffer.blocked_thread():
            self._closing.wait(PAUSE_S)

    def _wait(self, deadline: float) -> bool:
        outage_pause = OutagePause("jobs")
        while not self._closing.is_set() and time.monotonic() < deadline:
            try:
                with self._broker.atomic():
                    pass
            except FaktoryError as error:
                pause_s = outage_pause.record_failure(error)
            else:
                of_this_node.record_success()
                return True
            self._closing.wait(max(0.0, min(pause_s, deadline - time.monotonic())))
        return False
