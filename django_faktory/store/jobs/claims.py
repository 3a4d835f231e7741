"""Claim jobs for fetch requests, together with the locks and permits they need. Rules: W13, ADR 0015 to 0017.

A `ClaimPlan` lists how many jobs of which queue to claim for which worker. Requests that are alike, or the first queue
of each request, are claimed without reading the queues first; `_plan_by_counts` counts the waiting jobs only when that
was not enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from django.db import Error

from ...core.logs import get_logger
from ...core.payloads import FetchRequest, Lease, Reservation, is_storable
from ...errors import FaktoryError
from ..dialects.values import ClaimPlan, ClaimSlot
from ..locks import locks
from ..store import Store
from ..transactions import run
from . import acquire, releases

logger = get_logger(__name__)

MAX_ROUNDS = 8
"""Maximum claims of one fetch: jobs that wait for locks or limits could otherwise keep it busy without a result."""

MAX_REQUEST_CLAIMS = 8
"""Maximum number of requests that get one claim each; above it, counting the waiting jobs first is cheaper."""


def fetch(store: Store, requests: Sequence[FetchRequest]) -> list[list[Reservation]]:
    """Reserve jobs for each request, in its order of queues, then priority, then age (W13). Does not wait for jobs.

    Locks no row that it does not return: requests of one worker with the same queues share one claim; otherwise each
    request tries its first queue, and a second plan, based on the number of waiting jobs, serves requests still short.
    """
    releases.release_unanswered(store)
    fetched = fetch_filtered([*map(drop_unstorable_queues, requests)], ClaimContext.of(store, requests))
    store.record_started(fetched)
    return fetched


def fetch_filtered(requests: Sequence[FetchRequest], context: ClaimContext) -> list[list[Reservation]]:
    """Run `fetch` for requests that `drop_unstorable_queues` has filtered."""
    return distribute(requests, context.claim(first_plan(requests)), context)


def first_plan(requests: Sequence[FetchRequest]) -> ClaimPlan:
    """Return the plan that needs no query: all queues of requests that are alike, else the first queue of each.

    Empty if requests of different workers differ.
    """
    requests = [request for request in requests if request.count]
    total = sum(request.count for request in requests)
    if are_alike(requests):
        return ClaimPlan(
            [ClaimSlot(queue, requests[0].wid, total) for queue in dict.fromkeys(requests[0].queues)], total
        )
    if len({request.wid for request in requests}) > 1:
        return ClaimPlan()  # their order within a queue depends on the number of waiting jobs, see `_plan_by_counts`
    slots: dict[str, int] = {}
    for request in requests:
        for queue in request.queues[:1]:
            slots[queue] = slots.get(queue, 0) + request.count
    return ClaimPlan([ClaimSlot(queue, requests[0].wid, count) for queue, count in slots.items()], total)


def plan_per_request(requests: Sequence[FetchRequest]) -> ClaimPlan | None:
    """Return a plan with one claim per request, in order; None for no request, or too many different ones.

    Each request gets what it would get if the requests arrived one by one. For dialects that have `claims_in_turn`.
    """
    parts: list[ClaimPlan] = []
    previous: FetchRequest | None = None
    for request in requests:
        if not request.count or not request.queues:
            continue
        count = request.count
        # Equal neighbours share a claim: each claim is a statement, and their number is limited.
        if previous and (previous.queues, previous.wid) == (request.queues, request.wid):
            count += parts.pop().limit
        parts.append(
            ClaimPlan([ClaimSlot(queue, request.wid, count) for queue in dict.fromkeys(request.queues)], count)
        )
        previous = request
    if not parts or len(parts) > MAX_REQUEST_CLAIMS:
        return None
    return msgspec.structs.replace(parts[0], next_plans=parts[1:]) if len(parts) > 1 else parts[0]


def are_alike(requests: Sequence[FetchRequest]) -> bool:
    """Return True if all requests with a count name the same worker and the same queues in the same order."""
    first: FetchRequest | None = None
    for request in requests:
        if not request.count:
            continue
        if first is None:
            first = request
        elif (request.queues, request.wid) != (first.queues, first.wid):
            return False
    return first is not None


def distribute(
    requests: Sequence[FetchRequest],
    claimed: Sequence[Reservation],
    context: ClaimContext,
    *,
    has_committed_work: bool = False,
    is_all: bool = False,
) -> list[list[Reservation]]:
    """Distribute claimed jobs among the requests, and claim more for requests still short, unless `is_all`.

    With `is_all`, each request had a claim of its own, so a shorter result is final. An error while claiming more is
    logged, not raised, if jobs were claimed before or if other work is already committed (`has_committed_work`):
    raising it would lose that result.
    """
    results: list[list[Reservation]] = [[] for _ in requests]
    if not claimed and not any(request.count for request in requests):
        return results
    if is_all or are_alike(requests):
        if not is_all and len(claimed) > 1:
            queues = next(request.queues for request in requests if request.count)
            claimed = sorted(claimed, key=lambda job: queues.index(job.queue))
        if unassigned := _assign_in_order(results, requests, claimed):
            _release_unassigned(unassigned, context)
        return results
    # Each of the different requests tried its first queue only. Distribute these jobs together with those of the next
    # claim: alone, a job could be given to a request for which its queue is the last choice.
    undistributed, total = list(claimed), sum(request.count for request in requests)
    for _ in range(MAX_ROUNDS):
        if sum(map(len, results)) + len(undistributed) >= total:
            break
        try:
            plan = _plan_by_counts(context.store, requests, results, undistributed)
            claimed_now = context.claim(plan)
        except (FaktoryError, Error) as error:
            if not (has_committed_work or undistributed or any(results)) or context.store.connection.in_atomic_block:
                raise
            logger.warning("claim failed, delivering the jobs that were claimed before error=%s", error)
            break
        _release_unassigned(_assign_by_queue(results, requests, undistributed + claimed_now), context)
        undistributed = []
        if not claimed_now:
            break
    _release_unassigned(_assign_by_queue(results, requests, undistributed), context)
    return results


def _release_unassigned(jobs: Sequence[Reservation], context: ClaimContext) -> None:
    """Release claimed jobs that no request takes: the queues changed between the count and the claim."""
    if not jobs:
        return
    try:
        releases.release(context.store, jobs)
    except (FaktoryError, Error) as error:
        # Logged only: raising it would lose the jobs that the requests have received.
        if context.store.connection.in_atomic_block:
            raise
        logger.warning("jobs not released, their reservations must end jobs=%d error=%s", len(jobs), error)
    # Ready again: wake up fetches that have found nothing meanwhile.
    locks.notify_ready(context.store.connection, {job.queue for job in jobs})


def fetch_after_commit(requests: Sequence[FetchRequest], context: ClaimContext) -> list[list[Reservation]]:
    """Fetch after other work has been committed: log errors, because raising them would lose its result."""
    try:
        claimed = context.claim(first_plan(requests))
    except (FaktoryError, Error) as error:
        if context.store.connection.in_atomic_block:
            raise
        logger.warning("claim failed, delivering the jobs that were claimed before error=%s", error)
        return [[] for _ in requests]
    return distribute(requests, claimed, context, has_committed_work=True)


def drop_unstorable_queues(request: FetchRequest) -> FetchRequest:
    """Return the request without queue names that no database can store.

    One such name would fail the claim for all requests that share its statement.
    """
    if is_storable("".join(request.queues)):
        return request
    return msgspec.structs.replace(request, queues=tuple(filter(is_storable, request.queues)))


def is_runnable(job: Reservation) -> bool:
    """Return True if a claimed job may run: it needs no further lock, and no limiter has to be asked."""
    return (job.lock_key is None or job.lock_token is not None) and job.permits != ""


class ClaimContext(NamedTuple):
    """What all claims of one call share: the store, and the durations of leases in seconds (ADR 0026)."""

    store: Store
    lease_s: float
    """Lease of a lock."""
    at_least_s: float | None = None
    at_most_s: float | None = None
    """Bounds of the reservation, see the fields of the same names in `ClaimPlan`."""

    @classmethod
    def of(cls, store: Store, requests: Sequence[FetchRequest]) -> ClaimContext:
        """Return the context of a claim for these requests, which must all ask for the same kind of lease."""
        lease = Lease.RESERVE_FOR
        for request in requests:
            if request.lease:
                lease = request.lease
                break
        if lease is Lease.HEARTBEAT:
            # A BEAT extends reservations that are half over. With twice WORKER_TIMEOUT, a reservation cannot end before
            # the worker counts as lost.
            return cls(store, store.lock_lease_s, at_least_s=2 * store.worker_timeout_s)
        if lease is Lease.DELIVERY:
            # A client extends the locks of its jobs with its BEAT only, and may send one as rarely as WORKER_TIMEOUT.
            lock_lease_s = max(store.lock_lease_s, store.worker_timeout_s)
            return cls(store, lock_lease_s, at_most_s=store.delivery_lease_s)
        return cls(store, store.lock_lease_s)

    def fill_plan(self, plan: ClaimPlan, number: int) -> ClaimPlan:
        """Return the plan with this claim number and with the leases of this context."""
        return msgspec.structs.replace(
            plan,
            lease_s=self.lease_s,
            claim=number,
            at_least_s=self.at_least_s,
            at_most_s=self.at_most_s,
            bounds=self.store.bounds,
        )

    def claim(self, plan: ClaimPlan) -> list[Reservation]:
        """Claim up to the number of jobs in the plan, with their locks and permits."""
        # The number marks the claimed rows: if the reply is lost, the broker releases them by it (ADR 0017).
        with self.store.claim_numbers.numbered() as number:
            plan = self.fill_plan(plan, number)
            return self.acquire_locks_and_permits(plan, self._claim(plan))

    def _claim(self, plan: ClaimPlan) -> list[Reservation]:
        if not plan.slots or plan.limit < 1:
            return []
        dialect = self.store.dialect
        # A plan with several wids may take one statement per worker, and then needs a transaction.
        is_joined = len({slot.wid for slot in plan.slots}) == 1 or dialect.can_join(self.store.connection)
        return run(
            self.store.alias,
            partial(dialect.claim, plan=plan, now=self.store.clock()),
            atomic=not (dialect.one_statement and is_joined),
        )

    def acquire_locks_and_permits(self, plan: ClaimPlan, claimed: list[Reservation]) -> list[Reservation]:
        """Acquire locks and permits for claimed jobs, and return the jobs that may run.

        Jobs that get no lock or permit become blocked; the plan is claimed again in their place, up to `MAX_ROUNDS`
        times. A plan with `next_plans` is not claimed again: its claims have an order.
        """
        runnable: list[Reservation] = []
        for rounds_left in reversed(range(MAX_ROUNDS)):
            if all(map(is_runnable, claimed)):
                return runnable + claimed if runnable else claimed
            acquired = acquire.acquire(self.store, claimed, lease_s=self.lease_s)
            runnable += acquired
            if len(acquired) == len(claimed):
                return runnable
            claimed = self._claim(_remaining_plan(plan, runnable)) if rounds_left and not plan.next_plans else []
        # Every job seen so far is blocked now, but runnable jobs may be behind these: wake up waiting fetches, so that
        # the next one continues from here.
        locks.notify_ready(self.store.connection, {slot.queue for slot in plan.slots})
        return runnable


def _remaining_plan(plan: ClaimPlan, runnable: Sequence[Reservation]) -> ClaimPlan:
    """Return the part of the plan that is still missing after the claim of `runnable`."""
    claimed_counts = Counter((job.queue, job.wid) for job in runnable)
    slots = [
        ClaimSlot(slot.queue, slot.wid, missing)
        for slot in plan.slots
        if (missing := slot.count - claimed_counts[slot.queue, slot.wid]) > 0
    ]
    # The first claim has prefetched already.
    return msgspec.structs.replace(
        plan, slots=slots, limit=plan.limit - len(runnable), prefetch_slots=(), candidate_wids=(), next_plans=()
    )


def _plan_by_counts(
    store: Store,
    requests: Sequence[FetchRequest],
    results: Sequence[Sequence[Reservation]],
    undistributed: Sequence[Reservation],
) -> ClaimPlan:
    """Return how many jobs of each queue each worker should claim, based on the number of jobs waiting in each queue.

    Serves the requests in order, and the queues of each request in order. `undistributed` jobs are claimed but not yet
    distributed: they count as waiting, and are subtracted from the plan.
    """
    needs = [request.count - len(result) for request, result in zip(requests, results, strict=True)]
    queues = dict.fromkeys(queue for request in requests for queue in request.queues)
    wids = {request.wid for request in requests if request.wid}
    waiting, quiet_wids = run(
        store.alias,
        lambda connection: store.dialect.count_ready(
            connection, list(queues), max(sum(needs), 0), wids, store.clock(), bounds=store.bounds
        ),
        atomic=False,
    )
    claimed_counts = Counter((job.queue, job.wid) for job in undistributed)
    for (queue, _), count in claimed_counts.items():
        waiting[queue] = waiting.get(queue, 0) + count
    slots: dict[tuple[str, str], int] = {}
    for request, need in zip(requests, needs, strict=True):
        missing = 0 if request.wid in quiet_wids else need  # terminating ones too; they get nothing
        for queue in request.queues:
            count_to_claim = min(missing, waiting.get(queue, 0))
            if count_to_claim:
                waiting[queue] -= count_to_claim
                missing -= count_to_claim
                slots[queue, request.wid] = slots.get((queue, request.wid), 0) + count_to_claim
    remaining_slots = [
        ClaimSlot(*place, count - claimed_counts[place])
        for place, count in slots.items()
        if count > claimed_counts[place]
    ]
    return ClaimPlan(remaining_slots, sum(slot.count for slot in remaining_slots))


def _assign_in_order(
    results: list[list[Reservation]], requests: Sequence[FetchRequest], claimed: Sequence[Reservation]
) -> Sequence[Reservation]:
    """Append claimed jobs to the results of the requests, both in order, and return the jobs that no request takes.

    If the jobs were claimed for these requests in turn, none is left: a request that takes the job of a later request
    leaves its own job to that request.
    """
    place = 0
    for request, result in zip(requests, results, strict=True):
        while (
            place < len(claimed)
            and len(result) < request.count
            and claimed[place].wid == request.wid
            and claimed[place].queue in request.queues
        ):
            result.append(claimed[place])
            place += 1
    return claimed[place:]


def _assign_by_queue(
    results: list[list[Reservation]], requests: Sequence[FetchRequest], claimed: Sequence[Reservation]
) -> list[Reservation]:
    """Append claimed jobs to the results of the requests, best queue first; return the jobs that no request takes."""
    unassigned = list(claimed)
    for request, result in zip(requests, results, strict=True):
        order = {queue: place for place, queue in reversed(list(enumerate(request.queues)))}
        matching = [job for job in unassigned if job.wid == request.wid and job.queue in order]
        if len(order) > 1:
            matching.sort(key=lambda job: order[job.queue])
        del matching[max(request.count - len(result), 0) :]
        result.extend(matching)
        assigned_jids = {job.jid for job in matching}
        unassigned = [job for job in unassigned if job.jid not in assigned_jids]
    return unassigned
