"""The jobs a worker holds: waiting for a thread, or running. Hands them on and counts them; each leaves once.

Knows no broker. Its lock decides who reports a job that ends just when the worker gives up on it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

from ..payloads import Ack, Failure, Interruption, Reservation
from .pace import Pace

Report = Ack | Failure | Interruption

STUCK_S = 0.25
"""Jobs that no thread has begun for so long go back: another worker may be idle."""

MAX_UNREPORTED = 1000
"""Beyond this many ended jobs the broker does not know of, no new one is begun."""


class HeldJobs:
    """Shared by the thread that fetches, those that run jobs, and the one that reports."""

    def __init__(self, *, concurrency: int, read_ahead: int) -> None:
        self.finished: SimpleQueue[Report | None] = SimpleQueue()
        """Reports, in the order they came; None wakes the reader."""
        self.reports = 0
        """How many there were so far of jobs that ended by themselves."""
        self._waiting: SimpleQueue[Reservation | None] = SimpleQueue()
        self._held: dict[int, Reservation] = {}  # by id(): one jid may be held twice, by two attempts
        self._unlocking: set[str] = set()  # jobs with a lock whose ACK is on its way
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiters = 0  # threads that wait for `_changed`: unless there is one, no change is looked for
        self._pace = Pace(concurrency=concurrency, read_ahead=read_ahead)
        self._moved_at = time.monotonic()
        self._is_closed = False
        self._alone: Reservation | None = None  # no other job runs with it; kept until its end is reported
        self._is_alone_pending = False  # until the other jobs have ended
        self._overdue_at = 0.0
        self.on_end: Callable[[Reservation], None] | None = None
        """Hears of each job that has ended."""
        self._unreported: dict[int, Report] = {}  # by id(): ends that the broker does not know of
        self.lost_locks: set[int] = set()
        """Tokens of locks that were lost while their jobs were held."""

    def wait_for_room(self, timeout_s: float) -> int:
        """How many jobs may be fetched: waits up to `timeout_s` for there being room, then may answer 0."""
        with self._lock:
            self._wait_for(lambda: self._room() > 0, timeout_s)
            return self._room()

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until every job has ended; False when the time is over first."""
        with self._lock:
            return self._wait_for(lambda: not self._held, max(0.0, timeout_s))

    def _wait_for(self, is_true: Callable[[], bool], timeout_s: float) -> bool:
        self._waiters += 1
        try:
            return self._changed.wait_for(is_true, timeout_s)
        finally:
            self._waiters -= 1

    def is_empty(self) -> bool:
        """Whether no job waits or runs."""
        return not self._held

    def has_waiting(self) -> bool:
        """Whether some job has not been begun."""
        return not self._waiting.empty()

    def add(self, jobs: Sequence[Reservation]) -> bool:
        """Take jobs in. False, and nothing done, where it is too late for them or a job here runs alone."""
        with self._lock:
            if self._is_closed or self._alone is not None:
                return False
            self._held.update({id(job): job for job in jobs})
            self._moved_at = time.monotonic()
            self._pace.began(self._moved_at)
        for job in jobs:
            self._waiting.put(job)
        return True

    def add_alone(self, job: Reservation, *, wait_s: float) -> bool:
        """Take in a job that runs alone, and waits for the others to end for `wait_s` at most. False as in `add`.

        `settle_alone` is called until it has ended.
        """
        with self._lock:
            if self._is_closed or self._alone is not None:
                return False
            self._held[id(job)] = self._alone = job
            now = time.monotonic()
            self._is_alone_pending, self._overdue_at = True, now + wait_s
            self._pace.began(now)
        return True

    def settle_alone(self, *, is_reported: bool) -> None:
        """Begin the job that runs alone once no other is held, and make room again once it has ended.

        Neither before `is_reported`: the broker knows the end of each job that has ended. If the process died while
        it does not, the loss would be counted for a job that has done its work.
        """
        with self._lock:
            if self._alone is None or not is_reported:
                return
            if self._is_alone_pending and len(self._held) == 1:
                self._is_alone_pending = False
                self._moved_at = time.monotonic()
                self._waiting.put(self._alone)
            elif id(self._alone) not in self._held:
                self._alone = None
                self._changed.notify_all()

    def take_overdue(self) -> Reservation | None:
        """Take out the job that is to run alone, if the others have kept it waiting for too long."""
        return self._take_pending() if time.monotonic() >= self._overdue_at else None

    def report(self, report: Failure) -> None:
        """Pass on the report of a job that was taken out and not begun."""
        with self._lock:
            self.reports += 1
            self.finished.put(report)

    def in_queues(self) -> Counter[str]:
        """How many jobs of each queue are held."""
        with self._lock:
            return Counter(job.queue for job in self._held.values())

    def known(self) -> set[tuple[str, int]]:
        """Jid and attempt of each job that waits, runs, or has ended and is not reported yet."""
        with self._lock:
            known = {(job.jid, job.attempt) for job in self._held.values()}
            ended = [(report.jid, report.attempt) for report in self._unreported.values()]
            known.update((jid, attempt) for jid, attempt in ended if attempt is not None)
        return known

    def reported(self, reports: Iterable[Report]) -> None:
        """The broker knows of these ends, or will never take them."""
        with self._lock:
            for report in reports:
                self._unreported.pop(id(report), None)

    def locked(self) -> dict[int, Reservation]:
        """The jobs held that hold a lock, by its token."""
        with self._lock:
            held = {job.lock_token: job for job in self._held.values() if job.lock_token is not None}
        self.lost_locks.intersection_update(held)  # in place: tasks look at it
        return held

    def next(self) -> Reservation | None:
        """The next job to run; blocks. None: there will be no more."""
        job = self._waiting.get()
        self._moved_at = time.monotonic()
        return job

    def finish(self, job: Reservation, report: Report | None, *, ran_s: float) -> bool:
        """A job has ended; its report, if any, goes on. False, and nothing done, where it was given up before."""
        with self._lock:
            if self._held.pop(id(job), None) is None:
                return False
            self._pace.ended(ran_s)
            if report is not None:
                if job.lock_token is not None and isinstance(report, Ack):
                    self._unlocking.add(report.jid)
                self.reports += 1
                self._unreported[id(report)] = report
                self.finished.put(report)
            if self._waiters and (not self._held or self._room()):
                self._changed.notify_all()
        if self.on_end is not None:
            self.on_end(job)
        return True

    def held_locks(self, jids: Iterable[str]) -> bool:
        """Whether one of these, whose end the broker is about to be told of, held a lock. Asked once for each."""
        if not self._unlocking:
            return False
        found = self._unlocking.intersection(jids)
        self._unlocking -= found
        return bool(found)

    def take_stuck(self) -> list[Reservation]:
        """Take out jobs that wait where no thread has begun one for STUCK_S."""
        if not self.has_waiting() or time.monotonic() - self._moved_at < STUCK_S:
            return []
        with self._lock:
            self._pace.got_stuck()
        return self._take_waiting()

    def take_waiting(self) -> list[Reservation]:
        """Take out every job that no thread has begun."""
        pending = self._take_pending()
        return [*([pending] if pending else []), *self._take_waiting()]

    def _take_pending(self) -> Reservation | None:
        with self._lock:
            job = self._alone if self._is_alone_pending else None
            if job is not None:
                self._take_out(job)
            return job

    def _take_waiting(self) -> list[Reservation]:
        taken, ends = [], 0
        while True:
            try:
                job = self._waiting.get_nowait()
            except Empty:
                break
            if job is None:
                ends += 1
            else:
                taken.append(job)
        for _ in range(ends):
            self._waiting.put(None)
        with self._lock:
            for job in taken:
                self._take_out(job)
        return taken

    def abandon(self) -> list[Reservation]:
        """Give up on what still runs: its end will not be reported, and nothing is taken in any more."""
        with self._lock:
            self._is_closed = True
            left = list(self._held.values())
            self._held.clear()
            self._alone, self._is_alone_pending = None, False
            return left

    def end(self, threads: int) -> None:
        """Let so many threads know, each by one None, that no more jobs come."""
        for _ in range(threads):
            self._waiting.put(None)

    def _take_out(self, job: Reservation) -> None:
        del self._held[id(job)]
        if job is self._alone:
            self._alone, self._is_alone_pending = None, False
        self._changed.notify_all()

    def _room(self) -> int:
        if self._is_closed or self._alone is not None or self.finished.qsize() > MAX_UNREPORTED:
            return 0
        return self._pace.room(len(self._held), now=time.monotonic())
