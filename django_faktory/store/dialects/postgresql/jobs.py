"""Calls of the stored functions that end and claim jobs, and what their rows mean (ADR 0043).

A call is a function with its values. A set is sent as one JSON parameter or as arrays, so that the call's text does not
depend on its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec

from ....core.payloads import Ack, Reservation
from ..base import DELIVERY_LEASE_S, DELTA
from ..bounds import Bounds, Drawn
from ..values import TOTALS, AckResult, ClaimPlan, Ended, EndedRun
from .calls import function
from .pipeline import Rows
from .prepared import Call, Command
from .rows import ACQUIRED, reservations

NOT_HELD = "FK001"
"""SQLSTATE of `faktory_end_1` with `is_last`: a job is no longer held as it was."""

ADD_TO_COUNTERS = Command(
    "faktory_count",
    ["date", *["int"] * len(TOTALS)],
    f"""
INSERT INTO {DELTA} (kind, name, amount) SELECT kind, to_char($1, 'YYYY-MM-DD'), amount
FROM (VALUES {", ".join(f"('{name}', ${place})" for place, name in enumerate(TOTALS, 2))}) AS n (kind, amount)
WHERE amount > 0""",
    gives_rows=False,
)

_json = msgspec.json.Encoder()


def end_call(acks: Sequence[Ack], now: datetime | None, pushed: Sequence[str] = (), *, is_last: bool = False) -> Call:
    """Return the call that ends jobs, and locks the rows with the jids in `pushed`."""
    # Without the log lines, which are stored before: they may have characters that the database refuses.
    reports = [msgspec.structs.replace(ack, log=()) if ack.log else ack for ack in acks]
    return function("faktory_end_1"), [str(_json.encode(reports), "utf-8"), len(acks), list(pushed), now, is_last]


def claim_calls(
    plan: ClaimPlan, now: datetime | None, *, is_lazy: bool, is_own: bool
) -> tuple[list[Call], Callable[[list[Rows]], list[Reservation]]]:
    """Return a claim for each wid of the plan, followed by the claims of its `next_plans`, then the prefetch.

    Also returns the function that reads their rows. `is_lazy`: the claims are alone in their transaction, and need not
    be on disk. `is_own`: the transaction ends with this message.
    """
    claim = function("faktory_claim_1")
    calls: list[Call] = []
    # A fixed time may be any time, and what a transaction of the caller has seen may be rolled back.
    bounds = plan.bounds if plan.bounds and now is None else Bounds()
    parts = (plan, *plan.next_plans)
    queues = {slot.queue for slots in (*(part.slots for part in parts), plan.prefetch_slots) for slot in slots}
    look = bounds.look(queues, draws=is_own)
    for subplan in parts:
        by_wid: dict[str, tuple[list[str], list[int]]] = {}
        for slot in subplan.slots:
            names, counts = by_wid.setdefault(slot.wid, ([], []))
            names.append(slot.queue)
            counts.append(slot.count)
        leases = [plan.mark, plan.at_least_s, plan.at_most_s, plan.lease_s, now, is_lazy]
        for wid, (names, counts) in by_wid.items():
            calls.append((claim, [names, counts, wid, subplan.limit, *leases, *look.values]))
    # Last: the buffer gets jobs behind those of the requests in the order of the queue (ADR 0026).
    if plan.prefetch_slots:
        names, counts = [slot.queue for slot in plan.prefetch_slots], [slot.count for slot in plan.prefetch_slots]
        mark = None if plan.claim is None else -plan.claim
        lease_s = DELIVERY_LEASE_S if plan.at_most_s is None else plan.at_most_s
        values = [names, counts, mark, lease_s, list(plan.candidate_wids), now, *look.values]
        calls.append((function("faktory_prefetch_1"), values))
    count = len(calls)
    if look.draws:
        queue_names, ranks, starts, _, late = look.values
        calls.append((function("faktory_bounds_1"), [queue_names, ranks, starts, late, look.is_due, look.wanted]))

    def read(results: list[Rows]) -> list[Reservation]:
        claimed = results[:count]
        drawn = [Drawn(*row) for rows in results[count:] for row in rows]
        bounds.conclude(look, [(row[5], row[2]) for rows in claimed for row in rows if row[0] != ACQUIRED], drawn)
        return reservations(claimed)

    return calls, read


def read_ends(rows: Rows, claimed: Sequence[Reservation]) -> AckResult:
    """Return what the rows of `faktory_end_1` mean, beside the jobs that the same transaction has claimed."""
    ended: Ended = {}
    members: set[str] = set()
    readied: set[str] = set()
    keys: set[str] = set()
    limiters: set[int] = set()
    handed: set[str] = set()
    for kind, jid, wid, attempt, name, jobtype, started_at, ended_at in rows:
        match kind:
            case "ended":
                ended[jid] = EndedRun(wid, attempt, name, jobtype, (ended_at - started_at).total_seconds())
            case "member":
                members.add(jid)
            case "ready":
                # A job that this transaction has claimed already needs no notification.
                job = next((job for job in claimed if job.jid == jid), None)
                if job is None:
                    readied.add(name)
                elif job.lock_token is not None:
                    handed.add(jid)
            case "key":
                keys.add(name)
            case "limiter":
                limiters.add(int(name))
    return AckResult(ended, members, readied, keys, limiters, handed)
