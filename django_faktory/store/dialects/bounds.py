"""Where claims of PostgreSQL begin to read each queue: behind the index entries of jobs that were claimed (ADR 0046).

A bound is a time for a queue and priority: no ready job is older, except for those that are marked as returned, and
those of transactions that were open when the bound was drawn (`late`).
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

PERIOD_S = 0.5
"""Time between two bounds of a queue, and minimum age of a transaction that counts as late."""
SLACK = timedelta(seconds=0.5)
"""How long before its first write a transaction may have read the time of its jobs."""
MAX_PRIORITIES, MAX_QUEUES, MAX_LATE = 8, 1000, 32
"""Above these numbers, queues and priorities get no bound, and bounds are not drawn."""
FULL_LOOK_FACTOR, FULL_LOOK_MIN_S, FULL_LOOK_MAX_S = 100, 1.0, 10.0
"""A queue is read from its beginning after this multiple of the time that it took the last time."""

Bound = datetime | None
"""None: from the beginning."""


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


class _Mark(NamedTuple):
    """A transaction of this node: one with a higher xid has no job that is older than `began_at`, but for `SLACK`."""

    xid: int
    began_at: datetime
    known_at: float


class _Queue:
    """What is known about a queue. `drawn` is replaced as a whole, so that other threads see parts that fit."""

    def __init__(self) -> None:
        self.drawn: tuple[dict[int, Bound], dict[int, Bound]] = {}, {}
        """Bounds by sort_priority, ascending; and late transactions with the time before which they have no job."""
        self.draw_at = self.full_look_at = 0.0


class Look(NamedTuple):
    """One reading of queues: the last parameters of `faktory_claim_1`, and what `Bounds.conclude` needs."""

    parts: tuple[list[str], str, str, str, str | None]
    late: dict[str, dict[int, Bound]]
    full: list[_Queue]
    draws: bool
    """Whether `faktory_bounds_1` has to be called."""
    is_due: bool
    began_at: float


class Bounds:
    """The bounds of one node. Thread-safe."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._marks: deque[_Mark] = deque(maxlen=16)
        self._lock = threading.Lock()

    def look(self, queues: Iterable[str], *, draws: bool = False) -> Look:
        """Return where to begin to read these queues; call `conclude` after it. `draws`: bounds may be drawn."""
        now = time.monotonic()
        names: list[str] = []
        ranks, starts, ends = [], [], []
        late: dict[str, dict[int, Bound]] = {}
        full: list[_Queue] = []
        is_due = False
        for name in queues:
            bounds: dict[int, Bound] = {}
            if queue := self._queues.get(name):
                bounds, late[name] = queue.drawn
                if now >= queue.full_look_at:
                    queue.full_look_at = now + FULL_LOOK_MAX_S  # until `conclude` knows how long it took
                    full.append(queue)
                    bounds = dict.fromkeys(bounds)
                if draws and now >= queue.draw_at:
                    queue.draw_at, is_due = now + PERIOD_S, True
            names += [name] * (len(bounds) + 1)
            ranks += [-101, *bounds]
            starts += [None, *bounds.values()]
            ends += [*bounds, 101]
        is_late = any(late.values())
        parts = (names, _array(ranks), _array(map(_text, starts)), _array(ends), _encode(late) if is_late else None)
        return Look(parts, late, full, draws and (is_due or is_late), is_due, now)

    def conclude(self, look: Look, claimed: Iterable[tuple[str, int]], drawn: Sequence[Drawn]) -> None:
        """Note the queues and priorities of claimed jobs, and new bounds."""
        now = time.monotonic()
        for queue in look.full:
            took_s = now - look.began_at
            queue.full_look_at = now + min(max(FULL_LOOK_FACTOR * took_s, FULL_LOOK_MIN_S), FULL_LOOK_MAX_S)
        for name, rank in claimed:
            found = self._queues.get(name)
            if found is None or (rank not in found.drawn[0] and len(found.drawn[0]) < MAX_PRIORITIES):
                self._add(name, rank)
        if drawn:
            self._draw(look, drawn, now)

    def _add(self, name: str, rank: int) -> None:
        with self._lock:
            while len(self._queues) >= MAX_QUEUES and name not in self._queues:
                del self._queues[next(iter(self._queues))]
            queue = self._queues.setdefault(name, _Queue())
            bounds, late = queue.drawn
            queue.drawn = dict(sorted(({rank: None} | bounds).items())), late

    def _draw(self, look: Look, rows: Sequence[Drawn], now: float) -> None:
        first = rows[0]
        with self._lock:
            # The bounds stay behind a transaction of a while ago: those that began since then end without any notice.
            mark = next((mark for mark in reversed(self._marks) if now - mark.known_at >= PERIOD_S), None)
            if mark:
                self._set(look, rows, mark)
            if first.xid is not None and (not self._marks or now - self._marks[-1].known_at >= PERIOD_S / 2):
                self._marks.append(_Mark(first.xid, first.began_at, now))

    def _set(self, look: Look, rows: Sequence[Drawn], mark: _Mark) -> None:
        limit = mark.began_at - SLACK
        late = [int(xid) for xid in rows[0].seen.split(":")[2].split(",") if xid and int(xid) < mark.xid]
        if len(late) > MAX_LATE:
            return
        bounds: dict[str, dict[int, Bound]] = {}
        for row in rows:
            bounds.setdefault(row.queue, {})[row.rank] = min(row.first_at or limit, limit)
        for name, drawn in bounds.items():
            if queue := self._queues.get(name):
                known = look.late.get(name, {})
                # A priority that this reading did not know is read from its beginning.
                queue.drawn = (
                    {rank: drawn.get(rank) for rank in queue.drawn[0]},
                    {xid: known[xid] if xid in known else self._began(xid) for xid in late},
                )

    def _began(self, xid: int) -> Bound:
        """Return the time before which a transaction has no job."""
        return next((mark.began_at - SLACK for mark in reversed(self._marks) if mark.xid < xid), None)


def _array(values: Iterable[Any]) -> str:
    return f"{{{','.join(map(str, values))}}}"


def _text(bound: Bound) -> str:
    return f'"{bound}"' if bound else "-infinity"


def _encode(late: dict[str, dict[int, Bound]]) -> str:
    return json.dumps(
        [
            {"queue": name, "xid": str(xid), "since": str(since or "-infinity")}
            for name, transactions in late.items()
            for xid, since in transactions.items()
        ]
    )
