"""Release reserved jobs that will not be run: they return to their old places in their queues. Rules: W14, W16."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q

from ...core.lifecycle import State
from ...core.payloads import Reservation
from ...models import Job, JobQuerySet
from ..chunks import chunks
from ..limits import limiters
from ..locks import locks
from ..transactions import run

CHUNK = 500

ENQUEUED: dict[str, Any] = {
    "state": State.ENQUEUED,
    "wid": "",
    "started_at": None,
    "reserved_until": None,
    "lock_token": None,
    "permits": None,
}
"""Column values of a released job. `enqueued_at` is not among them: it decides the place in the queue."""


def release(reservations: Sequence[Reservation], *, using: str) -> int:
    """Release jobs that were not started, and return their number (W14).

    Each job is enqueued with its old `enqueued_at`, so at its old place. Jobs that the caller no longer holds stay
    unchanged (W16).
    """
    return sum(_release(chunk, using=using) for chunk in chunks(reservations, CHUNK))


def _release(reservations: Sequence[Reservation], *, using: str) -> int:
    is_held = Q()
    for job in reservations:
        # The row of a prefetched job gets its wid when its delivery is confirmed: before or after this call.
        wids = {job.wid, ""} if job.is_prefetched else {job.wid}
        is_held |= Q(jid=job.jid, wid__in=wids, attempt=job.attempt)

    working = Job.objects.using(using).filter(is_held, state=State.WORKING)
    released = 0
    if not any(job.lock_token is not None or job.permits is not None for job in reservations):
        # One statement suffices for jobs without lock and permits. The row decides, not the reservation: a limit that
        # was set after the claim may have given the job a permit (ADR 0024).
        plain = working.filter(lock_token__isnull=True, permits__isnull=True)
        released = run(using, lambda _: plain.update(**ENQUEUED), atomic=False, writes=True)
    if released < len(reservations):
        released += run(using, lambda connection: release_rows(connection, working))
    return released


def release_claims(claims: Collection[int], *, using: str) -> int:
    """Release all jobs that the claims with these numbers took, and return their number.

    For claims that ended without a reply: no worker has received these jobs (ADR 0017).
    """
    numbers = [sign * claim for claim in claims for sign in (1, -1)]  # negative: prefetched or not confirmed
    claimed = Job.objects.using(using).filter(state=State.WORKING, claim__in=numbers)
    if not run(using, lambda _: claimed.exists(), atomic=False):
        return 0
    return run(using, lambda connection: release_rows(connection, claimed))


def release_rows(connection: BaseDatabaseWrapper, working: JobQuerySet) -> int:
    """Enqueue working jobs again and release their locks and permits. Call it inside a transaction.

    Locks and permits are read from the locked rows. Only these rows are changed: a job that starts to match the filter
    after the SELECT stays unchanged, because its locks and permits were not read.
    """
    jobs = list(working.order_by("id").only("lock_key", "lock_token", "permits").select_for_update())
    if not jobs:
        return 0
    # Jobs, lock rows, limiters: the lock order of all transactions (ADR 0024).
    released = Job.objects.using(connection.alias).filter(pk__in=[job.pk for job in jobs]).update(**ENQUEUED)
    locks.release(connection, jobs)
    limiters.release(connection, [job.permits for job in jobs])
    return released
