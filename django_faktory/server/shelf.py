"""Jobs read ahead: a moment on the shelf, for the FETCHes that come next (ADR 0022)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from ..payloads import FetchRequest, Lease, Reservation

HOLD_S = 0.05
"""So long a job may lie there; then it goes back to its place in the queue."""

CROWD = 4
"""So many clients must have fetched in as long: fewer are answered from the database, each time."""

SEEN = 64
"""FETCHes that are remembered."""

LOW = 1
"""So few of a queue are left when more are asked for."""

TRUST_S = 0.1
"""So long a worker is taken for one that may have jobs, since the database said so."""

SHY_S = 60.0
"""So long nothing of a queue is read ahead in which priorities were used."""

MOST_SHY = 1000
"""So many queues in which priorities were used are remembered one by one; beyond, all queues are taken for such."""

BARREN = 4
"""So many jobs of a queue in succession had a lock or a limit: nothing of it is read ahead until a plain one comes."""


class Crowd:
    """Who fetched just now, and from where."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, str, int, str]] = deque(maxlen=SEEN)

    def saw(self, now: float, queue: str, client: int, wid: str) -> None:
        """This client asked for a job, of this queue before all others."""
        self._seen.append((now, queue, client, wid))

    def soon(self, now: float, queue: str) -> int:
        """How many more will ask for this queue's in half the time a job may lie; 0 where it is no crowd."""
        clients, asked, first = set(), 0, now
        for at, wanted, client, _ in reversed(self._seen):
            if now - at > HOLD_S:
                break
            clients.add(client)
            asked += wanted == queue
            first = at
        if len(clients) < CROWD:
            return 0
        return round(asked * HOLD_S / 2 / max(now - first, 0.001))

    def wids(self) -> set[str]:
        """The workers among them."""
        return {wid for _, _, _, wid in self._seen}


class Shelf:
    """What was read ahead, by queue, the oldest first. `most` of a queue; 0: nothing is read ahead."""

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
        """Queues of which jobs are on their way, and the epoch in which they were asked for."""
        self._out: dict[str, int] = {}
        """Queues that requests name which are under way, and how many do."""
        self._low: set[str] = set()
        self._returning: dict[str, int] = {}
        self._shy_until: dict[str, float] = {}
        self._all_shy_until = 0.0
        self._barren: dict[str, int] = {}
        """Queues whose last jobs were none that can be read ahead, and how many they were."""
        self._trusted_until: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._epoch = 0

    # --- who fetches ---

    def saw(self, request: FetchRequest, client: int) -> None:
        """Somebody fetches; `client` tells one connection from another."""
        if self._most and request.queues:
            self._crowd.saw(self._loop.time(), request.queues[0], client, request.wid)

    def take(self, request: FetchRequest) -> Reservation | None:
        """The next job of its first queue, handed out, if it is there."""
        return self._take(request.queues[:1], request.wid) if self._jobs else None

    def take_any(self, request: FetchRequest) -> Reservation | None:
        """`take`, of the first queue that has one: for who was told that the database has nothing."""
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
        if not jobs or now > self._trusted_until.get(wid, 0.0):
            return False
        return now - jobs[0][0] <= HOLD_S

    def distrust(self, wid: str) -> None:
        """This worker was told to take no more."""
        self._trusted_until.pop(wid, None)

    # --- who asks the database ---

    def asking(self, request: FetchRequest, beside: Collection[FetchRequest] = ()) -> FetchRequest | None:
        """What to ask of it for this request; `answered` is to be told what came. None: nothing yet, as jobs of its
        first queue are on their way here, or back, and those in the database come after them. They do not where they
        are claimed in the same turn: `beside` is what is asked there before."""
        if not self._most or not request.queues:
            return request
        now, queue = self._loop.time(), request.queues[0]
        goes_along = any(sent.ahead and sent.count and sent.queues[0] == queue for sent in beside)
        if self._is_moving(queue) and not goes_along:
            return None
        more = 0 if goes_along else self._more(now, queue)
        if queue in self._jobs:  # not for this one: is it a worker that may have jobs?
            return self._sent(
                FetchRequest(queues=(queue,), wid=request.wid, count=0, ahead=max(more, 1), lease=Lease.DELIVERY)
            )
        if more and queue in self._out:
            return None  # who asks now may be given what comes after that
        behind = (
            place
            for place, other in enumerate(request.queues)
            if place and (self._is_moving(other) or self._has(now, other, request.wid))
        )
        return self._sent(msgspec.structs.replace(request, queues=request.queues[: next(behind, None)], ahead=more))

    def asking_plainly(self, request: FetchRequest) -> FetchRequest:
        """What to ask for one that waited too long for jobs that are on their way."""
        return self._sent(request)

    def refills(self) -> list[FetchRequest]:
        """What to ask of it beside something else, because little is left."""
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
        """What was claimed for a request as it was sent, and what was read ahead with it."""
        _take_from(self._out, sent.queues)
        for job in (*claimed, *ahead[:1]):
            self._learn(job)
        if not sent.ahead:
            return
        epoch = self._asked.pop(sent.queues[0])
        if not ahead:
            return
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
        """Whoever asks ahead where there is nothing for it has those wait who fetch meanwhile."""
        if job.lock_key is None and job.passes is None:
            self._barren.pop(job.queue, None)
        else:
            if len(self._barren) >= SEEN:
                self._barren.clear()
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
            self._trusted_until.clear()  # who is there still is trusted again soon
        self._trusted_until.update(dict.fromkeys(wids, now + TRUST_S))

    # --- what goes back ---

    def makes_way(self, queues: Iterable[str]) -> None:
        """Jobs of a priority were stored there: they come before what lies here."""
        if not self._most:
            return
        until = self._loop.time() + SHY_S
        for queue in queues:
            self._shy_until.pop(queue, None)  # the order is that of the times
            self._shy_until[queue] = until
        while self._shy_until and (len(self._shy_until) > MOST_SHY or self._is_over(next(iter(self._shy_until)))):
            ended = self._shy_until.pop(next(iter(self._shy_until)))
            self._all_shy_until = max(self._all_shy_until, ended)
        self.clear()

    def _is_over(self, queue: str) -> bool:
        return self._shy_until[queue] <= self._loop.time()

    def clear(self) -> None:
        """Give all back, and what is still on its way."""
        self._epoch += 1
        gone = [job for jobs in self._jobs.values() for _, job in jobs]
        self._jobs.clear()
        self._give_back(gone)

    def close(self) -> None:
        """Give all back, and take no more."""
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
        """Jobs of these queues are back in the database, or lost to it."""
        _take_from(self._returning, set(queues))


# What a `Counter` does, each time a job is fetched, in a fifth of the time.


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
