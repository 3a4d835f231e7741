"""Gets jobs while there are threads for them, and gives back those that were not begun. One thread's loop.

Knows no task. Brokers that answer at once are asked again when a hint comes or a poll is due; those that wait
themselves (`blocking`) are asked for one job after another, and nothing is given back to them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from random import Random

from ..brokers.base import Broker
from ..errors import FaktoryError
from ..logs import get_logger
from ..payloads import Ack, FetchRequest, Lease, Reservation
from ..wakeups import Listener, PollingListener
from . import suspects
from .held import STUCK_S, HeldJobs
from .patience import Patience
from .queue_order import QueueOrder

logger = get_logger(__name__)

DRAINED_LOOKS, DRAINED_PAUSE_S = 3, 0.1
"""So many fetches in a row that find nothing, so far apart, mean that nothing is ready."""

_UNLIMITED: Mapping[str, int] = {}


class Fetcher:
    """The loop; `run` is a thread's. It fetches while `may_fetch` says so.

    With `on_drained` it ends, and calls it, when nothing is ready or running. `is_reported`: whether the broker knows
    the end of each job that has ended.
    """

    def __init__(
        self,
        broker: Broker,
        held: HeldJobs,
        *,
        wid: str,
        order: QueueOrder,
        listen: Callable[[], Listener] | None,
        poll_interval_s: float,
        may_fetch: Callable[[], bool],
        on_drained: Callable[[], None] | None,
        at_most: Mapping[str, int] = _UNLIMITED,
        is_reported: Callable[[], bool] = lambda: True,
    ) -> None:
        self._broker = broker
        self._held = held
        self._wid = wid
        self._order = order
        self._listen = listen or PollingListener
        self._poll_interval_s = poll_interval_s
        self._may_fetch = may_fetch
        self._on_drained = on_drained
        self._at_most = at_most
        self._is_reported = is_reported
        if at_most:
            held.on_end = self._has_ended
        self._stopping = threading.Event()
        self._hints: Listener | None = None
        self._patience = Patience("fetch")
        self._looks = 0
        self._returning: list[Reservation] = []  # could not be given back yet
        self._giving_back = threading.Lock()
        self._rng = Random()
        self._fetching = threading.Lock()  # until what was fetched is held, or two would fetch for the same room

    def run(self) -> None:
        """Fetch until stopped or drained; then give back what no thread has begun."""
        self._hints = self._listen()
        try:
            while not self._stopping.is_set():
                self._round(self._hints)
        finally:
            self._hints.close()
            if not self._broker.blocking:
                self._give_back(self._held.take_waiting())
            self._broker.close()

    def stop(self) -> None:
        """End the loop; a fetch that waits at the broker ends in its own time."""
        self._stopping.set()
        if self._hints is not None:
            self._hints.close()

    def look_again(self) -> None:
        """Fetch at once: something has just become ready. From any thread."""
        if self._hints is not None:
            self._hints.ring()

    def acknowledge(self, acks: Sequence[Ack]) -> Sequence[FaktoryError | bool]:
        """Tell that these ended, from the thread that reports. If one of them held a lock, whoever waits for it is
        fetched in the same transaction: one commit for each job of a hot key instead of two (ADR 0015)."""
        if not self._held.held_locks(ack.jid for ack in acks) or not self._broker.hands_over:
            return self._broker.ack(acks)
        if not self._fetching.acquire(blocking=False):
            return self._broker.ack(acks)
        try:
            request = self._next_request(1 if len(acks) == 1 else None)
            if request is None:
                return self._broker.ack(acks)
            told = self._broker.exchange([], acks, [request])
            [jobs] = told.fetched
            if jobs:
                self._looks = 0
                self._take_in(jobs)
            return told.acked
        finally:
            self._fetching.release()

    def _next_request(self, most: int | None) -> FetchRequest | None:
        """What to fetch beside the reports; None where this is no time for it. A lone end frees one lock, and who waits
        for that is all that is asked for: what else is ready the loop has, or is about to get."""
        room = self._held.wait_for_room(0)
        if not room or self._broker.blocking or self._stopping.is_set() or not self._may_fetch():
            return None
        request = self._request(min(room, most or room))
        return request if request.queues else None

    def _round(self, hints: Listener) -> None:
        room = self._held.wait_for_room(STUCK_S)
        self._look_after_suspect()
        if not self._broker.blocking and self._give_back_stuck():
            return
        if not room:
            return
        if not self._may_fetch():
            self._stopping.wait(0.1)
            return
        was_idle = self._held.is_empty()
        with self._fetching:
            jobs = self._fetch(1 if self._broker.blocking else room)
            if jobs:
                self._looks = 0
                self._take_in(jobs)
        if jobs is None or len(jobs) == room or (jobs and self._at_most):
            return
        if self._on_drained is None:
            if not self._broker.blocking:
                poll_s = hints.poll_s(self._poll_interval_s)
                hints.wait(min(STUCK_S, poll_s) if self._held.has_waiting() else poll_s)
        elif not jobs and was_idle:
            self._end_or_look_again(self._on_drained)
        elif not jobs:  # a job that runs may make another, or hold a lock that others wait for
            hints.wait(min(DRAINED_PAUSE_S, self._poll_interval_s))

    def _end_or_look_again(self, on_drained: Callable[[], None]) -> None:
        # One look proves nothing: jobs whose rows somebody has just locked are passed over.
        self._looks += 1
        if self._looks < DRAINED_LOOKS and not self._broker.blocking:
            self._stopping.wait(DRAINED_PAUSE_S)
            return
        self._stopping.set()
        on_drained()

    def _fetch(self, count: int) -> list[Reservation] | None:
        """Fetch, or wait a while where that cannot be done just now: then None."""
        request = self._request(count)
        if not request.queues:
            return []
        try:
            [jobs] = self._broker.fetch([request])
        except FaktoryError as error:
            self._stopping.wait(self._patience.after(error))
            return None
        except Exception:  # a loop: says what happened, and goes on
            logger.exception("fetch failed wid=%s", self._wid)
            self._broker.close()
            self._stopping.wait(1.0)
            return None
        self._patience.rewarded()
        return jobs

    def _request(self, count: int) -> FetchRequest:
        """Ask for no more than is left of a limit for each worker; not of other queues either, since nobody knows yet
        which of them the jobs come from."""
        queues = self._order.draw(self._rng)
        if self._at_most:
            held = self._held.in_queues()
            left = {queue: most - held[queue] for queue, most in self._at_most.items()}
            queues = tuple(queue for queue in queues if left.get(queue, 1) > 0)
            count = min([count, *(left[queue] for queue in queues if queue in left)])
        return FetchRequest(queues=queues, wid=self._wid, count=count, lease=Lease.HEARTBEAT)

    def _has_ended(self, job: Reservation) -> None:
        if job.queue in self._at_most:
            self.look_again()

    def _take_in(self, jobs: Sequence[Reservation]) -> None:
        is_too_late = self._stopping.is_set() and not self._broker.blocking
        suspect = next((job for job in jobs if job.history and suspects.is_suspect(job)), None)
        if is_too_late:
            self._give_back(jobs)
        elif suspect is not None:
            self._take_in_alone(suspect, jobs)
        elif not self._held.add(jobs):
            self._give_back(jobs)

    def _take_in_alone(self, suspect: Reservation, jobs: Sequence[Reservation]) -> None:
        """Take in a job whose worker was lost twice, and give back the jobs that were fetched with it."""
        if not self._held.add_alone(suspect, wait_s=suspects.wait_s(suspect)):
            self._give_back(jobs)
            return
        logger.warning(
            "job will run alone, because its worker was lost twice before jid=%s jobtype=%s wid=%s",
            *(suspect.jid, suspect.jobtype, self._wid),
        )
        self._give_back([job for job in jobs if job is not suspect])

    def _look_after_suspect(self) -> None:
        self._held.settle_alone(is_reported=self._is_reported())
        if job := self._held.take_overdue():
            logger.warning("job runs alone and is put off, others did not end jid=%s wid=%s", job.jid, self._wid)
            self._held.report(suspects.put_off(job))

    def _give_back_stuck(self) -> bool:
        """Whether there were jobs that wait while none is begun. Those that could not be given back go along."""
        stuck = self._held.take_stuck()
        if stuck or self._returning:
            self._give_back(stuck)
        return bool(stuck)

    def _give_back(self, jobs: Sequence[Reservation]) -> None:
        """Now, or as soon as the broker can be asked again. From the threads that fetch and report."""
        with self._giving_back:
            returning, self._returning = [*self._returning, *jobs], []
        if not returning:
            return
        try:
            self._broker.release(returning)
        except Exception as error:  # noqa: BLE001  (a loop)
            # Not begun, and not run here: `bye` gives them back too, or the loss of this worker.
            logger.warning("jobs could not be given back yet count=%d error=%s", len(returning), error)
            with self._giving_back:
                self._returning += returning
