"""Track deliveries of this node: jobs that were sent to clients and must be confirmed (ADR 0026).

`DeliveryTracker` also remembers which jobs belong to a batch, as their ACK or FAIL may block on the batch's row
(ADR 0024).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..core.payloads import MAX_NAME, Delivery, Reservation
from ..errors import FaktoryError
from .tuning import DEFAULT_TUNING, Tuning

MAX_BATCH_MEMBERS = 10_000
"""Maximum number of batch members that are remembered; the ACK of an older one is treated as not blocking."""

NO_ATTEMPT = -1
"""Attempt number that matches no job: a report with it changes nothing and is answered with OK."""

MAX_PARSED_TEXT = 64 * 1024
"""Longest job text that is parsed for its batch id, since that runs on the event loop."""


class _Custom(msgspec.Struct):
    # Any: a value of another type is ignored below instead of failing the decoding of the other member.
    bid: Any = None
    callback_of: Any = msgspec.field(name="_bid", default=None)


class _JobText(msgspec.Struct):
    custom: _Custom | None = None


def read_batch_id(text: str) -> str:
    """Return the id of the batch of a job or callback from its JSON; "" for none or a long text."""
    try:
        custom = msgspec.json.decode(text, type=_JobText).custom if len(text) <= MAX_PARSED_TEXT else None
    except (msgspec.MsgspecError, UnicodeError):
        return ""
    bid = custom and (custom.bid or custom.callback_of)
    return bid if isinstance(bid, str) and len(bid) <= MAX_NAME else ""


class DeliveryTracker:
    """Deliveries of the node. `confirm` calls `Broker.confirm` and passes its answer to the callback."""

    def __init__(
        self,
        *,
        confirm: Callable[[Sequence[Delivery], Callable[[set[str] | FaktoryError], None]], None],
        loop: asyncio.AbstractEventLoop,
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        self._confirm, self._loop, self._tuning = confirm, loop, tuning
        self._unconfirmed: dict[str, tuple[float, Reservation]] = {}  # by jid: time of the delivery, and the job
        self._members: dict[str, str] = {}  # jid of each delivered batch member -> its bid
        self._timer: asyncio.TimerHandle | None = None
        self._is_confirming = False

    def add(self, job: Reservation) -> None:
        """Track a delivery until the job ends or is confirmed."""
        self._unconfirmed[job.jid] = (self._loop.time(), job)
        if self._timer is None:
            self._timer = self._loop.call_later(self._tuning.confirm_s, self._confirm_due)

    def remember_batch(self, job: Reservation) -> None:
        """Remember the batch of a job that is about to be delivered."""
        if not job.is_batchless:
            self._members[job.jid] = read_batch_id(job.text)
            if len(self._members) > MAX_BATCH_MEMBERS:
                del self._members[next(iter(self._members))]

    def is_batch_member(self, jid: str) -> bool:
        """Return whether a delivered job may belong to a batch."""
        return jid in self._members

    def batch_of(self, jid: str) -> str:
        """Return the id of the batch that the end of this job changes; "" if unknown."""
        return self._members.get(jid, "")

    def attempt_of(self, jid: str, wid: str) -> int | None:
        """Return the attempt to which a report of this worker refers; None matches any.

        `NO_ATTEMPT` if the job was delivered to another worker and its row does not say so yet.
        """
        delivery = self._unconfirmed.get(jid)
        if delivery is None or not delivery[1].is_prefetched:
            return None  # its row names its worker, so the database rejects reports of other workers
        # W16 is checked here: before its confirmation the row of a prefetched job does not name its worker.
        if not wid or not delivery[1].wid or delivery[1].wid == wid:
            return None
        return NO_ATTEMPT

    def forget(self, jid: str) -> None:
        """Stop tracking a job that has ended or was released; idempotent."""
        self._unconfirmed.pop(jid, None)
        self._members.pop(jid, None)

    def confirm_all(self) -> None:
        """Confirm all tracked deliveries, however recent."""
        self._send(list(self._unconfirmed.values()))

    def _confirm_due(self) -> None:
        self._timer = None
        if not self._is_confirming:  # one confirmation at a time: a slow database would get the same ones repeatedly
            self._send(self._due(self._loop.time()))
        if self._unconfirmed:
            self._timer = self._loop.call_later(self._tuning.confirm_s, self._confirm_due)

    def _due(self, now: float) -> list[tuple[float, Reservation]]:
        """Return the deliveries to confirm now: none until one is due, then also those past half of their time."""
        due: list[tuple[float, Reservation]] = []
        is_any_late = False
        for delivery in self._unconfirmed.values():
            at, job = delivery
            # Half: a delivery that is due soon joins this statement instead of causing another one.
            if now - at >= (self._tuning.confirm_s if job.is_prefetched else self._tuning.confirm_claimed_s) / 2:
                due.append(delivery)
                is_any_late = is_any_late or job.is_prefetched or now - at >= self._tuning.confirm_claimed_s
        return due if is_any_late else []

    def _send(self, due: Sequence[tuple[float, Reservation]]) -> None:
        if not due:
            return
        now = self._loop.time()
        self._is_confirming = True

        def on_confirmed(remaining: set[str] | FaktoryError) -> None:
            self._is_confirming = False
            if isinstance(remaining, FaktoryError):
                return  # the deliveries stay tracked, so the next `_confirm_due` sends them again
            for delivery in due:
                jid = delivery[1].jid
                # `is`: the same job may have ended and been delivered again meanwhile.
                if jid not in remaining and self._unconfirmed.get(jid) is delivery:
                    del self._unconfirmed[jid]

        self._confirm([Delivery(job, now - at) for at, job in due], on_confirmed)
