"""Where claims of PostgreSQL begin to read each queue: behind the index entries of jobs that were claimed (ADR 0046).

A bound is a time for a queue and priority: no ready job is older, except for those that are marked as returned, and
those of transactions that were open when the bound was drawn (`late`).
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

MAX_PRIORITIES, MAX_QUEUES, MAX_LATE = 8, 1000, 32
"""Numbers of priorities of a queue and of queues with bounds, and of late transactions with which bounds are drawn."""
FULL_LOOK_FACTOR, COSTLY_S = 100, 0.01
"""A queue is read from its beginning after this multiple of the time that it took before; by one node at a time if it
took longer than this time."""

Bound = datetime | None
"""None: from the beginning."""
_BEGINNING = "-infinity"
_LOWEST, _HIGHEST = -101, 101
"""Before and behind each sort_priority."""


class Drawn(NamedTuple):
    """A row of `faktory_bounds_1`."""

    queue: str
    rank: int
    first_at: datetime | None
    """Place of the first ready job of this queue and priority."""
    seen: str
    """Snapshot: xmin, xmax and the xids of open transactions."""
    xid: int | None
    began_at: datetime
    has_turn: bool = False
    """Whether it was read from the beginning of the queue."""


class _Mark(NamedTuple):
    """A transaction of this node: one with a higher xid has no job that is older than `began_at`, but for the slack."""

    xid: int
    began_at: datetime
    known_at: float


class _Parts(NamedTuple):
    """The parts of a queue: the jobs before the first known priority, then those of each, up to the next one.

    The texts are the elements of arrays.
    """

    bounds: dict[int, Bound]
    """By sort_priority, ascending."""
    late: dict[int, Bound]
    """Transactions that were open when the bounds were drawn, and the time before which they have no job."""
    names: list[str]
    ranks: str
    starts: str
    ends: str

    @classmethod
    def of(cls, name: str, bounds: dict[int, Bound], late: dict[int, Bound]) -> _Parts:
        starts = [f'"{bound}"' if bound else _BEGINNING for bound in (None, *bounds.values())]
        texts = _join(_LOWEST, *bounds), ",".join(starts), _join(*bounds, _HIGHEST)
        return cls(bounds, late, [name] * len(starts), *texts)


def _join(*values: object) -> str:
    return ",".join(map(str, values))


class _Queue:
    """What is known about a queue. `parts` is replaced as a whole, because other threads read it without the lock."""

    def __init__(self, name: str) -> None:
        self.parts = _Parts.of(name, {}, {})
        self.draw_at = self.full_look_at = 0.0
        self.is_costly = False


class Look(NamedTuple):
    """One reading of queues: the last parameters of `faktory_claim_1`, and what `Bounds.conclude` needs."""

    values: tuple[list[str], str, str, str, str | None]
    late: dict[str, dict[int, Bound]]
    full: list[_Queue]
    wanted: list[str]
    """Queues that `faktory_bounds_1` reads from their beginning if this node gets the turn, because that takes long."""
    draws: bool
    """Whether `faktory_bounds_1` has to be called."""
    is_due: bool
    began_at: float


class Bounds:
    """The bounds of one node. Thread-safe.

    `period_s` is the time between two bounds of a queue. `slack` is by how much the clock of the database may go back.
    `full_look_s` is the shortest and the longest time between two readings of a queue from its beginning; with
    `takes_turns`, one node at a time does so if it takes long. Beside late transactions a bound trails by at most
    `max_marks` periods.
    """

    def __init__(
        self,
        *,
        period_s: float = 0.2,
        slack: timedelta = timedelta(seconds=0.05),
        full_look_s: tuple[float, float] = (1.0, 10.0),
        max_marks: int = 8,
        takes_turns: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._period_s, self._slack, self._full_look_s, self._clock = period_s, slack, full_look_s, clock
        self._queues: dict[str, _Queue] = {}
        self._marks: deque[_Mark] = deque(maxlen=max_marks + 1)
        self._max_marks, self._takes_turns = max_marks, takes_turns
        self._lock = threading.Lock()

    def look(self, queues: Iterable[str], *, draws: bool = False) -> Look:
        """Return where to begin to read these queues; call `conclude` after it. `draws`: bounds may be drawn."""
        now = self._clock()
        found: list[_Parts] = []
        late: dict[str, dict[int, Bound]] = {}
        full: list[_Queue] = []
        wanted: list[str] = []
        is_due = False
        for name in queues:
            queue = self._queues.get(name)
            if queue is None:
                found.append(_Parts.of(name, {}, {}))
                continue
            parts = queue.parts
            if parts.late:
                late[name] = parts.late
            if now >= queue.full_look_at and queue.is_costly:
                if draws:
                    queue.full_look_at = now + self._full_look_s[0]
                    wanted.append(name)
            elif now >= queue.full_look_at:
                queue.full_look_at = now + self._full_look_s[1]  # until `conclude` knows how long it took
                full.append(queue)
                parts = parts._replace(starts=_join(*[_BEGINNING] * len(parts.names)))
            if draws and now >= queue.draw_at:
                queue.draw_at, is_due = now + self._period_s, True
            found.append(parts)
        names, ranks, starts, ends = found[0][2:] if len(found) == 1 else _merge(found)
        values = (names, f"{{{ranks}}}", f"{{{starts}}}", f"{{{ends}}}", _encode(late) if late else None)
        return Look(values, late, full, wanted, draws and (is_due or bool(late or wanted)), is_due, now)

    def conclude(self, look: Look, claimed: Iterable[tuple[str, int]], drawn: Sequence[Drawn]) -> None:
        """Note the queues and priorities of claimed jobs, and new bounds."""
        now = self._clock()
        for queue in look.full:
            shortest_s, longest_s = self._full_look_s
            took_s = now - look.began_at
            queue.full_look_at = now + min(max(FULL_LOOK_FACTOR * took_s, shortest_s), longest_s)
            queue.is_costly = self._takes_turns and took_s > COSTLY_S
        for name, rank in claimed:
            found = self._queues.get(name)
            if found is None or (rank not in found.parts.bounds and len(found.parts.bounds) < MAX_PRIORITIES):
                self._add(name, rank)
        if drawn:
            self._draw(look, drawn, now)
        for row in drawn:
            if row.has_turn and (known := self._queues.get(row.queue)):
                known.is_costly = now - look.began_at > COSTLY_S

    def _add(self, name: str, rank: int) -> None:
        with self._lock:
            while len(self._queues) >= MAX_QUEUES and name not in self._queues:
                del self._queues[next(iter(self._queues))]
            queue = self._queues.setdefault(name, _Queue(name))
            bounds = {rank: None, **queue.parts.bounds}
            queue.parts = _Parts.of(name, dict(sorted(bounds.items())), queue.parts.late)

    def _draw(self, look: Look, rows: Sequence[Drawn], now: float) -> None:
        first = rows[0]
        with self._lock:
            self._set(look, rows)
            if first.xid is not None and (not self._marks or now - self._marks[-1].known_at >= self._period_s / 2):
                self._marks.append(_Mark(first.xid, first.began_at, now))

    def _set(self, look: Look, rows: Sequence[Drawn]) -> None:
        _, xmax, open_xids = rows[0].seen.split(":")
        xids = [int(xid) for xid in open_xids.split(",") if xid]
        # The bounds stay behind a transaction of this node: those that began after it end without any notice. One below
        # xmax, because the snapshot lists the open ones up to there. The newest one with the fewest late transactions,
        # because claims look for the jobs of each that ends. Not the oldest one: a transaction that is late at the next
        # draw has no job before it.
        marks = [mark for mark in reversed(self._marks) if mark.xid < int(xmax)][: self._max_marks]
        if not marks:
            return
        mark = min(marks, key=lambda mark: sum(xid < mark.xid for xid in xids))
        late = [xid for xid in xids if xid < mark.xid]
        if len(late) > MAX_LATE:
            return
        limit = mark.began_at - self._slack
        bounds: dict[str, dict[int, Bound]] = {}
        for row in rows:
            bounds.setdefault(row.queue, {})[row.rank] = min(row.first_at or limit, limit)
        for name, drawn in bounds.items():
            if queue := self._queues.get(name):
                known = look.late.get(name, {})
                # A priority that this reading did not know is read from its beginning.
                queue.parts = _Parts.of(
                    name,
                    {rank: drawn.get(rank) for rank in queue.parts.bounds},
                    {xid: known[xid] if xid in known else self._began(xid) for xid in late},
                )

    def _began(self, xid: int) -> Bound:
        """Return the time before which a transaction has no job."""
        return next((mark.began_at - self._slack for mark in reversed(self._marks) if mark.xid < xid), None)


def _merge(found: Sequence[_Parts]) -> tuple[list[str], str, str, str]:
    return (
        [name for parts in found for name in parts.names],
        ",".join(parts.ranks for parts in found),
        ",".join(parts.starts for parts in found),
        ",".join(parts.ends for parts in found),
    )


def _encode(late: dict[str, dict[int, Bound]]) -> str:
    return json.dumps(
        [
            {"queue": name, "xid": str(xid), "since": str(since or _BEGINNING)}
            for name, transactions in late.items()
            for xid, since in transactions.items()
        ]
    )
