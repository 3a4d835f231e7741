"""Release reserved jobs that will not be run: they return to their old places in their queues. Rules: W14, W16."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta

from django.db import Error
from django.db.models import Q
from django.db.models.functions import Now

from ...core.lifecycle import State
from ...core.logs import get_logger
from ...core.payloads import Reservation
from ...errors import BrokerUnavailable
from ..chunks import chunks
from ..database_errors import first_line
from ..notifier.base import ANY_QUEUE
from ..outages import of_this_node
from ..store import Store
from ..transactions import read, run
from .endings import RETURNED, release_rows

logger = get_logger(__name__)

CHUNK = 500


def release(store: Store, reservations: Sequence[Reservation]) -> int:
    """Release jobs that were not started, and return their number (W14).

    Each job is enqueued with its old `enqueued_at`, so at its old place. Jobs that the caller no longer holds stay
    unchanged (W16).
    """
    released = sum(_release(store, chunk) for chunk in chunks(reservations, CHUNK))
    if released:  # an idle worker would otherwise find these jobs only with its next poll
        store.announce({job.queue for job in reservations})
    return released


def _release(store: Store, reservations: Sequence[Reservation]) -> int:
    is_held = Q()
    for job in reservations:
        # The row of a prefetched job gets its wid when its delivery is confirmed: before or after this call.
        wids = {job.wid, ""} if job.is_prefetched else {job.wid}
        is_held |= Q(jid=job.jid, wid__in=wids, attempt=job.attempt)

    working = store.jobs.filter(is_held, state=State.WORKING)
    released = 0
    if not any(job.lock_token is not None or job.permits is not None for job in reservations):
        # One statement suffices for jobs without lock and permits. The row decides, not the reservation: a limit that
        # was set after the claim may have given the job a permit (ADR 0024).
        plain = working.filter(lock_token__isnull=True, permits__isnull=True)
        released = run(store.alias, lambda _: plain.update(**RETURNED), atomic=False, writes=True)
    if released < len(reservations):
        released += run(store.alias, lambda _: release_rows(store, working))
    return released


def release_claims(store: Store, claims: Collection[int]) -> int:
    """Release all jobs that the claims with these numbers took, and return their number.

    For claims that ended without a reply: no worker has received these jobs (ADR 0017).
    """
    numbers = [sign * claim for claim in claims for sign in (1, -1)]  # negative: prefetched or not confirmed
    claimed = store.jobs.filter(state=State.WORKING, claim__in=numbers)
    if not run(store.alias, lambda _: claimed.exists(), atomic=False):
        return 0
    return run(store.alias, lambda _: release_rows(store, claimed))


def release_unanswered(store: Store) -> None:
    """Release jobs of claims that got no answer: these jobs were never delivered (ADR 0017)."""
    # Inside the caller's transaction a failure here would break it, and its rollback would undo the release.
    if not store.claim_numbers.has_checks_left() or store.connection.in_atomic_block:
        return
    claims = store.claim_numbers.take_due()
    try:
        released = release_claims(store, claims) if claims else 0
    except (BrokerUnavailable, Error) as error:  # the caller's own work may succeed all the same
        store.claim_numbers.retry_checks(claims)
        of_this_node.record_failure("claims without an answer", first_line(error))
        return
    if released:
        logger.warning("jobs were claimed and the answer was lost, released jobs=%d", released)
        # The release returns only a number, so workers of all queues are woken.
        store.announce({ANY_QUEUE})


def release_stranded(store: Store, held_for_s: float) -> tuple[int, set[str]]:
    """Release jobs that were claimed at least `held_for_s` seconds ago and have no lock or no permits yet.

    They were never delivered: the process that claimed them ended. Releases at most `CHUNK`; returns their number and
    their queues.
    """
    needs_more = Q(permits="") | Q(lock_key__isnull=False, lock_token__isnull=True)
    working = store.jobs.in_state(State.WORKING)
    stranded = working.filter(needs_more, started_at__lt=Now() - timedelta(seconds=held_for_s))
    rows = read(stranded.order_by("id").values_list("pk", "queue")[:CHUNK])
    if not rows:
        return 0, set()
    released = run(store.alias, lambda _: release_rows(store, stranded.filter(pk__in=[pk for pk, _ in rows])))
    return released, {queue for _, queue in rows}
