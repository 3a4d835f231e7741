"""Index waiting FETCHes by arrival and by queue, so that a push costs only the FETCHes that name its queue.

The queue names in one claim are bounded (ADR 0033). A FETCH with many names is tried only for queues in which something
may have changed, and such FETCHes take turns, so that they delay no FETCH with few. Pure: uses no timer, commit queue
or prefetch buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from msgspec.structs import replace

from ..core.payloads import FetchRequest, Reservation
from ..errors import FaktoryError
from .group_commit import MAX_SET_WEIGHT

FEW_NAMES = 100
"""A FETCH with more names counts as one with many; a claim tries at most one such FETCH."""

NAMES_A_CLAIM = 1000
"""Queue names in one claim, summed over the FETCHes with few names."""

MOST_NAMES = 50_000
"""Queue names of all indexed FETCHes with many names. A FETCH beyond it is first tried when another has ended."""


class WaitingFetch:
    """One waiting FETCH. `answer` is called exactly once: with a job, None for no job, or an error."""

    __slots__ = (
        "answer",
        "arrival",
        "changed_queues",
        "has_many",
        "has_timed_out",
        "in_claim",
        "is_disconnected",
        "is_kept",
        "request",
        "untried",
    )

    def __init__(self, request: FetchRequest, answer: Callable[[Reservation | FaktoryError | None], None]) -> None:
        self.request = request
        self.answer = answer
        self.is_kept = False  # got no job at once, and waits for up to `Tuning.fetch_wait_s`
        self.arrival = 0
        self.has_many = len(request.queues) > FEW_NAMES
        self.untried = True
        self.changed_queues: set[str] | None = None
        """Queues to claim from at the next try; None means all. Used only if `has_many`."""
        self.in_claim = False
        self.has_timed_out = False  # its time ended while a claim for it ran
        self.is_disconnected = False  # its client has disconnected


class FetchIndex:
    """All waiting FETCHes, in order of arrival and by the queues they name."""

    def __init__(self) -> None:
        self._all: dict[WaitingFetch, None] = {}
        self._by_queue: dict[str, dict[WaitingFetch, None]] = {}
        self._untried: dict[WaitingFetch, None] = {}
        self._without_room: dict[WaitingFetch, None] = {}  # with many names, beyond MOST_NAMES; not tried yet
        self._arrivals = self._names = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[WaitingFetch]:
        return iter(self._all)

    def __contains__(self, waiting_fetch: object) -> bool:
        return waiting_fetch in self._all

    def add(self, waiting_fetch: WaitingFetch) -> bool:
        """Add a FETCH. Return False if it cannot be tried: no room for its names, or no valid queue name."""
        self._arrivals += 1
        waiting_fetch.arrival = self._arrivals
        self._all[waiting_fetch] = None
        if waiting_fetch.has_many and not self._has_room(waiting_fetch):
            self._without_room[waiting_fetch] = None
            return False
        self._index(waiting_fetch)
        return bool(waiting_fetch.request.queues)

    def remove(self, waiting_fetch: WaitingFetch) -> bool:
        """Remove a FETCH; idempotent. Return True if FETCHes that had no room entered the index."""
        if waiting_fetch not in self._all:
            return False
        del self._all[waiting_fetch]
        self._untried.pop(waiting_fetch, None)
        if waiting_fetch in self._without_room:
            del self._without_room[waiting_fetch]
            return False
        for queue in waiting_fetch.request.queues:
            fetches = self._by_queue[queue]
            del fetches[waiting_fetch]
            if not fetches:
                del self._by_queue[queue]
        if not waiting_fetch.has_many:
            return False
        self._names -= len(waiting_fetch.request.queues)
        return self._admit_waiting()

    def _admit_waiting(self) -> bool:
        before = len(self._without_room)
        while self._without_room and self._has_room(first := next(iter(self._without_room))):
            del self._without_room[first]
            self._index(first)
        return len(self._without_room) < before

    def _has_room(self, waiting_fetch: WaitingFetch) -> bool:
        # The first one always has room, however many names it has.
        return not self._names or self._names + len(waiting_fetch.request.queues) <= MOST_NAMES

    def _index(self, waiting_fetch: WaitingFetch) -> None:
        if waiting_fetch.has_many:
            self._names += len(waiting_fetch.request.queues)
        for queue in waiting_fetch.request.queues:
            self._by_queue.setdefault(queue, {})[waiting_fetch] = None
        if waiting_fetch.request.queues:
            self._untried[waiting_fetch] = None

    def mark(self, waiting_fetch: WaitingFetch, queue: str | None = None) -> None:
        """Schedule a try, since there may be work in this queue; None means in any of its queues."""
        if waiting_fetch in self._without_room or not waiting_fetch.request.queues:
            return
        if queue is None:
            waiting_fetch.changed_queues = None
        elif not waiting_fetch.untried:
            waiting_fetch.changed_queues = {queue}
        elif waiting_fetch.changed_queues is not None:
            waiting_fetch.changed_queues.add(queue)
        waiting_fetch.untried = True
        self._untried[waiting_fetch] = None

    def mark_tried(self, waiting_fetch: WaitingFetch) -> FetchRequest:
        """Mark the FETCH as tried and return the request to send for it."""
        self._untried.pop(waiting_fetch, None)
        waiting_fetch.untried = False
        # The new set is for queues that change while the claim runs.
        changed_queues, waiting_fetch.changed_queues = waiting_fetch.changed_queues, set()
        if changed_queues is None or not waiting_fetch.has_many:
            return waiting_fetch.request
        return replace(
            waiting_fetch.request,
            queues=tuple(queue for queue in waiting_fetch.request.queues if queue in changed_queues),
        )

    def next_batch(self, *, with_many: bool = True) -> list[WaitingFetch]:
        """Return the FETCHes to try next, in order of arrival.

        At most one has many names, none without `with_many`; the others have at most `NAMES_A_CLAIM` names together.
        """
        batch: list[WaitingFetch] = []
        names, has_many = 0, not with_many
        for waiting_fetch in sorted(self._untried, key=_arrival) if len(self._untried) > 1 else self._untried:
            if waiting_fetch.has_timed_out or waiting_fetch.in_claim:
                continue
            if waiting_fetch.has_many:
                if has_many:
                    continue  # it stays untried, so the next claim tries it
                has_many = True
            else:
                names += len(waiting_fetch.request.queues)
                if names > NAMES_A_CLAIM:
                    break  # not `continue`: later FETCHes must not overtake this one
            batch.append(waiting_fetch)
            if len(batch) == MAX_SET_WEIGHT:
                break
        return batch

    def mark_all(self, queues: Iterable[str] | None) -> None:
        """Schedule a try of every FETCH that names one of these queues; None means of all FETCHes."""
        if queues is None:
            for waiting_fetch in self._all:
                self.mark(waiting_fetch)
            return
        for queue in queues:
            for waiting_fetch in self._by_queue.get(queue, ()):
                self.mark(waiting_fetch, queue)

    def mark_first_idle(self, queue: str) -> bool:
        """Schedule the longest waiting FETCH of this queue that has no try scheduled. Return whether there was one."""
        first = next(
            (
                waiting_fetch
                for waiting_fetch in self._by_queue.get(queue, ())
                if _is_idle(waiting_fetch) and not waiting_fetch.untried
            ),
            None,
        )
        if first is not None:
            self.mark(first, queue)
        return first is not None

    def with_longest_waiting(self, batch: list[WaitingFetch], *, with_many: bool = True) -> list[WaitingFetch]:
        """Return the batch, preceded by the longest waiting idle FETCH of its queues unless that is first already.

        A FETCH that would claim from many names is added only as `next_batch` does it.
        """
        # Without this a FETCH that has just arrived could get a job for which another FETCH has waited longer.
        queues: dict[str, None] = {}
        for waiting_fetch in batch:
            queues.update(dict.fromkeys(waiting_fetch.request.queues))
        firsts: dict[str, WaitingFetch] = {}
        for queue in queues:
            if first := next(filter(_is_idle, self._by_queue[queue]), None):
                firsts[queue] = first
        if not firsts:
            return batch
        oldest = min(firsts.values(), key=_arrival)
        if oldest is batch[0]:
            return batch
        if oldest.untried and oldest.has_many and (not with_many or any(fetch.has_many for fetch in batch)):
            return batch
        for queue, waiting_fetch in firsts.items():
            if waiting_fetch is oldest:
                self.mark(oldest, queue)
        return [oldest, *batch]


_arrival = attrgetter("arrival")


def _is_idle(waiting_fetch: WaitingFetch) -> bool:
    return not (waiting_fetch.has_timed_out or waiting_fetch.in_claim)
