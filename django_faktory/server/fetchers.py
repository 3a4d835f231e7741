"""Fetchers that wait: in memory, not in the database. One claim serves all that may get something from it.

A fetcher is tried when it comes, when a hint names one of its queues, and at each poll; between, it costs nothing. The
names in one claim are bounded, and fetchers with many names take turns: they delay no fetcher with few.
Beside the ACK of a job that held a lock one of them is tried too: in one transaction the lock goes from the one job to
the next (ADR 0015). Rules: W13 to W15.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from math import inf

from ..errors import FaktoryError
from ..payloads import FetchRequest, Reservation
from .committer import Lane
from .fetch_index import Fetcher, FetchIndex
from .shelf import Shelf
from .turns import Item

WAIT_S = 2.0
PATIENCE_S = 1.0
"""So long, or half as long again, a FETCH waits for what is on its way to or from the shelf; then it asks for other
jobs of its queues."""

MOST_HOLDERS = 10_000
"""So many jobs with locks are known as handed out; an older one's end is an end like any other."""

FetchLane = Lane[Item, "list[Reservation]"]


class _Claim:
    """One set of fetchers that are tried together."""

    __slots__ = ("left", "unwanted")

    def __init__(self, left: int) -> None:
        self.left = left
        self.unwanted: list[Reservation] = []
        """Found for clients that had gone by then."""


class Fetchers:
    """All that wait, in the order they came."""

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
        """Who waits for what is on its way from or to a queue: which, and until when."""
        self._holders: dict[str, str] = {}  # jobs handed out with a lock, and their queues

    def add(self, fetcher: Fetcher) -> None:
        """Let it try, and wait up to two seconds."""
        if self._waiting.add(fetcher):
            self._claim()
        else:
            self._park(fetcher)

    def leave(self, fetcher: Fetcher) -> None:
        """Its client is gone: no job for it any more; one that is on its way goes back at once (W14)."""
        fetcher.is_gone = True
        if fetcher in self._waiting:
            self._forget(fetcher)

    def wake(self, queues: Collection[str] | None = None) -> None:
        """There may be work in these queues; None: in any."""
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
            self._loop.call_soon(self._take_hints)  # one look for all the jobs of a transaction

    def before_turn(self) -> None:
        """A turn will be taken in any case: what the shelf is short of goes along."""
        for sent in self._shelf.refills():
            self._lane.submit(sent, partial(self._refilled, sent))

    def _refilled(self, sent: FetchRequest, told: list[Reservation] | FaktoryError) -> None:
        self._shelve(sent, told)
        self._claim()

    def _shelve(self, sent: FetchRequest, told: list[Reservation] | FaktoryError) -> list[Reservation]:
        """Put on the shelf what came for it; return what else came."""
        found = [] if isinstance(told, FaktoryError) else told
        ahead = [job for job in found if job.is_ahead]
        if ahead:
            found = found[: -len(ahead)]
        self._shelf.answered(sent, found, ahead)
        self._let_go(sent.queues)
        if ahead:
            self.wake({job.queue for job in ahead})
        return found

    def before_ack(self, jid: str) -> None:
        """This job's ACK is about to be carried out: if it held a lock, who waits longest for its queue goes along."""
        queue = self._holders.pop(jid, None)
        if queue is not None and self._waiting.mark_first_idle(queue):
            self._claim()

    def stop(self) -> None:
        """Send all away with nothing (W28)."""
        self._is_stopping = True
        for fetcher in list(self._waiting):
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
                is_all = sent.count > 0 and sent.queues == request.queues
                self._lane.submit(sent, partial(self._claimed, claim, fetcher, sent, is_all))
        for fetcher, job in served:  # at the end: who is answered may fetch again at once
            self._answer(fetcher, job)

    def _ask_for(self, fetcher: Fetcher, request: FetchRequest, beside: list[FetchRequest]) -> FetchRequest | None:
        if self._loop.time() >= self._held.get(fetcher, ("", inf))[1]:
            return self._shelf.asking_plainly(request)
        return self._shelf.asking(request, beside)

    def _hold(self, fetcher: Fetcher, request: FetchRequest) -> None:
        """It waits for what is on its way from or to its first queue."""
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
        """What was read ahead of these queues is back in the database, or lost to it."""
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
        finally:
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
            if not is_all:  # the others were here, or on their way
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
                del self._holders[next(iter(self._holders))]
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
            fetcher.is_over = True  # a job may be on its way: wait for the claim's answer
        else:
            self._answer(fetcher, None)

    def _forget(self, fetcher: Fetcher) -> None:
        if self._waiting.remove(fetcher):
            self._call()
        self._held.pop(fetcher, None)
        if fetcher.timer is not None:
            fetcher.timer.cancel()
