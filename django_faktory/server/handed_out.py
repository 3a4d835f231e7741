"""Deliveries of this node: jobs that were sent to clients and are to be confirmed (ADR 0022 and 0026), and jobs of
batches, whose ends may have to wait (ADR 0023)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..errors import FaktoryError
from ..payloads import MAX_NAME, HandedOut, Reservation

CONFIRM_S = 0.25
"""Until a job that was read ahead is confirmed, or half as long again: its row does not name its worker before."""

CONFIRM_CLAIMED_S = 2.0
"""Until a job that was claimed for its client is confirmed, or half as long again. Most have ended by then, and cost no
statement. A job delivered less than this before its node is killed runs again when its lease ends."""

MOST_MEMBERS = 10_000
"""So many jobs of batches are known; an older one's end is taken for one that need not wait."""

NOBODYS_ATTEMPT = -1
"""With it a report changes nothing, and is counted as one that did."""

LONGEST_READ = 64 * 1024
"""Characters of a job that is read for its batch's id, on the event loop."""


class _Custom(msgspec.Struct):
    bid: Any = None
    callback_of: Any = msgspec.field(name="_bid", default=None)


class _JobText(msgspec.Struct):
    custom: _Custom | None = None


def batch_in(text: str) -> str:
    """The batch whose member or callback a job is, as its JSON has it; "" for none, and for a long text."""
    try:
        custom = msgspec.json.decode(text, type=_JobText).custom if len(text) <= LONGEST_READ else None
    except (msgspec.MsgspecError, UnicodeError):
        return ""
    bid = custom and (custom.bid or custom.callback_of)
    return bid if isinstance(bid, str) and len(bid) <= MAX_NAME else ""


class HandOuts:
    """The deliveries of the node. `confirm` calls `Broker.confirm` and passes its answer to the callback."""

    def __init__(
        self,
        *,
        confirm: Callable[[Sequence[HandedOut], Callable[[set[str] | FaktoryError], None]], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._confirm, self._loop = confirm, loop
        self._handed: dict[str, tuple[float, Reservation]] = {}
        self._members: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_asking = False

    def add(self, job: Reservation) -> None:
        """Note that a client gets this job, until it ends or is confirmed."""
        self._handed[job.jid] = (self._loop.time(), job)
        if self._timer is None:
            self._timer = self._loop.call_later(CONFIRM_S, self._look)

    def know(self, job: Reservation) -> None:
        """Somebody gets it, from the shelf or not."""
        if not job.is_batchless:
            self._members[job.jid] = batch_in(job.text)
            if len(self._members) > MOST_MEMBERS:
                del self._members[next(iter(self._members))]

    def is_member(self, jid: str) -> bool:
        """Whether it may be of a batch."""
        return jid in self._members

    def batch_of(self, jid: str) -> str:
        """The batch that its end changes, where that is known; else ""."""
        return self._members.get(jid, "")

    def attempt_of(self, jid: str, wid: str) -> int | None:
        """The attempt that a report of this worker is about: None, any, unless it is known that another has the job."""
        handed = self._handed.get(jid)
        if handed is None or not handed[1].is_ahead:
            return None  # its row says which worker has it
        if not wid or not handed[1].wid or handed[1].wid == wid:
            return None
        return NOBODYS_ATTEMPT

    def forget(self, jid: str) -> None:
        """It has ended, or went back."""
        self._handed.pop(jid, None)
        self._members.pop(jid, None)

    def confirm_all(self) -> None:
        """Confirm all deliveries that are left, however recent."""
        self._send(list(self._handed.values()))

    def _look(self) -> None:
        self._timer = None
        if not self._is_asking:  # a database that is slow is not asked the same again and again
            self._send(self._due(self._loop.time()))
        if self._handed:
            self._timer = self._loop.call_later(CONFIRM_S, self._look)

    def _due(self, now: float) -> list[tuple[float, Reservation]]:
        """The deliveries to confirm now. Once one is due, those that soon will be go along."""
        due: list[tuple[float, Reservation]] = []
        is_any_late = False
        for handed in self._handed.values():
            at, job = handed
            if now - at >= (CONFIRM_S if job.is_ahead else CONFIRM_CLAIMED_S) / 2:
                due.append(handed)
                is_any_late = is_any_late or job.is_ahead or now - at >= CONFIRM_CLAIMED_S
        return due if is_any_late else []

    def _send(self, due: Sequence[tuple[float, Reservation]]) -> None:
        if not due:
            return
        now = self._loop.time()
        self._is_asking = True

        def told(left: set[str] | FaktoryError) -> None:
            self._is_asking = False
            if isinstance(left, FaktoryError):
                return
            for handed in due:
                jid = handed[1].jid
                if jid not in left and self._handed.get(jid) is handed:
                    del self._handed[jid]

        self._confirm([HandedOut(job, now - at) for at, job in due], told)
