"""Index waiting FETCHes by arrival and by queue, so that a push costs only the FETCHes that name its queue.

The queue names in one claim are bounded (ADR 0033). A FETCH with many names is tried only for queues in which something
may have changed, and such FETCHes take turns, so that they delay no FETCH with few. Pure: uses no timer, commit queue
or prefetch buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from ..core.payloads import FetchRequest, Reservation
from ..errors import FaktoryError
from .group_commit import MAX_BATCH

FEW_NAMES = 100
"""A FETCH with more names counts as one with many; a claim tries at most one of these."""

NAMES_A_CLAIM = 1000
"""Queue names in one claim, summed over the FETCHes with few names."""

MOST_NAMES = 50_000
"""Queue names of all waiting FETCHes with many names. A FETCH beyond it is first tried when another has ended."""


class Fetcher:
    """One waiting FETCH. `answer` is called exactly once: with a job, None for no job, or an error."""

    __slots__ = (
        "answer",
        "arrival",
        "has_many",
        "in_claim",
        "is_gone",
        "is_over",
        "news",
        "request",
        "timer",
        "untried",
    )

    def __init__(self, request: FetchRequest, answer: Callable[[Reservation | FaktoryError | None], None]) -> None:
        self.request = request
        self.answer = answer
        self.timer: asyncio.TimerHandle | None = None
        self.arrival = 0
        self.has_many = len(request.queues) > FEW_NAMES
        self.untried = True
        self.news: set[str] | None = None
        """Queues to claim from at the next try; None means all. Used only if `has_many`."""
        self.in_claim = False
        self.is_over = False  # its two seconds ended while a claim for it ran
        self.is_gone = False  # its client has disconnected


class FetchIndex:
    """All waiting FETCHes, in order of arrival and by the queues they name."""

    def __init__(self) -> None:
        self._all: dict[Fetcher, None] = {}
        self._by_queue: dict[str, dict[Fetcher, None]] = {}
        self._untried: dict[Fetcher, None] = {}
        self._outside: dict[Fetcher, None] = {}  # with many names, beyond MOST_NAMES; not tried yet
        self._arrivals = self._names = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Fetcher]:
        return iter(self._all)

    def __contains__(self, fetcher: object) -> bool:
        return fetcher in self._all

    def add(self, fetcher: Fetcher) -> bool:
        """Add a FETCH. Return False if it cannot be tried: no room for its names, or no valid queue name."""
        self._arrivals += 1
        fetcher.arrival = self._arrivals
        self._all[fetcher] = None
        if fetcher.has_many and not self._has_room(fetcher):
            self._outside[fetcher] = None
            return False
        self._enter(fetcher)
        return bool(fetcher.request.queues)

    def remove(self, fetcher: Fetcher) -> bool:
        """Remove a FETCH; idempotent. Return True if FETCHes that had no room entered the index."""
        if fetcher not in self._all:
            return False
        del self._all[fetcher]
        self._untried.pop(fetcher, None)
        if fetcher in self._outside:
            del self._outside[fetcher]
            return False
        for queue in fetcher.request.queues:
            named = self._by_queue[queue]
            del named[fetcher]
            if not named:
                del self._by_queue[queue]
        if not fetcher.has_many:
            return False
        self._names -= len(fetcher.request.queues)
        return self._let_in()

    def _let_in(self) -> bool:
        before = len(self._outside)
        while self._outside and self._has_room(first := next(iter(self._outside))):
            del self._outside[first]
            self._enter(first)
        return len(self._outside) < before

    def _has_room(self, fetcher: Fetcher) -> bool:
        # The first one always has room, however many names it has.
        return not self._names or self._names + len(fetcher.request.queues) <= MOST_NAMES

    def _enter(self, fetcher: Fetcher) -> None:
        if fetcher.has_many:
            self._names += len(fetcher.request.queues)
        for queue in fetcher.request.queues:
            self._by_queue.setdefault(queue, {})[fetcher] = None
        if fetcher.request.queues:
            self._untried[fetcher] = None

    def mark(self, fetcher: Fetcher, queue: str | None = None) -> None:
        """Schedule a try, since there may be work in this queue; None means in any of its queues."""
        if fetcher in self._outside or not fetcher.request.queues:
            return
        if queue is None:
            fetcher.news = None
        elif not fetcher.untried:
            fetcher.news = {queue}
        elif fetcher.news is not None:
            fetcher.news.add(queue)
        fetcher.untried = True
        self._untried[fetcher] = None

    def tried(self, fetcher: Fetcher) -> FetchRequest:
        """Mark the FETCH as tried and return the request to send for it."""
        self._untried.pop(fetcher, None)
        fetcher.untried = False
        news, fetcher.news = fetcher.news, set()  # from here on: queues that change while the claim runs
        if news is None or not fetcher.has_many:
            return fetcher.request
        return replace(fetcher.request, queues=tuple(queue for queue in fetcher.request.queues if queue in news))

    def next_batch(self) -> list[Fetcher]:
        """Return the FETCHes to try next, in order of arrival.

        At most one has many names; the others have at most `NAMES_A_CLAIM` names together.
        """
        batch: list[Fetcher] = []
        names, has_many = 0, False
        for fetcher in sorted(self._untried, key=_arrival):
            if not _is_idle(fetcher):
                continue
            if fetcher.has_many:
                if has_many:
                    continue  # it stays untried, so the next claim tries it
                has_many = True
            else:
                names += len(fetcher.request.queues)
                if names > NAMES_A_CLAIM:
                    break  # not `continue`: later FETCHes must not overtake this one
            batch.append(fetcher)
            if len(batch) == MAX_BATCH:
                break
        return batch

    def mark_all(self, queues: Iterable[str] | None) -> None:
        """Schedule a try of every FETCH that names one of these queues; None means of all FETCHes."""
        if queues is None:
            for fetcher in self._all:
                self.mark(fetcher)
            return
        for queue in queues:
            for fetcher in self._by_queue.get(queue, ()):
                self.mark(fetcher, queue)

    def mark_first_idle(self, queue: str) -> bool:
        """Schedule the longest waiting FETCH of this queue that has no try scheduled. Return whether there was one."""
        first = next((one for one in self._by_queue.get(queue, ()) if _is_idle(one) and not one.untried), None)
        if first is not None:
            self.mark(first, queue)
        return first is not None

    def with_elder(self, batch: list[Fetcher]) -> list[Fetcher]:
        """Return the batch, preceded by the longest waiting idle FETCH of its queues unless that is in it."""
        # Without this a FETCH that has just arrived could get a job for which another FETCH has waited longer.
        wanted = {queue: None for fetcher in batch for queue in fetcher.request.queues}
        firsts = [(queue, next(filter(_is_idle, self._by_queue[queue]))) for queue in wanted]
        if not firsts:
            return batch
        elder = min((fetcher for _, fetcher in firsts), key=_arrival)
        if elder is batch[0]:
            return batch
        for queue, fetcher in firsts:
            if fetcher is elder:
                self.mark(elder, queue)
        return [elder, *batch]


def _arrival(fetcher: Fetcher) -> int:
    return fetcher.arrival


def _is_idle(fetcher: Fetcher) -> bool:
    return not (fetcher.is_over or fetcher.in_claim)
