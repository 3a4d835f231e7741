"""Reserved jobs that nobody will run go back to their places. Rules: W14, W16."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q

from ..lifecycle import State
from ..models import Job, JobQuerySet
from ..payloads import Reservation
from . import gates, locks
from .transactions import run

CHUNK = 500


def release(reservations: Sequence[Reservation], *, using: str) -> int:
    """Give back jobs nobody began: enqueued again with the age they had, so at their old place (W14)."""
    chunks = [reservations[start : start + CHUNK] for start in range(0, len(reservations), CHUNK)]
    return sum(_release(chunk, using=using) for chunk in chunks)


def _release(reservations: Sequence[Reservation], *, using: str) -> int:
    held = Q()
    for job in reservations:
        wids = {job.wid, ""} if job.is_ahead else {job.wid}  # which of them the row has is a matter of time
        held |= Q(jid=job.jid, wid__in=wids, attempt=job.attempt)

    hold_some = any(job.lock_token is not None or job.passes is not None for job in reservations)

    def give_back(connection: BaseDatabaseWrapper) -> int:
        working = Job.objects.using(using).filter(held, state=State.WORKING)
        if hold_some:
            return put_back(connection, working)
        return working.update(state=State.ENQUEUED, wid="", started_at=None, reserved_until=None, lock_token=None)

    return run(using, give_back, atomic=hold_some)


def give_back(claims: Collection[int], *, using: str) -> int:
    """`release` what claims of these numbers took; returns how many jobs there were."""
    numbers = [sign * claim for claim in claims for sign in (1, -1)]  # the negative ones: what it read ahead
    taken = Job.objects.using(using).filter(state=State.WORKING, claim__in=numbers)
    if not run(using, lambda _: taken.exists(), atomic=False):
        return 0
    return run(using, lambda connection: put_back(connection, taken))


def put_back(connection: BaseDatabaseWrapper, working: JobQuerySet) -> int:
    """Make these working jobs enqueued again, without the locks and passes they hold. Inside a transaction."""
    locks.release_all(connection, working)
    passes = gates.held_by(working)
    returned = working.update(
        state=State.ENQUEUED, wid="", started_at=None, reserved_until=None, lock_token=None, passes=None
    )
    gates.release(connection, passes)
    return returned
