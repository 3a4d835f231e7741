"""Who may add to a batch, and the counting of new members. Rules: W26; ADR 0011."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F

from ..errors import BatchClosed, FaktoryError, UnknownBatch
from ..lifecycle import State
from ..models import Batch, Job
from ..payloads import JobPayload


def admit(connection: BaseDatabaseWrapper, jobs: Iterable[JobPayload]) -> dict[str, FaktoryError]:
    """Lock the batches these jobs want to join; returns, by jid, why some may not."""
    wanted = {job.jid: (job.options.bid, job.options.by) for job in jobs if job.options and job.options.bid}
    if not wanted:
        return {}
    known = Batch.objects.using(connection.alias).filter(bid__in={bid for bid, _ in wanted.values()})
    depths = dict(known.values_list("bid", "depth"))
    errors: dict[tuple[str, str], FaktoryError] = {}
    for bid, by in sorted(set(wanted.values()), key=lambda one: (-depths.get(one[0], 0), *one)):
        try:
            add_to(connection, bid, by=by)
        except FaktoryError as error:
            errors[bid, by] = error
    return {jid: errors[asked] for jid, asked in wanted.items() if asked in errors}


def joined(connection: BaseDatabaseWrapper, bids: Sequence[str]) -> None:
    """Count new members, one for each bid in the list."""
    for bid in sorted(set(bids)):
        count = bids.count(bid)
        Batch.objects.using(connection.alias).filter(bid=bid).update(
            total=F("total") + count, pending=F("pending") + count, unrun=F("unrun") + count
        )


def add_to(connection: BaseDatabaseWrapper, bid: str, *, by: str) -> Batch:
    """This batch, locked, to which `by` may add."""
    batch = existing(connection, bid)
    if batch.is_expired:
        raise BatchClosed(bid, "it was not committed within 30 minutes, and expired")
    if batch.complete_st or batch.success_st:
        raise BatchClosed(bid, "a callback of it was enqueued already, nothing can be added any more")
    if batch.is_committed and not _is_inside(connection, bid, by):
        raise BatchClosed(bid, "it is committed, so only one of its own jobs, while it runs, can add to it")
    return batch


def _is_inside(connection: BaseDatabaseWrapper, bid: str, by: str) -> bool:
    working = Job.objects.using(connection.alias).filter(bid=bid).in_state(State.WORKING)
    return (working.filter(wid=by) if by else working).exists()


def existing(connection: BaseDatabaseWrapper, bid: str, *, lock: bool = True) -> Batch:
    """This batch. Raises UnknownBatch."""
    found = Batch.objects.using(connection.alias).filter(bid=bid)
    if lock and connection.features.has_select_for_update:
        found = found.select_for_update()
    batch = found.first()
    if batch is None:
        raise UnknownBatch(bid)
    return batch
