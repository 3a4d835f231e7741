"""Reserved jobs that nobody will run go back to their places. Rules: W14, W16."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q

from ..lifecycle import State
from ..models import Job, JobQuerySet
from ..payloads import Reservation
from . import gates, locks
from .transactions import run

CHUNK = 500

ENQUEUED: dict[str, Any] = {
    "state": State.ENQUEUED,
    "wid": "",
    "started_at": None,
    "reserved_until": None,
    "lock_token": None,
    "passes": None,
}
"""What becomes of the row of a job that is given back."""


def release(reservations: Sequence[Reservation], *, using: str) -> int:
    """Give back jobs nobody began: enqueued again with the age they had, so at their old place (W14)."""
    chunks = [reservations[start : start + CHUNK] for start in range(0, len(reservations), CHUNK)]
    return sum(_release(chunk, using=using) for chunk in chunks)


def _release(reservations: Sequence[Reservation], *, using: str) -> int:
    held = Q()
    for job in reservations:
        wids = {job.wid, ""} if job.is_ahead else {job.wid}  # which of them the row has is a matter of time
        held |= Q(jid=job.jid, wid__in=wids, attempt=job.attempt)

    working = Job.objects.using(using).filter(held, state=State.WORKING)
    returned = 0
    if not any(job.lock_token is not None or job.passes is not None for job in reservations):
        # One statement for jobs that still hold nothing: a limit may have been set since they were claimed.
        plain = working.filter(lock_token__isnull=True, passes__isnull=True)
        returned = run(using, lambda _: plain.update(**ENQUEUED), atomic=False, writes=True)
    if returned < len(reservations):
        returned += run(using, lambda connection: put_back(connection, working))
    return returned


def give_back(claims: Collection[int], *, using: str) -> int:
    """`release` what claims of these numbers took; returns how many jobs there were."""
    numbers = [sign * claim for claim in claims for sign in (1, -1)]  # the negative ones: what it read ahead
    taken = Job.objects.using(using).filter(state=State.WORKING, claim__in=numbers)
    if not run(using, lambda _: taken.exists(), atomic=False):
        return 0
    return run(using, lambda connection: put_back(connection, taken))


def put_back(connection: BaseDatabaseWrapper, working: JobQuerySet) -> int:
    """Make these working jobs enqueued again, without the locks and passes they hold. Inside a transaction.

    What they hold is read from the locked rows, and only these rows are changed: jobs that match the filter a moment
    later are left alone.
    """
    rows = working.order_by("id").only("lock_key", "lock_token", "passes")
    if connection.features.has_select_for_update:
        rows = rows.select_for_update()
    jobs = list(rows)
    if not jobs:
        return 0
    returned = Job.objects.using(connection.alias).filter(pk__in=[job.pk for job in jobs]).update(**ENQUEUED)
    locks.release(connection, jobs)
    gates.release(connection, [job.passes for job in jobs])
    return returned
