"""Define what the operations of a `Dialect` take and return: plain data that all dialects share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from ...core.payloads import Reservation
from .bounds import Bounds


class ClaimSlot(msgspec.Struct, frozen=True, gc=False):
    """One entry of a `ClaimPlan`: claim up to `count` jobs of this queue for this worker."""

    queue: str
    wid: str
    count: int


class ClaimPlan(msgspec.Struct, frozen=True, gc=False):
    """Description of a claim: at most `count` jobs for each slot, and at most `limit` jobs in total.

    If the plan names several wids, the counts of its slots add up to the limit.
    """

    slots: Sequence[ClaimSlot] = ()
    limit: int = 0
    lease_s: float = 0.0
    """Lease in seconds of a lock that is acquired together with the claim, see `Dialect.exchange`."""
    claim: int | None = None
    """Number that marks the claimed rows, see `unanswered_claims`; negated until the delivery is confirmed."""
    at_least_s: float | None = None
    """Minimum reservation in seconds, for workers with heartbeats that extend it: it must outlast WORKER_TIMEOUT."""
    at_most_s: float | None = None
    """Lease in seconds until the delivery is confirmed; None: the claim needs no confirmation."""
    prefetch_slots: Sequence[ClaimSlot] = ()
    """Slots to prefetch in addition, for later FETCHes; their wids are ignored (ADR 0026)."""
    candidate_wids: Collection[str] = ()
    """Wids that may receive prefetched jobs; nothing is prefetched if one of them is quiet or terminating."""
    bounds: Bounds | None = None
    """Where to begin to read the queues; None: at their beginning."""
    next_plans: Sequence[ClaimPlan] = ()
    """Further plans; only their slots and limits are used.

    They are claimed in this order after this plan, if the dialect `claims_in_turn`.
    """

    @property
    def mark(self) -> int | None:
        """Return the number that the claim of `slots` writes into its rows."""
        # A claim for clients of a server is negative until the delivery is confirmed (ADR 0026).
        return self.claim if self.claim is None or self.at_most_s is None else -self.claim


class Tally(msgspec.Struct, frozen=True, gc=False):
    """Amounts to add to the totals of a day. A field is a name of `TOTALS`."""

    processed: int = 0
    failed: int = 0
    late: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(sum(pair) for pair in zip(self.amounts, other.amounts, strict=True)))

    @property
    def amounts(self) -> tuple[int, ...]:
        """Its amounts, in the order of `TOTALS`."""
        return msgspec.structs.astuple(self)


TOTALS = Tally.__struct_fields__
"""Totals of each day. No row shows them, so they are never recounted."""


class FailureColumns(NamedTuple):
    """Id of a job's row, and the columns that a failure changes."""

    id: Any
    state: Any
    unique_key: Any
    lock_token: Any
    permits: Any
    wid: Any
    failures: Any
    losses: Any
    errtype: Any
    failure: Any
    history: Any
    run_at: Any
    enqueued_at: Any
    started_at: Any
    reserved_until: Any
    finished_at: Any
    purge_at: Any
    failed_at: Any


class LockedRows(NamedTuple):
    """Rows of jobs that this transaction has locked."""

    columns: Sequence[str]
    rows: Sequence[tuple[Any, ...]]
    now: datetime
    """The time at which the rows were locked."""


class RunningJob(NamedTuple):
    """Columns of a locked row of a running job that its successful end reads."""

    id: int
    jid: str
    wid: str
    attempt: int
    result_ttl: int | None
    queue: str
    jobtype: str
    started_at: datetime | None
    lock_key: str | None
    lock_token: int | None
    permits: str | None
    bid: str | None
    callback_of: str | None
    has_run: bool
    counts_failed: bool


class EndedRun(NamedTuple):
    """Run of an ended job: its worker, attempt, queue, jobtype and run time in seconds."""

    wid: str
    attempt: int
    queue: str = ""
    jobtype: str = ""
    ran_s: float = 0.0


Ended = dict[str, EndedRun]
"""Ended jobs, by jid."""


class AckResult(NamedTuple):
    """Result of `end`: the ended jobs, and the jids in `remaining`, which it did not change.

    Members of batches are in `remaining`; `store.jobs.endings` ends them.
    """

    ended: Ended
    remaining: set[str]
    readied: Collection[str] = ()
    """Queues in which jobs that waited for a lock or a permit became ready."""
    blocked: Collection[str] = ()
    """Keys to pass to `locks.promote_waiters` after the commit.

    These are the keys of jobs stored in the same exchange that wait for a lock, and of jobs that are next for a lock
    while another transaction has their rows locked.
    """
    limiters: Collection[int] = ()
    """Limiters to pass to `limiters.promote_waiters` after the commit: their jobs wait for a rate, or were locked."""
    handed: Collection[str] = ()
    """Jids of jobs that became ready, and that the same exchange has claimed with their lock."""

    @property
    def has_waiters(self) -> bool:
        """Whether jobs of other runs became ready, or have to be looked at after the commit."""
        return bool(self.readied or self.blocked or self.limiters)


class HandoffResult(NamedTuple):
    """Result of `hand_off_lock`: the ended job, and the claimed one with its lock."""

    ended: Ended
    job: Reservation
    is_all: bool
    """Whether no other job was ready in the plan's queues; further requests for these queues get nothing."""


class PushResult(NamedTuple):
    """Result of `insert`: which jobs were not stored, and what waits."""

    refused: Collection[str] = ()
    """Jids of jobs whose unique key a stored job has."""
    blocked: Collection[str] = ()
    """Lock keys that some of the stored jobs wait for."""
    is_undecided: bool = False
    """Nothing was stored: the isolation of the caller's transaction hides which unique keys are taken."""


ALL_STORED = PushResult()
"""Usual result of `insert`."""
