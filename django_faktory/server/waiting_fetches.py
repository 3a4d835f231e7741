"""Queue of waiting FETCHes: blocked in memory, not in the database. One claim serves many of them.

`FetchQueue` tries a FETCH when it arrives, when this node stores work in one of its queues, at each notification of
another process, and at each poll; in between it costs nothing. FETCHes with many names are tried one at a time, and
not at pushes, so that they delay no FETCH with few. With the ACK of a job that had a lock, one waiting FETCH is tried
in the same transaction, which hands the lock over to the next job (ADR 0015). Rules: W13 to W15.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from itertools import takewhile
from math import inf

from ..core.payloads import FetchRequest, Reservation
from ..errors import FaktoryError
from .exchange_set import Item
from .fetch_index import FetchIndex, WaitingFetch
from .group_commit import CommitQueue
from .prefetch_buffer import PrefetchBuffer
from .tuning import DEFAULT_TUNING

MAX_DELAY_S = 1.0
"""A FETCH waits 1 to 1.5 times this for jobs that move to or from the prefetch buffer, then claims other jobs."""

MAX_LOCK_HOLDERS = 10_000
"""Delivered jobs with locks that are remembered; the ACK of an older one triggers no claim in its transaction."""

FetchCommitQueue = CommitQueue[Item, "list[Reservation]"]


class _Claim:
    """FETCHes that are tried with one claim. `unanswered` counts those without an answer."""

    __slots__ = ("unanswered", "unwanted")

    def __init__(self, unanswered: int) -> None:
        self.unanswered = unanswered
        self.unwanted: list[Reservation] = []
        """Jobs claimed for clients that have disconnected since; released when the claim is complete."""


class FetchQueue:
    """All waiting FETCHes of the node, in order of arrival. Used on the event loop only.

    At most `width` claims run at a time. `release` returns jobs to the database. A FETCH without a job is answered with
    null after `wait_s` seconds (W13).
    """

    def __init__(
        self,
        commit_queue: FetchCommitQueue,
        prefetch_buffer: PrefetchBuffer,
        *,
        width: int,
        release: Callable[[list[Reservation]], None],
        poll_s: float,
        loop: asyncio.AbstractEventLoop,
        supports_lock_handoff: bool = False,
        wait_s: float = DEFAULT_TUNING.fetch_wait_s,
    ) -> None:
        self._commit_queue, self._prefetch_buffer = commit_queue, prefetch_buffer
        self._loop, self._release, self._poll_s, self._wait_s = loop, release, poll_s, wait_s
        self._has_lock_handoff = supports_lock_handoff
        self._waiting = FetchIndex()
        self._claims_free = width
        self._is_polling = False
        self._poll: asyncio.TimerHandle | None = None
        self._kept: dict[WaitingFetch, float] = {}
        """FETCHes that got no job at once, and when each is answered with null, earliest first."""
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._delay_timer: asyncio.TimerHandle | None = None
        self._notified_queues: set[str] | None = set()  # None: all queues
        self._is_scheduled = False
        self._is_stopping = False
        self._delayed: dict[WaitingFetch, tuple[str, float]] = {}
        """FETCHes that wait for jobs moving to or from the buffer: their first queue, and until when."""
        self._queues_of_lock_holders: dict[str, str] = {}  # jid of each delivered job with a lock -> its queue

    def add(self, waiting_fetch: WaitingFetch) -> None:
        """Try this FETCH now; if it gets no job, it waits for up to `wait_s` seconds."""
        if not self._waiting.add(waiting_fetch) or waiting_fetch.is_polled:  # its turn may come late
            self._keep_waiting(waiting_fetch)
        self._claim()

    def leave(self, waiting_fetch: WaitingFetch) -> None:
        """Drop the FETCH of a disconnected client; a job that is being claimed for it is released at once (W14)."""
        waiting_fetch.is_disconnected = True
        if waiting_fetch in self._waiting:
            self._remove(waiting_fetch)

    def wake(self, queues: Collection[str] | None = None) -> None:
        """Try the FETCHes of these queues soon, since there may be work; None means all queues."""
        if not self._waiting:
            return
        if queues is None:
            self._notified_queues = None
        elif self._notified_queues is not None:
            self._notified_queues.update(queues)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._try_notified)  # one claim for all jobs that a transaction stored

    def submit_refills(self) -> None:
        """Submit refills of the prefetch buffer: an exchange is about to run anyway, so they cost no round trip."""
        for sent in self._prefetch_buffer.prepare_refills():
            self._commit_queue.submit(sent, partial(self._on_refilled, sent))

    def _on_refilled(self, sent: FetchRequest, result: list[Reservation] | FaktoryError) -> None:
        self._buffer_prefetched(sent, result)
        self._claim()

    def _buffer_prefetched(self, sent: FetchRequest, result: list[Reservation] | FaktoryError) -> list[Reservation]:
        """Store prefetched jobs in the buffer and return the other claimed jobs."""
        jobs = [] if isinstance(result, FaktoryError) else result
        prefetched = [job for job in jobs if job.is_prefetched]
        if prefetched:
            jobs = jobs[: -len(prefetched)]  # the broker lists prefetched jobs last
        self._prefetch_buffer.store_result(sent, jobs, prefetched)
        if self._delayed:
            self._try_delayed(sent.queues)
        if prefetched:
            self._waiting.mark_all({job.queue for job in prefetched})  # the caller claims for them
        return jobs

    def claim_with_ack(self, jid: str) -> None:
        """Try the longest waiting FETCH of this job's queue along with its ACK, if the job has a lock."""
        queue = self._queues_of_lock_holders.pop(jid, None)
        if queue is not None and self._waiting.mark_first_idle(queue):
            self._claim()

    def stop(self) -> None:
        """Answer every waiting FETCH with null and start no further claims (W28)."""
        self._is_stopping = True
        for waiting_fetch in list(self._waiting):  # a copy, as answering removes from the index
            if not waiting_fetch.has_timed_out:
                self._expire(waiting_fetch)

    def _claim(self) -> None:
        self._claim_for_polled()
        if not self._claims_free or self._is_stopping or not (batch := self._waiting.next_batch()):
            return
        served: list[tuple[WaitingFetch, Reservation]] = []
        to_claim: list[tuple[WaitingFetch, bool]] = []
        requests: list[FetchRequest] = []
        for waiting_fetch in self._waiting.with_longest_waiting(batch):
            self._waiting.mark_tried(waiting_fetch)
            request = waiting_fetch.request
            if job := self._prefetch_buffer.take(request):
                waiting_fetch.in_claim = True
                served.append((waiting_fetch, job))
            elif sent := self._prepare_claim(waiting_fetch, requests):
                self._delayed.pop(waiting_fetch, None)
                waiting_fetch.in_claim = True
                # If False, an empty answer proves nothing about the queues that were left out: the FETCH is retried.
                is_complete = sent.count > 0 and sent.queues == request.queues
                to_claim.append((waiting_fetch, is_complete))
                requests.append(sent)
            else:
                self._delay(waiting_fetch)
        if to_claim:
            self._claims_free -= 1
            claim = _Claim(unanswered=len(to_claim))
            for (waiting_fetch, is_complete), sent in zip(to_claim, requests, strict=True):
                self._commit_queue.submit(sent, partial(self._on_claimed, claim, waiting_fetch, sent, is_complete))
        # Last: an answered client may send its next FETCH at once, which re-enters `_claim`.
        for waiting_fetch, job in served:
            self._answer(waiting_fetch, job)

    def _claim_for_polled(self) -> None:
        # One claim of many names at a time: with two, other commands would find no free thread until one has ended.
        if self._is_polling or not self._claims_free or self._is_stopping or not (polled := self._waiting.next_poll()):
            return
        self._is_polling = polled.in_claim = True
        self._claims_free -= 1
        sent = self._prefetch_buffer.prepare_plain_claim(polled.request)
        self._commit_queue.submit(sent, partial(self._on_claimed, _Claim(unanswered=1), polled, sent, True))

    def _prepare_claim(self, waiting_fetch: WaitingFetch, earlier_claims: list[FetchRequest]) -> FetchRequest | None:
        if self._loop.time() >= self._delayed.get(waiting_fetch, ("", inf))[1]:
            return self._prefetch_buffer.prepare_plain_claim(waiting_fetch.request)
        return self._prefetch_buffer.prepare_claim(waiting_fetch.request, earlier_claims)

    def _delay(self, waiting_fetch: WaitingFetch) -> None:
        """Keep the FETCH until the moving jobs of its first queue have arrived, or `MAX_DELAY_S` is over."""
        _, until = self._delayed.get(waiting_fetch, ("", self._loop.time() + MAX_DELAY_S))
        self._delayed[waiting_fetch] = waiting_fetch.request.queues[0], until
        if self._delay_timer is None:
            self._delay_timer = self._loop.call_later(MAX_DELAY_S / 2, self._try_overdue)
        self._keep_waiting(waiting_fetch)

    def _try_overdue(self) -> None:
        self._delay_timer = None
        now = self._loop.time()
        for waiting_fetch, (_, until) in self._delayed.items():
            if now >= until:
                self._waiting.mark(waiting_fetch)
        if self._delayed:
            self._delay_timer = self._loop.call_later(MAX_DELAY_S / 2, self._try_overdue)
            self._claim()

    def _try_delayed(self, queues: Collection[str]) -> None:
        names = set(queues)
        for waiting_fetch, (queue, _) in self._delayed.items():
            if queue in names:
                self._waiting.mark(waiting_fetch)

    def mark_returned(self, queues: Collection[str]) -> None:
        """Try the FETCHes that waited for released jobs of these queues, which are in the database again or lost."""
        self._prefetch_buffer.mark_returned(queues)
        self._try_delayed(queues)
        self._claim()

    def _on_claimed(
        self,
        claim: _Claim,
        waiting_fetch: WaitingFetch,
        sent: FetchRequest,
        is_complete: bool,
        result: list[Reservation] | FaktoryError,
    ) -> None:
        waiting_fetch.in_claim = False
        try:
            jobs = self._buffer_prefetched(sent, result)
            if isinstance(result, FaktoryError):
                self._answer(waiting_fetch, result)
            else:
                self._handle_result(claim, waiting_fetch, is_complete, jobs)
        finally:  # also after an error: a claim that never completes would block later ones
            claim.unanswered -= 1
            if not claim.unanswered:
                self._claims_free += 1
                if waiting_fetch.is_polled:
                    self._is_polling = False
                if claim.unwanted:
                    self._release(claim.unwanted)
                self._claim()

    def _handle_result(
        self, claim: _Claim, waiting_fetch: WaitingFetch, is_complete: bool, jobs: list[Reservation]
    ) -> None:
        if waiting_fetch.is_disconnected:
            claim.unwanted += jobs
        elif jobs:
            self._answer(waiting_fetch, jobs[0])
        elif waiting_fetch.has_timed_out or self._is_stopping:
            self._answer(waiting_fetch, None)
        elif job := self._prefetch_buffer.take_any(waiting_fetch.request):
            self._answer(waiting_fetch, job)
        else:
            if not is_complete:  # jobs of the queues left out were in the buffer or moving
                self._waiting.mark(waiting_fetch)
            self._keep_waiting(waiting_fetch)

    def _try_notified(self) -> None:
        queues, self._notified_queues, self._is_scheduled = self._notified_queues, set(), False
        self._waiting.mark_all(queues)
        self._claim()

    def _answer(self, waiting_fetch: WaitingFetch, result: Reservation | FaktoryError | None) -> None:
        self._remove(waiting_fetch)
        if waiting_fetch.is_disconnected:
            return
        if self._has_lock_handoff and isinstance(result, Reservation) and result.lock_token is not None:
            self._queues_of_lock_holders[result.jid] = result.queue
            if len(self._queues_of_lock_holders) > MAX_LOCK_HOLDERS:
                # The oldest; see MAX_LOCK_HOLDERS.
                del self._queues_of_lock_holders[next(iter(self._queues_of_lock_holders))]
        waiting_fetch.answer(result)

    def _keep_waiting(self, waiting_fetch: WaitingFetch) -> None:
        if not waiting_fetch.is_kept:
            waiting_fetch.is_kept = True
            self._kept[waiting_fetch] = self._loop.time() + self._wait_s
            # One timer for all: most FETCHes get a job long before, and a timer for each would cost more than all else.
            if self._deadline_timer is None:
                self._deadline_timer = self._loop.call_later(self._wait_s, self._expire_due)
        if self._poll is None:
            self._poll = self._loop.call_later(self._poll_s, self._poll_queues)

    def _poll_queues(self) -> None:
        self._poll = None
        if self._waiting:
            self.wake()

    def _expire_due(self) -> None:
        now = self._loop.time()
        due = list(takewhile(lambda waiting_fetch: self._kept[waiting_fetch] <= now, self._kept))
        for waiting_fetch in due:
            del self._kept[waiting_fetch]
        first = next(iter(self._kept.values()), None)
        self._deadline_timer = None if first is None else self._loop.call_later(first - now, self._expire_due)
        # Last: an answered client may send its next FETCH at once, and its claim may answer other FETCHes in `due`.
        for waiting_fetch in due:
            if waiting_fetch in self._waiting:
                self._expire(waiting_fetch)

    def _expire(self, waiting_fetch: WaitingFetch) -> None:
        if waiting_fetch.in_claim:
            waiting_fetch.has_timed_out = True  # the claim may return a job: answer null only when it does not
        else:
            self._answer(waiting_fetch, None)

    def _remove(self, waiting_fetch: WaitingFetch) -> None:
        self._waiting.remove(waiting_fetch)
        self._delayed.pop(waiting_fetch, None)
        self._kept.pop(waiting_fetch, None)
