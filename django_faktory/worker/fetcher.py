"""Fetch jobs while threads have room for them, and release jobs that no thread has begun.

`Fetcher` is the loop of one thread. A broker that answers at once is asked again when a notification comes or a poll is
due. A `blocking` broker, whose FETCH waits for a job, is asked for one job at a time, and takes no jobs back.
Independent of tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from random import Random

from ..brokers.base import WorkerBroker
from ..core.logs import get_logger
from ..core.payloads import Ack, FetchRequest, Lease, Reservation
from ..errors import FaktoryError
from ..store.notifier import Listener, PollingListener
from ..store.outages import of_this_node
from . import suspects
from .job_buffer import UNBEGUN_S, JobBuffer
from .outage_pause import OutagePause
from .queue_order import QueueOrder
from .suspects import DEFAULT_SUSPECT_LIMITS, SuspectLimits

logger = get_logger(__name__)

DRAINED_FETCHES, DRAINED_PAUSE_S = 3, 0.1
"""A drain ends after this many empty fetches in a row, this many seconds apart."""

_UNLIMITED: Mapping[str, int] = {}


class Fetcher:
    """Fetch jobs in a loop while `may_fetch` returns True; `run` is the target of a thread.

    With `on_drained` the loop ends, and calls it, when no job is ready or running. `queue_limits` maps queues to the
    number of jobs that this worker may hold. `is_reported` returns whether the broker has recorded the end
    of each job that has ended.
    """

    def __init__(
        self,
        broker: WorkerBroker,
        buffer: JobBuffer,
        *,
        wid: str,
        order: QueueOrder,
        listen: Callable[[], Listener] | None,
        poll_interval_s: float,
        may_fetch: Callable[[], bool],
        on_drained: Callable[[], None] | None,
        queue_limits: Mapping[str, int] = _UNLIMITED,
        is_reported: Callable[[], bool] = lambda: True,
        suspect_limits: SuspectLimits = DEFAULT_SUSPECT_LIMITS,
    ) -> None:
        self._broker = broker
        self._buffer = buffer
        self._wid = wid
        self._order = order
        self._listen = listen or PollingListener
        self._poll_interval_s = poll_interval_s
        self._may_fetch = may_fetch
        self._on_drained = on_drained
        self._queue_limits = queue_limits
        self._is_reported = is_reported
        self._suspect_limits = suspect_limits
        if queue_limits:
            buffer.on_end = self._on_job_end
        self._stopping = threading.Event()
        self._listener: Listener | None = None
        self._outage_pause = OutagePause("fetch")
        self._empty_fetches = 0
        self._unreleased: list[Reservation] = []  # not released yet, because the broker failed
        self._release_lock = threading.Lock()
        self._rng = Random()
        self._fetching = threading.Lock()  # held until fetched jobs are stored: two threads must not fill the same room

    def run(self) -> None:
        """Fetch until stopped or drained; then release the jobs that no thread has begun."""
        self._listener = self._listen()
        try:
            while not self._stopping.is_set():
                self._run_round(self._listener)
        finally:
            self._listener.close()
            if not self._broker.blocking:
                self._release(self._buffer.take_waiting())
            self._broker.close()

    def stop(self) -> None:
        """End the loop. Does not interrupt a fetch that waits in a blocking broker."""
        self._stopping.set()
        if self._listener is not None:
            self._listener.close()

    def wake(self) -> None:
        """Fetch at once, because a job has just become ready. Safe from any thread."""
        if self._listener is not None:
            self._listener.wake()

    def acknowledge(self, acks: Sequence[Ack]) -> Sequence[FaktoryError | bool]:
        """Send these ACKs; called by the thread that reports. Returns one answer for each.

        If one of the jobs had a lock, the next job of that key is fetched in the same transaction: one commit instead
        of two for each job of a hot key (ADR 0015).
        """
        if not self._buffer.had_locks(ack.jid for ack in acks) or not self._broker.supports_lock_handoff:
            return self._broker.ack(acks)
        # The thread that fetches has this lock while it waits for the broker; reports must not wait for that.
        if not self._fetching.acquire(blocking=False):
            return self._broker.ack(acks)
        try:
            request = self._build_handoff_request(1 if len(acks) == 1 else None)
            if request is None:
                return self._broker.ack(acks)
            acked, jobs = self._broker.ack_and_fetch(acks, request)
            if jobs:
                self._empty_fetches = 0
                self._accept(jobs)
            return acked
        finally:
            self._fetching.release()

    def _build_handoff_request(self, limit: int | None) -> FetchRequest | None:
        """Build the fetch that goes with the ACKs; None if this worker cannot take a job now.

        A single ACK frees one lock, so only the job that waits for that lock is requested: the loop already has, or is
        about to fetch, the other ready jobs.
        """
        room = self._buffer.wait_for_room(0)
        if not room or self._broker.blocking or self._stopping.is_set() or not self._may_fetch():
            return None
        request = self._build_request(min(room, limit or room))
        return request if request.queues else None

    def _run_round(self, listener: Listener) -> None:
        room = self._buffer.wait_for_room(UNBEGUN_S)
        # Before the check of `room`: while a suspect is here there is no room, but the suspect must still be begun.
        self._check_suspect()
        if not self._broker.blocking and self._release_unbegun():
            return
        if not room:
            return
        if not self._may_fetch():
            # Until a BEAT is answered, see `Heartbeat.is_fresh`.
            self._stopping.wait(0.1)
            return
        # Before the fetch: a job that ends meanwhile may have enqueued another one. Its report may make one ready too:
        # the callback of a batch, or the next job of a lock.
        was_idle = self._buffer.is_empty() and self._is_reported()
        with self._fetching:
            # Read again: the thread that reports may have fetched jobs while this one waited for `_fetching`.
            room = self._buffer.wait_for_room(0)
            jobs = self._fetch(1 if self._broker.blocking else room) if room else []
            if jobs:
                self._empty_fetches = 0
                self._accept(jobs)
        # A full answer, or one cut by a limit of queues, means that more may be ready: fetch again at once.
        if jobs is None or len(jobs) == room or (jobs and self._queue_limits):
            return
        if self._on_drained is None:
            if not self._broker.blocking:
                poll_s = listener.poll_s(self._poll_interval_s)
                # Jobs that wait for a thread are released after UNBEGUN_S, so wake up by then.
                listener.wait(min(UNBEGUN_S, poll_s) if self._buffer.has_waiting() else poll_s)
        elif not jobs and was_idle:
            self._end_or_retry(self._on_drained)
        elif not jobs:  # a running job may enqueue another one, or have a lock that blocks other jobs
            listener.wait(min(DRAINED_PAUSE_S, self._poll_interval_s))

    def _end_or_retry(self, on_drained: Callable[[], None]) -> None:
        # One empty fetch proves nothing: a claim skips rows that another transaction has locked.
        self._empty_fetches += 1
        if self._empty_fetches < DRAINED_FETCHES and not self._broker.blocking:
            self._stopping.wait(DRAINED_PAUSE_S)
            return
        self._stopping.set()
        on_drained()

    def _fetch(self, count: int) -> list[Reservation] | None:
        """Fetch up to `count` jobs; None if the broker failed, after a pause."""
        request = self._build_request(count)
        if not request.queues:
            return []
        pause = self._outage_pause
        answers = pause.call(self._broker, lambda: self._broker.fetch([request]))
        if answers is None:
            self._stopping.wait(pause.pause_s)
            return None
        return answers[0]

    def _build_request(self, count: int) -> FetchRequest:
        """Build a FETCH that stays within the remaining per-worker limits of its queues.

        The smallest remaining limit bounds the whole request, since the queues the jobs will come from are unknown.
        """
        queues = self._order.draw(self._rng)
        if self._queue_limits:
            counts = self._buffer.count_by_queue()
            remaining = {queue: limit - counts[queue] for queue, limit in self._queue_limits.items()}
            queues = tuple(queue for queue in queues if remaining.get(queue, 1) > 0)
            count = min([count, *(remaining[queue] for queue in queues if queue in remaining)])
        return FetchRequest(queues=queues, wid=self._wid, count=count, lease=Lease.HEARTBEAT)

    def _on_job_end(self, job: Reservation) -> None:
        # A queue at its limit was left out of the latest fetch; it has room again.
        if job.queue in self._queue_limits:
            self.wake()

    def _accept(self, jobs: Sequence[Reservation]) -> None:
        # A blocking broker does not take jobs back, so a late job must still run.
        is_too_late = self._stopping.is_set() and not self._broker.blocking
        suspect = next((job for job in jobs if job.history and suspects.is_suspect(job)), None)
        if is_too_late:
            self._release(jobs)
        elif suspect is not None:
            self._accept_alone(suspect, jobs)
        elif not self._buffer.add(jobs):
            self._release(jobs)

    def _accept_alone(self, suspect: Reservation, jobs: Sequence[Reservation]) -> None:
        """Keep only the suspect, a job that lost its worker twice; release the jobs fetched with it."""
        if not self._buffer.add_alone(suspect, wait_s=suspects.wait_s(suspect, limits=self._suspect_limits)):
            self._release(jobs)
            return
        logger.warning(
            "job will run alone, because its worker was lost twice before jid=%s jobtype=%s wid=%s",
            *(suspect.jid, suspect.jobtype, self._wid),
        )
        self._release([job for job in jobs if job is not suspect])

    def _check_suspect(self) -> None:
        self._buffer.settle_alone(is_reported=self._is_reported())
        if job := self._buffer.take_overdue():
            logger.warning("job runs alone and is deferred, others did not end jid=%s wid=%s", job.jid, self._wid)
            self._buffer.report(suspects.defer_suspect(job))

    def _release_unbegun(self) -> bool:
        """Release jobs that no thread begins in time; return whether there were any.

        Jobs that an earlier call failed to release are released with them.
        """
        unbegun = self._buffer.take_unbegun()
        if unbegun or self._unreleased:
            self._release(unbegun)
        return bool(unbegun)

    def _release(self, jobs: Sequence[Reservation]) -> None:
        """Release these jobs, and the jobs of failed releases. If it fails, the next call releases them.

        Called by the threads that fetch and that report.
        """
        with self._release_lock:
            due, self._unreleased = [*self._unreleased, *jobs], []
        if not due:
            return
        try:
            self._broker.release(due)
        except Exception as error:  # noqa: BLE001  (the loop must survive)
            # These jobs will not run here. At worst `bye`, or the loss of this worker, returns them to their queues.
            of_this_node.record_failure("release", error)
            with self._release_lock:
                self._unreleased += due
