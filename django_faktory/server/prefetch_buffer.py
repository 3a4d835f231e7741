"""Prefetch buffer: jobs claimed ahead of demand answer the next FETCHes without a query (ADR 0022).

`Shelf` keeps them per queue for at most `HOLD_S`, and only while at least `CROWD` clients fetch. The database stores
prefetched jobs as `working` with a negative claim number and a lease of 60 s, so a killed server loses none of them.
Only plain jobs of priority 0 are prefetched; order within a queue is kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from ..core.payloads import FetchRequest, Lease, Reservation

HOLD_S = 0.05
"""Seconds a job stays in the buffer before it is released to its old place in the queue."""

CROWD = 4
"""Clients that must have fetched within `HOLD_S` for a prefetch; fewer are always answered from the database."""

SEEN = 64
"""Number of recent FETCHes, trusted workers and unproductive queues that are remembered."""

LOW = 1
"""Refill when the buffer for a queue drops to this size."""

TRUST_S = 0.1
"""Seconds a worker may take jobs from the buffer after the database reported that it is neither quiet nor ending."""

SHY_S = 60.0
"""Seconds without prefetch for a queue after a job with a priority was pushed to it."""

MOST_SHY = 1000
"""Queues with priorities that are remembered individually; beyond this number every queue is treated as one."""

BARREN = 4
"""Consecutive jobs of a queue with a lock or a limiter after which prefetch stops until a plain job is claimed."""


class Crowd:
    """Estimate the FETCH rate of each queue from the last `SEEN` FETCHes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, str, int, str]] = deque(maxlen=SEEN)

    def saw(self, now: float, queue: str, client: int, wid: str) -> None:
        """Record a FETCH of a client whose first queue is `queue`."""
        self._seen.append((now, queue, client, wid))

    def soon(self, now: float, queue: str) -> int:
        """Return how many FETCHes of this queue to expect within half of `HOLD_S`.

        0 when fewer than `CROWD` clients fetched within `HOLD_S`.
        """
        clients, asked, first = set(), 0, now
        for at, wanted, client, _ in reversed(self._seen):
            if now - at > HOLD_S:
                break
            clients.add(client)
            asked += wanted == queue
            first = at
        if len(clients) < CROWD:
            return 0
        # Half of HOLD_S: the other half is margin, so that few jobs are released without having been fetched.
        return round(asked * HOLD_S / 2 / max(now - first, 0.001))

    def wids(self) -> set[str]:
        """Return the wids of the remembered FETCHes; "" is for clients without a wid."""
        return {wid for _, _, _, wid in self._seen}


class Shelf:
    """Prefetched jobs of each queue, oldest first. Used on the event loop only.

    `most` caps the jobs of one queue; 0 disables prefetch. `hand_out` assigns a job to a worker; `release` returns jobs
    to the database and must end in a call of `returned`.
    """

    def __init__(
        self,
        *,
        most: int,
        hand_out: Callable[[Reservation, str], Reservation],
        release: Callable[[Sequence[Reservation]], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._most, self._hand_out, self._release, self._loop = most, hand_out, release, loop
        self._crowd = Crowd()
        self._jobs: dict[str, deque[tuple[float, Reservation]]] = {}
        self._asked: dict[str, int] = {}
        """First queue of each running prefetch, with the epoch at its start (see `clear`)."""
        self._out: dict[str, int] = {}
        """Number of running claims that name each queue."""
        self._low: set[str] = set()
        self._returning: dict[str, int] = {}
        self._shy_until: dict[str, float] = {}
        self._all_shy_until = 0.0
        self._barren: dict[str, int] = {}
        """Consecutive claimed jobs of each queue that had a lock or a limiter (see `BARREN`)."""
        self._trusted_until: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._epoch = 0

    # --- FETCH ---

    def saw(self, request: FetchRequest, client: int) -> None:
        """Record a FETCH for the rate estimate; `client` identifies the connection."""
        if self._most and request.queues:
            self._crowd.saw(self._loop.time(), request.queues[0], client, request.wid)

    def take(self, request: FetchRequest) -> Reservation | None:
        """Deliver the oldest buffered job of the request's first queue, or return None."""
        return self._take(request.queues[:1], request.wid) if self._jobs else None

    def take_any(self, request: FetchRequest) -> Reservation | None:
        """Deliver a buffered job of the first queue that has one, or return None.

        Only for requests for which the database has just found nothing: before that, `take` keeps the order of queues.
        """
        return self._take(request.queues, request.wid) if self._jobs else None

    def _take(self, queues: Sequence[str], wid: str) -> Reservation | None:
        now = self._loop.time()
        queue = next((queue for queue in queues if self._has(now, queue, wid)), None)
        if queue is None:
            return None
        jobs = self._jobs[queue]
        _, job = jobs.popleft()
        if len(jobs) <= LOW:
            self._low.add(queue)
        if not jobs:
            del self._jobs[queue]
        return self._hand_out(job, wid)

    def _has(self, now: float, queue: str, wid: str) -> bool:
        jobs = self._jobs.get(queue)
        # The trust is checked per worker: a quiet worker must get no job, and only the database knows its state.
        if not jobs or now > self._trusted_until.get(wid, 0.0):
            return False
        return now - jobs[0][0] <= HOLD_S  # `_tidy` may be late on a busy event loop

    def distrust(self, wid: str) -> None:
        """Stop delivering buffered jobs to this worker, which is quiet, ending or unknown."""
        self._trusted_until.pop(wid, None)

    # --- claims in the database ---

    def asking(self, request: FetchRequest, beside: Collection[FetchRequest] = ()) -> FetchRequest | None:
        """Return the claim to send for this request, or None if the request has to wait.

        It has to wait while jobs of its first queue move to or from the buffer: they come before the jobs in the
        database. Jobs claimed in the same exchange need no wait; `beside` lists its earlier claims. Pass the result of
        the claim to `answered`.
        """
        if not self._most or not request.queues:
            return request
        now, queue = self._loop.time(), request.queues[0]
        goes_along = any(sent.ahead and sent.count and sent.queues[0] == queue for sent in beside)
        if self._is_moving(queue) and not goes_along:
            return None
        more = 0 if goes_along else self._more(now, queue)
        # The buffer has jobs of the queue, but this worker is not trusted. The claim asks only whether it may have jobs
        # (count=0): a job from the database would overtake the buffered ones.
        if queue in self._jobs:
            return self._sent(
                FetchRequest(queues=(queue,), wid=request.wid, count=0, ahead=max(more, 1), lease=Lease.DELIVERY)
            )
        if more and queue in self._out:
            return None  # a claim of the queue is running: this one could return jobs that come after its jobs
        # Ask only for queues up to the first one with jobs in the buffer or on their way: those come before all
        # jobs of later queues.
        behind = (
            place
            for place, other in enumerate(request.queues)
            if place and (self._is_moving(other) or self._has(now, other, request.wid))
        )
        return self._sent(msgspec.structs.replace(request, queues=request.queues[: next(behind, None)], ahead=more))

    def asking_plainly(self, request: FetchRequest) -> FetchRequest:
        """Return the claim for a request that waited too long for moving jobs: the request itself, without prefetch."""
        return self._sent(request)

    def refills(self) -> list[FetchRequest]:
        """Return prefetches for queues that are low, to be added to an exchange that runs anyway."""
        if not self._low:
            return []
        now = self._loop.time()
        low, self._low = self._low, set()
        return [
            self._sent(FetchRequest(queues=(queue,), count=0, ahead=more, lease=Lease.DELIVERY))
            for queue in low
            if not self._is_moving(queue) and queue not in self._out and (more := self._more(now, queue))
        ]

    def answered(self, sent: FetchRequest, claimed: Sequence[Reservation], ahead: Sequence[Reservation]) -> None:
        """Store the result of a claim: `claimed` for its client, `ahead` for the buffer."""
        _take_from(self._out, sent.queues)
        # All prefetched jobs are plain, so one of them suffices.
        for job in (*claimed, *ahead[:1]):
            self._learn(job)
        if not sent.ahead:
            return
        epoch = self._asked.pop(sent.queues[0])
        if not ahead:
            return
        # `clear` or `close` ran while the prefetch was in flight: its jobs may be out of order or of a paused queue.
        if epoch != self._epoch or not self._most:
            self._give_back(ahead)
            return
        now = self._loop.time()
        self._trust(now, sent.crowd)
        for job in ahead:
            self._jobs.setdefault(job.queue, deque()).append((now, job))
        if self._timer is None:
            self._timer = self._loop.call_later(HOLD_S, self._tidy)

    def _learn(self, job: Reservation) -> None:
        """Count consecutive jobs that cannot be prefetched.

        A prefetch that finds no eligible job delays concurrent FETCHes, so `_more` skips such queues.
        """
        if job.lock_key is None and job.passes is None:
            self._barren.pop(job.queue, None)
        else:
            if len(self._barren) >= SEEN:
                self._barren.clear()  # bounded memory; counts of active queues grow again within a few claims
            self._barren[job.queue] = self._barren.get(job.queue, 0) + 1

    def _more(self, now: float, queue: str) -> int:
        if now < max(self._all_shy_until, self._shy_until.get(queue, 0.0)) or self._barren.get(queue, 0) >= BARREN:
            return 0
        return max(0, min(self._most, self._crowd.soon(now, queue)) - len(self._jobs.get(queue, ())))

    def _is_moving(self, queue: str) -> bool:
        return queue in self._asked or queue in self._returning

    def _sent(self, request: FetchRequest) -> FetchRequest:
        _add_to(self._out, request.queues)
        if not request.ahead:
            return request
        self._asked[request.queues[0]] = self._epoch
        return msgspec.structs.replace(request, crowd=tuple(self._crowd.wids() | {request.wid}))

    def _trust(self, now: float, wids: Iterable[str]) -> None:
        if len(self._trusted_until) >= SEEN:
            self._trusted_until.clear()  # bounded memory; active workers are trusted again with the next prefetch
        self._trusted_until.update(dict.fromkeys(wids, now + TRUST_S))

    # --- release ---

    def makes_way(self, queues: Iterable[str]) -> None:
        """Release all buffered jobs, since jobs with a priority were stored; skip these queues for `SHY_S`."""
        if not self._most:
            return
        until = self._loop.time() + SHY_S
        for queue in queues:
            self._shy_until.pop(queue, None)  # re-insert at the end: the dict stays ordered by time
            self._shy_until[queue] = until
        # Removed entries leave their end in `_all_shy_until`, which stops prefetch for every queue until then.
        while self._shy_until and (len(self._shy_until) > MOST_SHY or self._is_over(next(iter(self._shy_until)))):
            ended = self._shy_until.pop(next(iter(self._shy_until)))
            self._all_shy_until = max(self._all_shy_until, ended)
        self.clear()

    def _is_over(self, queue: str) -> bool:
        return self._shy_until[queue] <= self._loop.time()

    def clear(self) -> None:
        """Release all buffered jobs, and those of running prefetches when they arrive."""
        self._epoch += 1
        gone = [job for jobs in self._jobs.values() for _, job in jobs]
        self._jobs.clear()
        self._give_back(gone)

    def close(self) -> None:
        """Release all buffered jobs and disable prefetch for good."""
        self._most = 0
        self.clear()

    def _tidy(self) -> None:
        self._timer = None
        old: list[Reservation] = []
        before = self._loop.time() - HOLD_S
        for queue, jobs in list(self._jobs.items()):
            while jobs and jobs[0][0] <= before:
                old.append(jobs.popleft()[1])
            if not jobs:
                del self._jobs[queue]
        self._give_back(old)
        if self._jobs:
            oldest = min(jobs[0][0] for jobs in self._jobs.values())
            self._timer = self._loop.call_later(max(oldest - before, 0.001), self._tidy)

    def _give_back(self, jobs: Sequence[Reservation]) -> None:
        if jobs:
            _add_to(self._returning, {job.queue for job in jobs})
            self._release(jobs)

    def returned(self, queues: Iterable[str]) -> None:
        """Note that released jobs of these queues are back in the database, or that their release failed for good."""
        _take_from(self._returning, set(queues))


# Plain dicts: these run for each fetched job and take a fifth of the time of a `Counter`.


def _add_to(counts: dict[str, int], queues: Iterable[str]) -> None:
    for queue in queues:
        counts[queue] = counts.get(queue, 0) + 1


def _take_from(counts: dict[str, int], queues: Iterable[str]) -> None:
    for queue in queues:
        left = counts.get(queue, 0) - 1
        if left > 0:
            counts[queue] = left
        else:
            counts.pop(queue, None)
