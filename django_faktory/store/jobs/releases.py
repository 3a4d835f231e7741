"""Release reserved jobs that will not be run: they return to their old places in their queues. Rules: W14, W16."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from functools import partial

from django.db.models import Q
from django.db.models.functions import Now

from ...core.lifecycle import State
from ...core.payloads import Reservation
from ...models import Job
from ..chunks import chunks
from ..transactions import read, run
from .endings import RETURNED, release_rows

CHUNK = 500


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
        released = run(using, lambda _: plain.update(**RETURNED), atomic=False, writes=True)
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


def release_stranded(held_for_s: float, *, using: str) -> tuple[int, set[str]]:
    """Release jobs that were claimed at least `held_for_s` seconds ago and have no lock or no permits yet.

    They were never delivered: the process that claimed them ended. Releases at most `CHUNK`; returns their number and
    their queues.
    """
    needs_more = Q(permits="") | Q(lock_key__isnull=False, lock_token__isnull=True)
    working = Job.objects.using(using).in_state(State.WORKING)
    stranded = working.filter(needs_more, started_at__lt=Now() - timedelta(seconds=held_for_s))
    rows = read(stranded.order_by("id").values_list("pk", "queue")[:CHUNK])
    if not rows:
        return 0, set()
    released = run(using, partial(release_rows, working=stranded.filter(pk__in=[pk for pk, _ in rows])))
    return released, {queue for _, queue in rows}
