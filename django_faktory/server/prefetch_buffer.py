"""Prefetch buffer: jobs claimed in advance answer the next FETCHes without a query (ADR 0026).

`PrefetchBuffer` keeps them per queue for at most `hold_s`, and only while at least `MIN_CLIENTS` clients fetch. The
database stores prefetched jobs as `working` with a negative claim number and a lease of 60 s, so a killed server loses
none of them. Only plain jobs of priority 0 are prefetched; order within a queue is kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from ..core.payloads import FetchRequest, Lease, Reservation
from .tuning import DEFAULT_TUNING, Tuning

MIN_CLIENTS = 4
"""Clients that must have fetched within `hold_s` for a prefetch; fewer are always answered from the database."""

MAX_REMEMBERED = 64
"""Number of recent FETCHes, trusted workers and unproductive queues that are remembered."""

PRIORITY_PAUSE_S = 60.0
"""Seconds without prefetch for a queue after a job with a priority was pushed to it."""

MAX_PAUSED_QUEUES = 1000
"""Queues with priorities that are remembered individually; beyond this number prefetch pauses for every queue."""

MAX_UNPRODUCTIVE = 4
"""Consecutive jobs of a queue with a lock or a limiter after which prefetch stops until a plain job is claimed."""


class FetchRate:
    """Estimate the FETCH rate of each queue from the last `MAX_REMEMBERED` FETCHes."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._seen: deque[tuple[float, str, int, str]] = deque(maxlen=MAX_REMEMBERED)

    def record_fetch(self, now: float, queue: str, client: int, wid: str) -> None:
        """Record a FETCH of a client whose first queue is `queue`."""
        self._seen.append((now, queue, client, wid))

    def expected_fetches(self, now: float, queue: str) -> int:
        """Return how many FETCHes of this queue to expect within half of `hold_s`.

        0 when fewer than `MIN_CLIENTS` clients fetched within `hold_s`.
        """
        clients, count, first = set(), 0, now
        for at, fetched_queue, client, _ in reversed(self._seen):
            if now - at > self._hold_s:
                break
            clients.add(client)
            count += fetched_queue == queue
            first = at
        if len(clients) < MIN_CLIENTS:
            return 0
        # Half of the hold time: the other half is margin, so that few jobs are released without having been fetched.
        return round(count * self._hold_s / 2 / max(now - first, 0.001))

    def wids(self) -> set[str]:
        """Return the wids of the remembered FETCHes; "" is for clients without a wid."""
        return {wid for _, _, _, wid in self._seen}


class PrefetchBuffer:
    """Prefetched jobs of each queue, oldest first. Used on the event loop only.

    `limit` caps the jobs of one queue; 0 disables prefetch. `assign_prefetched` assigns a job to a worker; `release`
    returns jobs to the database and must end in a call of `mark_returned`.
    """

    def __init__(
        self,
        *,
        limit: int,
        assign_prefetched: Callable[[Reservation, str], Reservation],
        release: Callable[[Sequence[Reservation]], None],
        loop: asyncio.AbstractEventLoop,
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        self._limit, self._assign_prefetched, self._release, self._loop = limit, assign_prefetched, release, loop
        self._hold_s, self._trust_s, self._low_watermark = tuning.hold_s, tuning.trust_s, tuning.low_watermark
        self._fetch_rate = FetchRate(tuning.hold_s)
        self._jobs: dict[str, deque[tuple[float, Reservation]]] = {}
        self._prefetching: dict[str, int] = {}
        """First queue of each running prefetch, with the epoch at its start (see `clear`)."""
        self._claiming: dict[str, int] = {}
        """Number of running claims that name each queue."""
        self._low: set[str] = set()
        """Queues to refill (see `Tuning.low_watermark`)."""
        self._returning: dict[str, int] = {}
        """Number of running releases that contain jobs of each queue."""
        self._paused_until: dict[str, float] = {}
        self._all_paused_until = 0.0
        self._unproductive: dict[str, int] = {}
        """Consecutive claimed jobs of each queue that had a lock or a limiter (see `MAX_UNPRODUCTIVE`)."""
        self._trusted_until: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._epoch = 0

    # --- FETCH ---

    def record_fetch(self, request: FetchRequest, client: int) -> None:
        """Record a FETCH for the rate estimate; `client` identifies the connection."""
        if self._limit and request.queues:
            self._fetch_rate.record_fetch(self._loop.time(), request.queues[0], client, request.wid)

    def take(self, request: FetchRequest) -> Reservation | None:
        """Deliver the oldest buffered job of the request's first queue, or return None."""
        if not self._jobs or not request.queues:
            return None
        return self._take(self._loop.time(), request.queues[0], request.wid)

    def take_any(self, request: FetchRequest) -> Reservation | None:
        """Deliver a buffered job of the first queue that has one, or return None.

        Only for requests for which the database has just found nothing: before that, `take` keeps the order of queues.
        """
        if self._jobs:
            now = self._loop.time()
            for queue in request.queues:
                if job := self._take(now, queue, request.wid):
                    return job
        return None

    def _take(self, now: float, queue: str, wid: str) -> Reservation | None:
        jobs = self._jobs.get(queue)
        if not jobs or not self._has_job_for(now, queue, wid):
            return None
        _, job = jobs.popleft()
        if len(jobs) <= self._low_watermark:
            self._low.add(queue)
        if not jobs:
            del self._jobs[queue]
        return self._assign_prefetched(job, wid)

    def _has_job_for(self, now: float, queue: str, wid: str) -> bool:
        jobs = self._jobs.get(queue)
        # The trust is checked per worker: a quiet worker must get no job, and only the database has its state.
        if not jobs or now > self._trusted_until.get(wid, 0.0):
            return False
        return now - jobs[0][0] <= self._hold_s  # `_release_old` may be late on a busy event loop

    def distrust(self, wid: str) -> None:
        """Stop delivering buffered jobs to this worker, which is quiet, ending or unknown."""
        self._trusted_until.pop(wid, None)

    # --- claims in the database ---

    def prepare_claim(
        self, request: FetchRequest, earlier_claims: Collection[FetchRequest] = ()
    ) -> FetchRequest | None:
        """Return the claim to send for this request, or None if the request has to wait.

        It has to wait while jobs of its first queue move to or from the buffer: these precede the jobs in the
        database. Jobs claimed in the same exchange need no wait; `earlier_claims` lists its earlier claims. Pass the
        result of the claim to `store_result`.
        """
        if not self._limit or not request.queues:
            return request
        now, queue = self._loop.time(), request.queues[0]
        is_alongside = bool(earlier_claims) and any(
            sent.prefetch and sent.count and sent.queues[0] == queue for sent in earlier_claims
        )
        if self._is_moving(queue) and not is_alongside:
            return None
        prefetch_count = 0 if is_alongside else self._prefetch_count(now, queue)
        # The buffer has jobs of the queue, but this worker is not trusted. The claim asks only whether it may have jobs
        # (count=0): a job from the database would overtake the buffered ones.
        if queue in self._jobs:
            return self._mark_sent(
                FetchRequest(
                    queues=(queue,), wid=request.wid, count=0, prefetch=max(prefetch_count, 1), lease=Lease.DELIVERY
                )
            )
        if prefetch_count and queue in self._claiming:
            return None  # a claim of the queue is running: this one could return jobs that come after its jobs
        # Ask only for queues up to the first one with jobs in the buffer or on their way: these jobs
        # precede all jobs of later queues.
        queues = request.queues
        for place, other in enumerate(queues[1:], 1):
            if self._is_moving(other) or self._has_job_for(now, other, request.wid):
                queues = queues[:place]
                break
        return self._mark_sent(msgspec.structs.replace(request, queues=queues, prefetch=prefetch_count))

    def prepare_plain_claim(self, request: FetchRequest) -> FetchRequest:
        """Return the claim for a request that waited too long for moving jobs: the request itself, without prefetch."""
        return self._mark_sent(request)

    def prepare_refills(self) -> list[FetchRequest]:
        """Return prefetches for queues that are low, to be added to an exchange that runs anyway."""
        if not self._low:
            return []
        now = self._loop.time()
        low, self._low = self._low, set()
        return [
            self._mark_sent(FetchRequest(queues=(queue,), count=0, prefetch=prefetch_count, lease=Lease.DELIVERY))
            for queue in low
            if not self._is_moving(queue)
            and queue not in self._claiming
            and (prefetch_count := self._prefetch_count(now, queue))
        ]

    def store_result(
        self, sent: FetchRequest, claimed: Sequence[Reservation], prefetched: Sequence[Reservation]
    ) -> None:
        """Store the result of a claim: `claimed` for its client, `prefetched` for the buffer."""
        _take_from(self._claiming, sent.queues)
        # All prefetched jobs are plain, so one of them suffices.
        for job in (*claimed, *prefetched[:1]):
            self._count_unproductive(job)
        if not sent.prefetch:
            return
        epoch = self._prefetching.pop(sent.queues[0])
        if not prefetched:
            return
        # `clear` or `close` ran while the prefetch was in flight: its jobs may be out of order or of a paused queue.
        if epoch != self._epoch or not self._limit:
            self._release_jobs(prefetched)
            return
        now = self._loop.time()
        self._trust(now, sent.candidate_wids)
        for job in prefetched:
            self._jobs.setdefault(job.queue, deque()).append((now, job))
        if self._timer is None:
            self._timer = self._loop.call_later(self._hold_s, self._release_old)

    def _count_unproductive(self, job: Reservation) -> None:
        """Count consecutive jobs that cannot be prefetched.

        A prefetch that finds no eligible job delays concurrent FETCHes, so `_prefetch_count` skips such queues.
        """
        if job.lock_key is None and job.permits is None:
            self._unproductive.pop(job.queue, None)
        else:
            if len(self._unproductive) >= MAX_REMEMBERED:
                self._unproductive.clear()  # bounded memory; counts of active queues grow again within a few claims
            self._unproductive[job.queue] = self._unproductive.get(job.queue, 0) + 1

    def _prefetch_count(self, now: float, queue: str) -> int:
        if (
            now < max(self._all_paused_until, self._paused_until.get(queue, 0.0))
            or self._unproductive.get(queue, 0) >= MAX_UNPRODUCTIVE
        ):
            return 0
        return max(0, min(self._limit, self._fetch_rate.expected_fetches(now, queue)) - len(self._jobs.get(queue, ())))

    def _is_moving(self, queue: str) -> bool:
        return queue in self._prefetching or queue in self._returning

    def _mark_sent(self, request: FetchRequest) -> FetchRequest:
        _add_to(self._claiming, request.queues)
        if not request.prefetch:
            return request
        self._prefetching[request.queues[0]] = self._epoch
        return msgspec.structs.replace(request, candidate_wids=tuple(self._fetch_rate.wids() | {request.wid}))

    def _trust(self, now: float, wids: Iterable[str]) -> None:
        if len(self._trusted_until) >= MAX_REMEMBERED:
            self._trusted_until.clear()  # bounded memory; active workers are trusted again with the next prefetch
        self._trusted_until.update(dict.fromkeys(wids, now + self._trust_s))

    # --- release ---

    def release_for_priority(self, queues: Iterable[str]) -> None:
        """Release all buffered jobs after a push with priorities; pause these queues for `PRIORITY_PAUSE_S`."""
        if not self._limit:
            return
        until = self._loop.time() + PRIORITY_PAUSE_S
        for queue in queues:
            self._paused_until.pop(queue, None)  # re-insert at the end: the dict stays ordered by time
            self._paused_until[queue] = until
        # Removed entries leave their end in `_all_paused_until`, which stops prefetch for every queue until then.
        while self._paused_until and (
            len(self._paused_until) > MAX_PAUSED_QUEUES or self._is_over(next(iter(self._paused_until)))
        ):
            ended = self._paused_until.pop(next(iter(self._paused_until)))
            self._all_paused_until = max(self._all_paused_until, ended)
        self.clear()

    def _is_over(self, queue: str) -> bool:
        return self._paused_until[queue] <= self._loop.time()

    def clear(self) -> None:
        """Release all buffered jobs, and the jobs of running prefetches when they arrive."""
        self._epoch += 1
        buffered = [job for jobs in self._jobs.values() for _, job in jobs]
        self._jobs.clear()
        self._release_jobs(buffered)

    def close(self) -> None:
        """Release all buffered jobs and disable prefetch for good."""
        self._limit = 0
        self.clear()

    def _release_old(self) -> None:
        self._timer = None
        old: list[Reservation] = []
        before = self._loop.time() - self._hold_s
        for queue, jobs in list(self._jobs.items()):
            while jobs and jobs[0][0] <= before:
                old.append(jobs.popleft()[1])
            if not jobs:
                del self._jobs[queue]
        self._release_jobs(old)
        if self._jobs:
            oldest = min(jobs[0][0] for jobs in self._jobs.values())
            self._timer = self._loop.call_later(max(oldest - before, 0.001), self._release_old)

    def _release_jobs(self, jobs: Sequence[Reservation]) -> None:
        if jobs:
            _add_to(self._returning, {job.queue for job in jobs})
            self._release(jobs)

    def mark_returned(self, queues: Iterable[str]) -> None:
        """Record that released jobs of these queues are back in the database, or that their release failed for good."""
        _take_from(self._returning, set(queues))


# Plain dicts: these run for each fetched job and take a fifth of the time of a `Counter`.


def _add_to(counts: dict[str, int], queues: Iterable[str]) -> None:
    for queue in queues:
        counts[queue] = counts.get(queue, 0) + 1


def _take_from(counts: dict[str, int], queues: Iterable[str]) -> None:
    for queue in queues:
        remaining = counts.get(queue, 0) - 1
        if remaining > 0:
            counts[queue] = remaining
        else:
            counts.pop(queue, None)
