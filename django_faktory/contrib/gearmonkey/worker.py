"""The worker of the specification: `accept` functions, `work` on an input, `update` the progress. One job at a time.

For a standalone program. For a project's tasks use `runfaktory --gearmonkey`, which adds threads, time limits and a
graceful stop.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

from ...core.logs import get_logger
from ...errors import BrokerUnavailable, FaktoryError
from . import protocol
from .address import close, connect
from .maintenance import SWEEP_EVERY_S, MaintenanceLoop
from .notifications import ChannelListener
from .protocol import Status
from .redis_worker import BEATS_A_LEASE, LEASE_S, RedisWorker, ReservedJob
from .settings import url_of

logger = get_logger(__name__)

POLL_S = 1.0
RETRY_DELAY_S = 0.25


class Worker:
    """A worker for a program of its own: define `work` in a subclass, or pass a function to `accept`.

    `url` is as for `Client`. Other workers get its jobs if it sends no heartbeat for `lease_s` seconds; it looks for
    such jobs every `sweep_every_s` seconds.
    """

    def __init__(
        self, url: str | None = None, *, lease_s: float = LEASE_S, sweep_every_s: float = SWEEP_EVERY_S
    ) -> None:
        self.wid = secrets.token_hex(8)
        self._redis = connect(url_of(url))
        self._lease_s = lease_s
        self._sweep_every_s = sweep_every_s
        self._handlers: dict[str, Any] = {}
        self._redis_worker: RedisWorker | None = None
        self._current: ReservedJob | None = None
        self._stopping = threading.Event()
        self._listener: ChannelListener | None = None

    @property
    def job(self) -> tuple[str, str] | None:
        """Function and id of the current job, or None."""
        return self._current and (self._current.fn, self._current.id)

    def accept(self, fn: str, work: Any = None) -> None:
        """Accept jobs of this function; `work`, or else the method of this name, runs them. Call before `run`."""
        self._handlers[protocol.function_name(fn)] = work

    def work(self, input: bytes) -> Any:
        """Execute a job: the return value is the output, an exception the error."""
        raise NotImplementedError(
            f"{type(self).__name__}.work: expected a subclass to define it; it got {len(input)} bytes"
        )

    def update(self, dividend: int, divisor: int) -> None:
        """Store the progress of the current job. Raises ValueError unless 0 <= `dividend` <= `divisor`.

        An unreachable server is logged and ignored: the next update replaces this one.
        """
        dividend, divisor = protocol.progress(dividend, divisor)
        if self._redis_worker is not None and self._current is not None:
            try:
                self._redis_worker.update(self._current, dividend, divisor)
            except FaktoryError as error:
                logger.warning("could not report progress error=%s", error)

    def run(self) -> None:
        """Work until stopped. Raises ValueError, UnusableServer and BrokerUnavailable, at start only."""
        if not self._handlers:
            raise ValueError("run: expected at least one function; call accept first")
        redis_worker = self._redis_worker = RedisWorker(
            self._redis, list(self._handlers), wid=self.wid, lease_s=self._lease_s
        )
        redis_worker.open()
        redis_worker.register()
        self._listener = ChannelListener(self._redis, redis_worker.fns)
        maintenance = MaintenanceLoop(redis_worker, every_s=self._sweep_every_s)
        # Heartbeats need a thread: `work` may take longer than a lease.
        threads = [
            threading.Thread(target=self._beat, args=(redis_worker,), name="gearmonkey-beat", daemon=True),
            threading.Thread(target=maintenance.run, name="gearmonkey-maintenance", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            while not self._stopping.is_set():
                self._run_next(redis_worker, self._listener)
        finally:
            self.stop()
            maintenance.stop()
            for thread in threads:
                # Bounded: they are daemon threads and may be waiting for Redis.
                thread.join(POLL_S)
            self._shut_down(redis_worker)

    def stop(self) -> None:
        """Stop after the current job. May be called from any thread or a signal handler."""
        self._stopping.set()
        if self._listener is not None:
            self._listener.close()

    def _run_next(self, redis_worker: RedisWorker, listener: ChannelListener) -> None:
        try:
            jobs = redis_worker.take(1)
        except FaktoryError as error:
            logger.warning("no job could be taken error=%s", error)
            self._stopping.wait(RETRY_DELAY_S)
            return
        if not jobs:
            listener.wait(POLL_S)
        for job in jobs:
            self._current = job
            # `_current` is set until the end is reported, so that the lease is extended while Redis is unreachable.
            self._report_end(redis_worker, job, *self._execute(job))
            self._current = None

    def _execute(self, job: ReservedJob) -> tuple[Status, bytes]:
        try:
            work = self._handlers[job.fn] or self.work
            value = work(job.input)
            return Status.SUCCESS, b"" if value is None else protocol.encode(value)
        except Exception as error:  # noqa: BLE001  (whatever a job raises is its outcome)
            return Status.ERROR, protocol.error_text(error)

    def _report_end(self, redis_worker: RedisWorker, job: ReservedJob, status: Status, output: bytes) -> None:
        """Report the end of a job until the server has accepted it: finished work must not be repeated."""
        while True:
            try:
                if not redis_worker.finish(job, status, output):
                    logger.warning("job ended too late, it is no longer this worker's job=%s:%s", job.fn, job.id)
                return
            except BrokerUnavailable as error:
                logger.warning("could not report the end of a job yet job=%s:%s error=%s", job.fn, job.id, error)
                time.sleep(RETRY_DELAY_S)
            except FaktoryError as error:
                logger.error("the server refused an end job=%s:%s error=%s", job.fn, job.id, error)  # noqa: TRY400
                return

    def _beat(self, redis_worker: RedisWorker) -> None:
        while not self._stopping.wait(self._lease_s / BEATS_A_LEASE):
            try:
                redis_worker.register()
                current = self._current
                if current is not None:
                    redis_worker.extend([current])  # a job lost meanwhile is noticed when it ends
            except FaktoryError as error:
                logger.warning("heartbeat failed error=%s", error)
            except Exception:  # log and continue
                logger.exception("unexpected error in the heartbeat thread")

    def _shut_down(self, redis_worker: RedisWorker) -> None:
        try:
            # Otherwise clients would count this worker until its lease ends.
            redis_worker.unregister()
        except FaktoryError as error:
            logger.warning("this worker stays counted until its lease ends error=%s", error)
        close(self._redis)
