"""What the server must know of jobs that it handed out: those from the shelf, of which the database does not know yet
who has them (ADR 0022), and those of batches, whose ends may have to wait (ADR 0023)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..errors import FaktoryError
from ..payloads import HandedOut, Reservation

CONFIRM_S = 0.25
"""A job that runs as long as this, and at most one and a half times as long, is confirmed."""

MOST_MEMBERS = 10_000
"""So many jobs of batches are known; an older one's end is taken for one that need not wait."""

NOBODYS_ATTEMPT = -1
"""With it a report changes nothing, and is counted as one that did."""

LONGEST_READ = 64 * 1024
"""Characters of a job that is read for its batch's id, on the event loop."""


class _Custom(msgspec.Struct):
    bid: Any = None
    callback_of: Any = msgspec.field(name="_bid", default=None)


class _Text(msgspec.Struct):
    custom: _Custom | None = None


def batch_in(text: str) -> str:
    """The batch whose member or callback a job is, as its JSON has it; "" for none, and for a long text."""
    try:
        custom = msgspec.json.decode(text, type=_Text).custom if len(text) <= LONGEST_READ else None
    except (msgspec.MsgspecError, UnicodeError):
        return ""
    bid = custom and (custom.bid or custom.callback_of)
    return bid if isinstance(bid, str) else ""


class HandOuts:
    """Those of the node. `confirm` carries `Broker.confirm` out and calls back with its answer."""

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
        """Somebody got it."""
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
        if handed is None or not wid or not handed[1].wid or handed[1].wid == wid:
            return None
        return NOBODYS_ATTEMPT

    def forget(self, jid: str) -> None:
        """It has ended, or went back."""
        self._handed.pop(jid, None)
        self._members.pop(jid, None)

    def confirm_all(self) -> None:
        """Confirm what is left, however young it is."""
        self._send(list(self._handed.values()))

    def _look(self) -> None:
        self._timer = None
        if not self._is_asking:  # a database that is slow is not asked the same again and again
            until = self._loop.time() - CONFIRM_S / 2
            self._send([handed for handed in self._handed.values() if handed[0] <= until])
        if self._handed:
            self._timer = self._loop.call_later(CONFIRM_S, self._look)

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
