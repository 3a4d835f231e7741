"""Store the jobs that a worker has, waiting for a thread or running (`JobBuffer`).

Each job is removed exactly once: if a job ends while the worker gives it up, the lock of `JobBuffer` decides which
thread reports it. Independent of the broker.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue

from ..core.payloads import Ack, Failure, Interruption, Reservation
from .prefetch_window import PrefetchWindow

Report = Ack | Failure | Interruption

UNBEGUN_S = 0.25
"""Jobs that no thread begins within this time are released: another worker may be idle."""

MAX_UNREPORTED = 1000
"""No job is fetched while more ended jobs than this are not reported to the broker."""


class JobBuffer:
    """The jobs of one worker, shared by the threads that fetch, run jobs, and report."""

    def __init__(self, *, concurrency: int, max_prefetch: int) -> None:
        self.finished: SimpleQueue[Report | None] = SimpleQueue()
        """Reports in order of arrival; None wakes the reader."""
        self.report_count = 0
        """Number of reports in `finished` so far, except those of abandoned jobs."""
        self._waiting: SimpleQueue[Reservation | None] = SimpleQueue()
        self._jobs: dict[int, Reservation] = {}  # keyed by id(): a worker may have two attempts of one jid
        self._unlocking: set[str] = set()  # jobs with a lock and an ACK that is not sent yet
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiters = 0  # threads that wait for `_changed`; notifying without one would cost every short job
        self._concurrency, self._blocked_threads = concurrency, 0
        self._prefetch_window = PrefetchWindow(concurrency=concurrency, max_prefetch=max_prefetch)
        self._progressed_at = time.monotonic()
        self._is_closed = False
        self._lone_job: Reservation | None = None  # the job that runs alone (W20); kept until its end is reported
        self._is_lone_job_pending = False  # until the other jobs have ended
        self._overdue_at = 0.0
        self.on_end: Callable[[Reservation], None] | None = None
        """Called with each job that has ended."""
        self._unreported: dict[int, Report] = {}  # keyed by id(): reports that the broker has not answered
        self.lost_locks: set[int] = set()
        """Tokens of locks that were lost while their jobs were here."""

    def wait_for_room(self, timeout_s: float) -> int:
        """Return how many jobs may be fetched; wait up to `timeout_s` while that is 0."""
        with self._lock:
            self._wait_for(lambda: self._room() > 0, timeout_s)
            return self._room()

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until every job has ended; return False after `timeout_s`."""
        with self._lock:
            return self._wait_for(lambda: not self._jobs, max(0.0, timeout_s))

    def _wait_for(self, is_true: Callable[[], bool], timeout_s: float) -> bool:
        self._waiters += 1
        try:
            return self._changed.wait_for(is_true, timeout_s)
        finally:
            self._waiters -= 1

    @contextmanager
    def blocked_thread(self) -> Iterator[None]:
        """Leave no room for the calling thread, which cannot run jobs at present, nor for prefetched jobs."""
        self._add_blocked(1)
        try:
            yield
        finally:
            self._add_blocked(-1)

    def _add_blocked(self, count: int) -> None:
        with self._lock:
            self._blocked_threads += count
            self._changed.notify_all()

    def is_empty(self) -> bool:
        """Return whether no job waits or runs."""
        return not self._jobs

    def has_waiting(self) -> bool:
        """Return whether a job waits for a thread."""
        return not self._waiting.empty()

    def add(self, jobs: Sequence[Reservation]) -> bool:
        """Store fetched jobs. Return False, without effect, if the buffer is closed or a job here runs alone."""
        with self._lock:
            if self._is_closed or self._lone_job is not None:
                return False
            self._jobs.update({id(job): job for job in jobs})
            self._progressed_at = time.monotonic()
            self._prefetch_window.record_fetch(self._progressed_at)
        # Only after `_jobs` has the jobs: a thread may end one before the next `put`.
        for job in jobs:
            self._waiting.put(job)
        return True

    def add_alone(self, job: Reservation, *, wait_s: float) -> bool:
        """Store a job that runs alone, once the other jobs have ended, within `wait_s`.

        Returns False as `add` does. Call `settle_alone` regularly until the job has ended.
        """
        with self._lock:
            if self._is_closed or self._lone_job is not None:
                return False
            self._jobs[id(job)] = self._lone_job = job
            now = time.monotonic()
            self._is_lone_job_pending, self._overdue_at = True, now + wait_s
            self._prefetch_window.record_fetch(now)
        return True

    def settle_alone(self, *, is_reported: bool) -> None:
        """Begin the job that runs alone when no other job is left; make room when it has ended.

        Does nothing until `is_reported`, which is True when the broker has recorded the end of every ended job: if the
        process died earlier, a job that has done its work would count a loss.
        """
        with self._lock:
            if self._lone_job is None or not is_reported:
                return
            if self._is_lone_job_pending and len(self._jobs) == 1:
                self._is_lone_job_pending = False
                self._progressed_at = time.monotonic()
                self._waiting.put(self._lone_job)
            elif id(self._lone_job) not in self._jobs:
                self._lone_job = None
                self._changed.notify_all()

    def take_overdue(self) -> Reservation | None:
        """Remove and return the job that should run alone if it has waited too long for the other jobs."""
        return self._take_pending() if time.monotonic() >= self._overdue_at else None

    def report(self, report: Failure) -> None:
        """Queue the report of a job that was removed without being begun."""
        with self._lock:
            self.report_count += 1
            self._unreported[id(report)] = report  # as in `finish`
            self.finished.put(report)

    def count_by_queue(self) -> Counter[str]:
        """Return how many jobs of each queue are here."""
        with self._lock:
            return Counter(job.queue for job in self._jobs.values())

    def held_attempts(self) -> set[tuple[str, int]]:
        """Return jid and attempt of each job that waits, runs, or has ended without being reported yet."""
        with self._lock:
            attempts = {(job.jid, job.attempt) for job in self._jobs.values()}
            # Without them a job that ended during an outage would lose its reservation and run again (ADR 0026).
            unreported = [(report.jid, report.attempt) for report in self._unreported.values()]
            attempts.update((jid, attempt) for jid, attempt in unreported if attempt is not None)
        return attempts

    def forget_reports(self, reports: Iterable[Report]) -> None:
        """Forget these reports: the broker has recorded them, or will never accept them."""
        with self._lock:
            for report in reports:
                self._unreported.pop(id(report), None)

    def jobs_with_locks(self) -> dict[int, Reservation]:
        """Return the jobs here that have a lock, by lock token."""
        with self._lock:
            jobs = {job.lock_token: job for job in self._jobs.values() if job.lock_token is not None}
        self.lost_locks.intersection_update(jobs)  # in place: tasks read the same set
        return jobs

    def take_next(self) -> Reservation | None:
        """Return the next job to run; block until there is one. None means that no more jobs come."""
        # `_progressed_at` is set without the lock: a lost update only delays `take_unbegun`.
        job = self._waiting.get()
        self._progressed_at = time.monotonic()
        return job

    def finish(self, job: Reservation, report: Report | None, *, ran_s: float) -> bool:
        """Remove an ended job and queue its report, if any.

        Returns False, without effect, if the job was given up before. Safe from any thread.
        """
        with self._lock:
            if self._jobs.pop(id(job), None) is None:
                return False
            self._prefetch_window.record_end(ran_s)
            if report is not None:
                if job.lock_token is not None and isinstance(report, Ack):
                    self._unlocking.add(report.jid)
                self.report_count += 1
                # Before `put`: the reporter may send and forget the report at once.
                self._unreported[id(report)] = report
                self.finished.put(report)
            if self._waiters and (not self._jobs or self._room()):
                self._changed.notify_all()
        if self.on_end is not None:
            # Outside the lock, so that the callback may take locks of its own.
            self.on_end(job)
        return True

    def had_locks(self, jids: Iterable[str]) -> bool:
        """Return whether one of these jobs had a lock. Called before their ACKs are sent.

        Returns True only once for each job.
        """
        # Nearly all jobs have no lock: they pay for this check only (ADR 0015).
        if not self._unlocking:
            return False
        matching = self._unlocking.intersection(jids)
        self._unlocking -= matching
        return bool(matching)

    def take_unbegun(self, *, after_s: float = UNBEGUN_S) -> list[Reservation]:
        """Remove and return waiting jobs if no thread has begun one for `after_s`."""
        if not self.has_waiting() or time.monotonic() - self._progressed_at < after_s:
            return []
        with self._lock:
            self._prefetch_window.record_unbegun()
        return self._take_waiting()

    def take_waiting(self) -> list[Reservation]:
        """Remove and return every job that no thread has begun."""
        pending = self._take_pending()
        return [*([pending] if pending else []), *self._take_waiting()]

    def _take_pending(self) -> Reservation | None:
        with self._lock:
            job = self._lone_job if self._is_lone_job_pending else None
            if job is not None:
                self._remove(job)
            return job

    def _take_waiting(self) -> list[Reservation]:
        jobs, end_marks = [], 0
        while True:
            try:
                job = self._waiting.get_nowait()
            except Empty:
                break
            if job is None:
                end_marks += 1
            else:
                jobs.append(job)
        # Each None ends one thread, so they are put back.
        for _ in range(end_marks):
            self._waiting.put(None)
        with self._lock:
            for job in jobs:
                self._remove(job)
        return jobs

    def abandon(self) -> list[Reservation]:
        """Give up all jobs and return them: later reports of them are dropped, and no further job is accepted."""
        with self._lock:
            self._is_closed = True
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._lone_job, self._is_lone_job_pending = None, False
            return jobs

    def end_threads(self, count: int) -> None:
        """Signal to this many threads, by one None each, that no more jobs come."""
        for _ in range(count):
            self._waiting.put(None)

    def _remove(self, job: Reservation) -> None:
        del self._jobs[id(job)]
        if job is self._lone_job:
            self._lone_job, self._is_lone_job_pending = None, False
        self._changed.notify_all()

    def _room(self) -> int:
        if self._is_closed or self._lone_job is not None or self.finished.qsize() > MAX_UNREPORTED:
            return 0
        if self._blocked_threads:
            return max(0, self._concurrency - self._blocked_threads - len(self._jobs))
        return self._prefetch_window.room(len(self._jobs), now=time.monotonic())
