"""Jobs that a server has claimed for its clients, until their delivery is confirmed (ADR 0026).

`Job.claim` is negative until `confirm`. If the delivery lease ends first, maintenance releases the job: it was not
delivered, or its server died within seconds of delivering it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from ...core.payloads import Delivery, FetchRequest, Reservation
from ...models import Job
from ..chunks import chunks
from ..dialects.values import ClaimSlot
from ..store import Store
from ..transactions import run


def find_slots(requests: Sequence[FetchRequest]) -> tuple[Sequence[ClaimSlot], Collection[str]]:
    """Return the number of jobs to prefetch from each queue, and the wids that may receive these jobs."""
    count_by_queue: dict[str, int] = {}
    candidate_wids: set[str] = set()
    for request in requests:
        # Only the first queue: a client must get jobs of earlier queues before jobs of later ones (ADR 0026).
        if request.prefetch and request.queues:
            queue = request.queues[0]
            # The maximum, not the sum: each number is the free room of the same prefetch buffer.
            count_by_queue[queue] = max(request.prefetch, count_by_queue.get(queue, 0))
            candidate_wids.update(request.candidate_wids)
    # Without a wid: a prefetched job gets its worker when it is delivered.
    return [ClaimSlot(queue, "", count) for queue, count in count_by_queue.items()], candidate_wids


def append_prefetched(
    results: list[list[Reservation]], requests: Sequence[FetchRequest], prefetched: Sequence[Reservation]
) -> list[list[Reservation]]:
    """Append each prefetched job to the result of a request that allowed prefetching from its queue."""
    place_by_queue = {
        request.queues[0]: place for place, request in enumerate(requests) if request.prefetch and request.queues
    }
    for job in prefetched:
        results[place_by_queue[job.queue]].append(job)
    return results


CHUNK = 500
"""Maximum deliveries confirmed by one statement."""


def confirm(store: Store, deliveries: Sequence[Delivery]) -> set[str]:
    """Start the reservations of delivered jobs at the time of their delivery; see `Broker.confirm`.

    Skips locked rows and returns their jids: a running transaction may be ending these jobs, confirm them again later.
    """
    skipped_jids: set[str] = set()
    for chunk in chunks(deliveries, CHUNK):
        confirm_chunk = partial(store.dialect.confirm, deliveries=chunk, now=store.clock())
        skipped_jids |= run(store.alias, confirm_chunk, atomic=not store.dialect.one_statement)
    return skipped_jids


def is_unconfirmed(job: Job) -> bool:
    """Return True if a working job was prefetched or claimed for a client and its delivery is not confirmed."""
    return job.claim is not None and job.claim < 0
