"""Index waiting FETCHes by arrival and by queue, so that a push costs only the FETCHes that name its queue.

The queue names in one claim are bounded (ADR 0033). A FETCH with more than `FEW_NAMES` is in no queue's index: it is
polled, one such FETCH at a time. Pure: uses no timer, commit queue or prefetch buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from ..core.payloads import FetchRequest, Reservation
from ..errors import FaktoryError
from .group_commit import MAX_SET_WEIGHT

FEW_NAMES = 100
"""A FETCH with more names is polled."""

NAMES_A_CLAIM = 1000
"""Queue names in one claim of FETCHes that are not polled."""


class WaitingFetch:
    """One waiting FETCH. `answer` is called exactly once: with a job, None for no job, or an error."""

    __slots__ = (
        "answer",
        "arrival",
        "has_timed_out",
        "in_claim",
        "is_disconnected",
        "is_kept",
        "is_polled",
        "request",
    )

    def __init__(self, request: FetchRequest, answer: Callable[[Reservation | FaktoryError | None], None]) -> None:
        self.request = request
        self.answer = answer
        self.is_kept = False  # got no job at once, and waits for up to `Tuning.fetch_wait_s`
        self.arrival = 0
        self.is_polled = len(request.queues) > FEW_NAMES
        self.in_claim = False
        self.has_timed_out = False  # its time ended while a claim for it ran
        self.is_disconnected = False  # its client has disconnected


class FetchIndex:
    """All waiting FETCHes, in order of arrival and by the queues they name."""

    def __init__(self) -> None:
        self._all: dict[WaitingFetch, None] = {}
        self._by_queue: dict[str, dict[WaitingFetch, None]] = {}
        self._untried: dict[WaitingFetch, None] = {}
        self._due_polls: dict[WaitingFetch, None] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[WaitingFetch]:
        return iter(self._all)

    def __contains__(self, waiting_fetch: object) -> bool:
        return waiting_fetch in self._all

    def add(self, waiting_fetch: WaitingFetch) -> bool:
        """Add a FETCH. Return False if it cannot be tried, as it has no valid queue name."""
        self._arrivals += 1
        waiting_fetch.arrival = self._arrivals
        self._all[waiting_fetch] = None
        if not waiting_fetch.is_polled:
            for queue in waiting_fetch.request.queues:
                self._by_queue.setdefault(queue, {})[waiting_fetch] = None
        self.mark(waiting_fetch)
        return bool(waiting_fetch.request.queues)

    def remove(self, waiting_fetch: WaitingFetch) -> None:
        """Remove a FETCH; idempotent."""
        if waiting_fetch not in self._all:
            return
        del self._all[waiting_fetch]
        self._untried.pop(waiting_fetch, None)
        self._due_polls.pop(waiting_fetch, None)
        if waiting_fetch.is_polled:
            return
        for queue in waiting_fetch.request.queues:
            fetches = self._by_queue[queue]
            del fetches[waiting_fetch]
            if not fetches:
                del self._by_queue[queue]

    def mark(self, waiting_fetch: WaitingFetch) -> None:
        """Schedule a try, since there may be work in one of its queues."""
        if waiting_fetch.is_polled:
            self._due_polls[waiting_fetch] = None
        elif waiting_fetch.request.queues:
            self._untried[waiting_fetch] = None

    def mark_tried(self, waiting_fetch: WaitingFetch) -> None:
        """Mark the FETCH as tried, until the next `mark`."""
        self._untried.pop(waiting_fetch, None)

    def next_poll(self) -> WaitingFetch | None:
        """Return the FETCH with many names whose turn it is, and mark it as tried."""
        if not self._due_polls:
            return None
        first = next(iter(self._due_polls))
        del self._due_polls[first]
        return first

    def next_batch(self) -> list[WaitingFetch]:
        """Return the FETCHes to try next, in order of arrival, with at most `NAMES_A_CLAIM` names together."""
        batch: list[WaitingFetch] = []
        names = 0
        for waiting_fetch in sorted(self._untried, key=_arrival) if len(self._untried) > 1 else self._untried:
            if waiting_fetch.has_timed_out or waiting_fetch.in_claim:
                continue
            names += len(waiting_fetch.request.queues)
            if names > NAMES_A_CLAIM:
                break  # not `continue`: later FETCHes must not overtake this one
            batch.append(waiting_fetch)
            if len(batch) == MAX_SET_WEIGHT:
                break
        return batch

    def mark_all(self, queues: Iterable[str] | None) -> None:
        """Schedule a try of every FETCH that names one of these queues and is not polled; None means of all FETCHes."""
        if queues is None:
            for waiting_fetch in self._all:
                self.mark(waiting_fetch)
            return
        for queue in queues:
            self._untried.update(self._by_queue.get(queue, {}))

    def mark_first_idle(self, queue: str) -> bool:
        """Schedule the longest waiting FETCH of this queue that has no try scheduled. Return whether there was one."""
        for waiting_fetch in self._by_queue.get(queue, ()):
            if _is_idle(waiting_fetch) and waiting_fetch not in self._untried:
                self.mark(waiting_fetch)
                return True
        return False

    def with_longest_waiting(self, batch: list[WaitingFetch]) -> list[WaitingFetch]:
        """Return the batch, preceded by the longest waiting idle FETCH of its queues unless that is first already."""
        # Without this a FETCH that has just arrived could get a job for which another FETCH has waited longer.
        queues: dict[str, None] = {}
        for waiting_fetch in batch:
            queues.update(dict.fromkeys(waiting_fetch.request.queues))
        firsts = (next(filter(_is_idle, self._by_queue[queue]), None) for queue in queues)
        oldest = min(filter(None, firsts), key=_arrival, default=batch[0])
        return batch if oldest is batch[0] else [oldest, *batch]


_arrival = attrgetter("arrival")


def _is_idle(waiting_fetch: WaitingFetch) -> bool:
    return not (waiting_fetch.has_timed_out or waiting_fetch.in_claim)
