"""Who may add to a batch, and the counting of new members. Rules: W26, `batching`; ADR 0011."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F

from ..batching import Progress, has_fired
from ..errors import BatchClosed, FaktoryError, UnknownBatch
from ..lifecycle import State
from ..models import Batch, Job
from ..payloads import JobPayload, is_storable


def admit(connection: BaseDatabaseWrapper, jobs: Iterable[JobPayload]) -> dict[str, FaktoryError]:
    """Lock the batches these jobs want to join; returns, by jid, why some may not."""
    wanted = {job.jid: (job.options.bid, job.options.by) for job in jobs if job.options and job.options.bid}
    if not wanted:
        return {}
    known = Batch.objects.using(connection.alias).filter(
        bid__in={bid for bid, _ in wanted.values() if is_storable(bid)}
    )
    depths = dict(known.values_list("bid", "depth"))
    errors: dict[tuple[str, str], FaktoryError] = {}
    for bid, by in sorted(set(wanted.values()), key=lambda one: (-depths.get(one[0], 0), *one)):
        try:
            add_to(connection, bid, by=by)
        except FaktoryError as error:
            errors[bid, by] = error
    return {jid: errors[asked] for jid, asked in wanted.items() if asked in errors}


def joined(connection: BaseDatabaseWrapper, bids: Sequence[str]) -> None:
    """Count new members, one for each bid in the list, of batches that `admit` has locked."""
    for bid, count in sorted(Counter(bids).items()):
        batch = Batch.objects.using(connection.alias).filter(bid=bid)
        counted = {name: F(name) + count for name in ("total", "pending", "unrun")}
        if not batch.filter(complete_st=Progress.NOT_YET).update(**counted):
            open_again(connection, existing(connection, bid))
            batch.update(**counted)


def add_to(connection: BaseDatabaseWrapper, bid: str, *, by: str) -> Batch:
    """This batch, locked, to which `by` may add."""
    batch = existing(connection, bid)
    if batch.is_expired:
        raise BatchClosed(bid, "it was not committed in time, and expired")
    if has_fired(batch):
        raise BatchClosed(bid, "a callback of it was enqueued already, nothing can be added any more")
    if batch.is_committed and not _is_inside(connection, bid, by):
        raise BatchClosed(bid, "it is committed, so only one of its own jobs, while it runs, can add to it")
    if fired := next(filter(has_fired, _told(connection, batch)), None):
        raise BatchClosed(bid, f"a callback of its parent {fired.bid} was enqueued already")
    return batch


def open_again(connection: BaseDatabaseWrapper, batch: Batch) -> None:
    """Take back that all in it was executed, because more is added: where it has no complete callback, a member may do
    so on a later attempt. Parents that were told wait again."""
    chain = [batch, *_told(connection, batch)]
    for child, parent in pairwise(chain):
        child.told_complete = False
        parent.open_children += 1
    for one in chain:
        one.complete_st = Progress.NOT_YET
        one.told_complete &= one.parent_bid != ""
        one.save(using=connection.alias)


def _told(connection: BaseDatabaseWrapper, batch: Batch) -> list[Batch]:
    """The parents, locked, that take this batch for executed; without those that are over, which wait for nothing."""
    told: list[Batch] = []
    below = batch
    while below.told_complete and below.parent_bid:
        parent = _found(connection, below.parent_bid)
        if parent is None or parent.is_over:
            break
        told.append(parent)
        below = parent
    return told


def _is_inside(connection: BaseDatabaseWrapper, bid: str, by: str) -> bool:
    working = Job.objects.using(connection.alias).filter(bid=bid).in_state(State.WORKING)
    return (working.filter(wid=by) if by else working).exists()


def existing(connection: BaseDatabaseWrapper, bid: str, *, lock: bool = True) -> Batch:
    """This batch. Raises UnknownBatch."""
    batch = _found(connection, bid, lock=lock)
    if batch is None:
        raise UnknownBatch(bid)
    return batch


def _found(connection: BaseDatabaseWrapper, bid: str, *, lock: bool = True) -> Batch | None:
    if not is_storable(bid):
        return None  # no database could be asked for it
    found = Batch.objects.using(connection.alias).filter(bid=bid)
    if lock and connection.features.has_select_for_update:
        found = found.select_for_update()
    return found.first()
