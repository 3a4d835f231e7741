"""End a job that held a lock and claim the next job of its key, by one statement on PostgreSQL (ADR 0015)."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper

from ....core.payloads import Ack
from ..values import ClaimPlan, EndedRun, HandoffResult
from .calls import call
from .rows import reservations

MAX_REMEMBERED = 10_000
"""Maximum number of remembered jobs that received their lock from an ended job.

A forgotten job costs one exchange with several statements.
"""


class LockHandoff:
    """Memory of jobs for which the function is likely to succeed, and its call.

    A job that received its lock from an ended job is likely to be followed by another job of its key. If all keys are
    different, no job receives its lock that way, and the function is never tried.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_holders: dict[str, None] = {}

    def remember(self, jids: Iterable[str]) -> None:
        """Remember jobs that received their lock from an ended job."""
        # Exchanges in several threads share this dict; `expects` only reads it, and needs no mutex.
        with self._lock:
            self._next_holders.update(dict.fromkeys(jids))
            # Dicts keep their insertion order, so the oldest job is forgotten first.
            while len(self._next_holders) > MAX_REMEMBERED:
                del self._next_holders[next(iter(self._next_holders))]

    def expects(self, jid: str) -> bool:
        """Return whether this job received its lock from an ended job."""
        return jid in self._next_holders

    def run(
        self, connection: BaseDatabaseWrapper, ack: Ack, plan: ClaimPlan, now: datetime | None
    ) -> HandoffResult | None:
        """Call the function for this ack; None: it did nothing. Tried once for each job."""
        # Forgotten before the attempt: if the function does nothing, the exchange ends this job as usual.
        with self._lock:
            self._next_holders.pop(ack.jid, None)
        # The plan is that of a single request, so all of its slots have the same wid.
        queues, next_wid = [slot.queue for slot in plan.slots], plan.slots[0].wid
        rows = call(
            connection,
            "faktory_hand_off_1",
            [
                ack.jid, ack.wid, ack.attempt, ack.result, queues, next_wid, plan.mark, plan.at_least_s, plan.at_most_s,
                plan.lease_s, now,
            ],
        )  # fmt: skip
        if not rows:
            return None
        [(is_all, wid, attempt, queue, jobtype, started_at, ended_at, *job_columns)] = rows
        [job] = reservations([[tuple(job_columns)]])
        # Another job of the key is likely to follow this one too.
        self.remember([job.jid])
        ended_run = EndedRun(wid, attempt, queue, jobtype, (ended_at - started_at).total_seconds())
        return HandoffResult({ack.jid: ended_run}, job, is_all)
