"""The threads that run jobs, at most so many jobs at a time, sync and async together.

Hands the broker on, and asks it nothing. Whatever a job does, it ends exactly once.
"""

from __future__ import annotations

import logging
import threading
import time

from django.db import connections

from .. import payloads
from ..brokers.base import Broker
from ..payloads import Ack, Failure, Reservation
from .event_loop import EventLoop
from .execute import Execution, prepare
from .held import HeldJobs

logger = logging.getLogger(__name__)

End = Ack | Failure | BaseException | None
"""How a job ended: the report to send, what broke it outside its task, or nothing, where the broker knows already."""


class Executors:
    """`concurrency` threads, and an event loop beside them once an async task comes."""

    def __init__(self, broker: Broker, held: HeldJobs, *, concurrency: int) -> None:
        self._broker = broker
        self._held = held
        self._places = threading.Semaphore(concurrency)
        self._loop = EventLoop()
        self._threads = [
            threading.Thread(target=self._run, name=f"faktory-job-{number}", daemon=True)
            for number in range(concurrency)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def cancel_async(self) -> None:
        """Cancel the async tasks that run."""
        self._loop.cancel()

    def close(self, deadline: float) -> bool:
        """End the threads and the loop. False where some do not end by `deadline`: user code keeps them."""
        self._held.end(len(self._threads))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        has_ended = self._loop.close(max(0.1, deadline - time.monotonic()))
        return has_ended and not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        try:
            while True:
                self._places.acquire()
                job = self._held.next()
                if job is None:
                    self._places.release()
                    return
                self._perform(job)
        finally:
            connections.close_all()

    def _perform(self, job: Reservation) -> None:
        began_at = time.monotonic()
        try:
            execution = prepare(job)
            if isinstance(execution, Execution) and execution.is_async:
                self._loop.submit(execution.arun, lambda end: self._finish(job, end, began_at))
                return
            end: End = execution.run(self._broker) if isinstance(execution, Execution) else execution
        except Exception as error:  # noqa: BLE001  (a loop)
            end = error
        self._finish(job, end, began_at)

    def _finish(self, job: Reservation, end: End, began_at: float) -> None:
        ran_s = time.monotonic() - began_at
        report = _failure(job, end) if isinstance(end, BaseException) else end
        if self._held.finish(job, report, ran_s=ran_s):
            if isinstance(end, BaseException):
                logger.error("job ended outside its task jid=%s error=%r", job.jid, end, exc_info=end)
            logger.debug("job ended jid=%s seconds=%.3f", job.jid, ran_s)
        self._places.release()


def _failure(job: Reservation, error: BaseException) -> Failure:
    return payloads.failure(
        jid=job.jid,
        wid=job.wid,
        attempt=job.attempt,
        errtype=f"{type(error).__module__}.{type(error).__qualname__}",
        message=str(error),
    )
