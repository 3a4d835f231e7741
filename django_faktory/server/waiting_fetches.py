"""Queue of waiting FETCHes: blocked in memory, not in the database. One claim serves many of them.

`Fetchers` tries a FETCH when it arrives, when a notification names one of its queues, and at each poll; in between it
costs nothing. The queue names in one claim are bounded, and FETCHes with many names take turns, so that they delay no
FETCH with few. With the ACK of a job that had a lock, one waiting FETCH is tried in the same transaction, which passes
the lock to the next job (ADR 0015). Rules: W13 to W15.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from math import inf

from ..core.payloads import FetchRequest, Reservation
from ..errors import FaktoryError
from .exchange_batch import Item
from .fetch_index import Fetcher, FetchIndex
from .group_commit import Lane
from .prefetch_buffer import Shelf

WAIT_S = 2.0
"""Seconds after which a FETCH without a job is answered with null (W13)."""

PATIENCE_S = 1.0
"""A FETCH waits 1 to 1.5 times this for jobs that move to or from the prefetch buffer, then claims other jobs."""

MOST_HOLDERS = 10_000
"""Delivered jobs with locks that are remembered; the ACK of an older one triggers no claim in its transaction."""

FetchLane = Lane[Item, "list[Reservation]"]


class _Claim:
    """FETCHes that are tried with one claim; `left` counts those without an answer."""

    __slots__ = ("left", "unwanted")

    def __init__(self, left: int) -> None:
        self.left = left
        self.unwanted: list[Reservation] = []
        """Jobs claimed for clients that have disconnected since; released when the claim is complete."""


class Fetchers:
    """All waiting FETCHes of the node, in order of arrival. Used on the event loop only.

    At most `width` claims run at a time. `release` returns jobs to the database.
    """

    def __init__(
        self,
        lane: FetchLane,
        shelf: Shelf,
        *,
        width: int,
        release: Callable[[list[Reservation]], None],
        poll_s: float,
        loop: asyncio.AbstractEventLoop,
        hands_over: bool = False,
    ) -> None:
        self._lane, self._shelf, self._loop, self._release, self._poll_s = lane, shelf, loop, release, poll_s
        self._hands_over = hands_over
        self._waiting = FetchIndex()
        self._claims_free = width
        self._poll: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._hinted: set[str] | None = set()  # None: all queues
        self._is_called = False
        self._is_stopping = False
        self._held: dict[Fetcher, tuple[str, float]] = {}
        """FETCHes that wait for jobs moving to or from the buffer: their first queue, and until when."""
        self._holders: dict[str, str] = {}  # jid of each delivered job with a lock -> its queue

    def add(self, fetcher: Fetcher) -> None:
        """Try this FETCH now; if it gets no job, keep it for up to two seconds."""
        if self._waiting.add(fetcher):
            self._claim()
        else:
            self._park(fetcher)

    def leave(self, fetcher: Fetcher) -> None:
        """Drop the FETCH of a disconnected client; a job that is being claimed for it is released at once (W14)."""
        fetcher.is_gone = True
        if fetcher in self._waiting:
            self._forget(fetcher)

    def wake(self, queues: Collection[str] | None = None) -> None:
        """Try the FETCHes of these queues soon, since there may be work; None means all queues."""
        if not self._waiting:
            return
        if queues is None:
            self._hinted = None
        elif self._hinted is not None:
            self._hinted.update(queues)
        self._call()

    def _call(self) -> None:
        if not self._is_called:
            self._is_called = True
            self._loop.call_soon(self._take_hints)  # one claim for all jobs that a transaction stored

    def before_turn(self) -> None:
        """Submit refills of the prefetch buffer: an exchange is about to run anyway, so they cost no round trip."""
        for sent in self._shelf.refills():
            self._lane.submit(sent, partial(self._refilled, sent))

    def _refilled(self, sent: FetchRequest, told: list[Reservation] | FaktoryError) -> None:
        self._shelve(sent, told)
        self._claim()

    def _shelve(self, sent: FetchRequest, told: list[Reservation] | FaktoryError) -> list[Reservation]:
        """Store prefetched jobs in the buffer and return the other claimed jobs."""
        found = [] if isinstance(told, FaktoryError) else told
        ahead = [job for job in found if job.is_ahead]
        if ahead:
            found = found[: -len(ahead)]  # the broker lists prefetched jobs last
        self._shelf.answered(sent, found, ahead)
        self._let_go(sent.queues)
        if ahead:
            self.wake({job.queue for job in ahead})
        return found

    def before_ack(self, jid: str) -> None:
        """Try the longest waiting FETCH of this job's queue along with its ACK, if the job has a lock."""
        queue = self._holders.pop(jid, None)
        if queue is not None and self._waiting.mark_first_idle(queue):
            self._claim()

    def stop(self) -> None:
        """Answer every waiting FETCH with null and start no further claims (W28)."""
        self._is_stopping = True
        for fetcher in list(self._waiting):  # a copy, as answering removes from the index
            if not fetcher.is_over:
                self._expire(fetcher)

    def _claim(self) -> None:
        if not self._claims_free or self._is_stopping:
            return
        batch = self._waiting.next_batch()
        if not batch:
            return
        served: list[tuple[Fetcher, Reservation]] = []
        asked: list[tuple[Fetcher, FetchRequest, FetchRequest]] = []
        for fetcher in self._waiting.with_elder(batch):
            request = self._waiting.tried(fetcher)
            if job := self._shelf.take(request):
                fetcher.in_claim = True
                served.append((fetcher, job))
            elif sent := self._ask_for(fetcher, request, [sent for _, _, sent in asked]):
                self._held.pop(fetcher, None)
                fetcher.in_claim = True
                asked.append((fetcher, request, sent))
            else:
                self._hold(fetcher, request)
        if asked:
            self._claims_free -= 1
            claim = _Claim(left=len(asked))
            for fetcher, request, sent in asked:
                # Otherwise an empty answer proves nothing about the queues that were left out: the FETCH is retried.
                is_all = sent.count > 0 and sent.queues == request.queues
                self._lane.submit(sent, partial(self._claimed, claim, fetcher, sent, is_all))
        # Last: an answered client may send its next FETCH at once, which re-enters `_claim`.
        for fetcher, job in served:
            self._answer(fetcher, job)

    def _ask_for(self, fetcher: Fetcher, request: FetchRequest, beside: list[FetchRequest]) -> FetchRequest | None:
        if self._loop.time() >= self._held.get(fetcher, ("", inf))[1]:
            return self._shelf.asking_plainly(request)
        return self._shelf.asking(request, beside)

    def _hold(self, fetcher: Fetcher, request: FetchRequest) -> None:
        """Keep the FETCH until the moving jobs of its first queue have arrived, or `PATIENCE_S` is over."""
        _, until = self._held.get(fetcher, ("", self._loop.time() + PATIENCE_S))
        self._held[fetcher] = request.queues[0], until
        if self._patience is None:
            self._patience = self._loop.call_later(PATIENCE_S / 2, self._lose_patience)
        self._park(fetcher)

    def _lose_patience(self) -> None:
        self._patience = None
        now = self._loop.time()
        for fetcher, (_, until) in self._held.items():
            if now >= until:
                self._waiting.mark(fetcher)
        if self._held:
            self._patience = self._loop.call_later(PATIENCE_S / 2, self._lose_patience)
            self._claim()

    def _let_go(self, queues: Collection[str]) -> None:
        names = set(queues) if self._held else ()
        for fetcher, (queue, _) in self._held.items():
            if queue in names:
                self._waiting.mark(fetcher)

    def returned(self, queues: Collection[str]) -> None:
        """Try the FETCHes that waited for released jobs of these queues, which are in the database again or lost."""
        self._shelf.returned(queues)
        self._let_go(queues)
        self._claim()

    def _claimed(
        self,
        claim: _Claim,
        fetcher: Fetcher,
        sent: FetchRequest,
        is_all: bool,
        told: list[Reservation] | FaktoryError,
    ) -> None:
        fetcher.in_claim = False
        try:
            found = self._shelve(sent, told)
            if isinstance(told, FaktoryError):
                self._answer(fetcher, told)
            else:
                self._settle(claim, fetcher, is_all, found)
        finally:  # also after an error: a claim that never completes would block later ones
            claim.left -= 1
            if not claim.left:
                self._claims_free += 1
                if claim.unwanted:
                    self._release(claim.unwanted)
                self._claim()

    def _settle(self, claim: _Claim, fetcher: Fetcher, is_all: bool, found: list[Reservation]) -> None:
        if fetcher.is_gone:
            claim.unwanted += found
        elif found:
            self._answer(fetcher, found[0])
        elif fetcher.is_over or self._is_stopping:
            self._answer(fetcher, None)
        elif job := self._shelf.take_any(fetcher.request):
            self._answer(fetcher, job)
        else:
            if not is_all:  # jobs of the queues left out were in the buffer or moving
                self._waiting.mark(fetcher)
            self._park(fetcher)

    def _take_hints(self) -> None:
        queues, self._hinted, self._is_called = self._hinted, set(), False
        self._waiting.mark_all(queues)
        self._claim()

    def _answer(self, fetcher: Fetcher, told: Reservation | FaktoryError | None) -> None:
        self._forget(fetcher)
        if fetcher.is_gone:
            return
        if self._hands_over and isinstance(told, Reservation) and told.lock_token is not None:
            self._holders[told.jid] = told.queue
            if len(self._holders) > MOST_HOLDERS:
                del self._holders[next(iter(self._holders))]  # the oldest; see MOST_HOLDERS
        fetcher.answer(told)

    def _park(self, fetcher: Fetcher) -> None:
        if fetcher.timer is None:
            fetcher.timer = self._loop.call_later(WAIT_S, self._expire, fetcher)
        if self._poll is None:
            self._poll = self._loop.call_later(self._poll_s, self._look)

    def _look(self) -> None:
        self._poll = None
        if self._waiting:
            self.wake()

    def _expire(self, fetcher: Fetcher) -> None:
        if fetcher.in_claim:
            fetcher.is_over = True  # the claim may return a job: answer null only when it does not
        else:
            self._answer(fetcher, None)

    def _forget(self, fetcher: Fetcher) -> None:
        if self._waiting.remove(fetcher):  # there is room for a FETCH with many names now
            self._call()
        self._held.pop(fetcher, None)
        if fetcher.timer is not None:
            fetcher.timer.cancel()
