"""Batch membership: check whether a job may join, and count new members. Rules: W26, `batch_rules`; ADR 0011.

A push calls `admit`, then `count_new_members`; `lock_for_addition` checks one batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F

from ...core.batch_rules import CallbackProgress, has_fired, is_open
from ...core.lifecycle import State
from ...core.payloads import JobPayload, is_storable
from ...errors import BatchClosed, FaktoryError, UnknownBatch
from ...models import Batch, Job


def admit(connection: BaseDatabaseWrapper, jobs: Iterable[JobPayload], now: datetime) -> dict[str, FaktoryError]:
    """Lock the batches that these jobs name; return the errors of the jobs that may not join, by jid."""
    requests = {job.jid: (job.options.bid, job.options.caller_wid) for job in jobs if job.options and job.options.bid}
    if not requests:
        return {}
    batches = Batch.objects.using(connection.alias).filter(
        bid__in={bid for bid, _ in requests.values() if is_storable(bid)}
    )
    depths = dict(batches.values_list("bid", "depth"))
    errors: dict[tuple[str, str], FaktoryError] = {}
    # Deepest first, then by bid: the lock order of batches (ADR 0024). Unknown bids have no depth and come last.
    for bid, caller_wid in sorted(set(requests.values()), key=lambda request: (-depths.get(request[0], 0), *request)):
        try:
            lock_for_addition(connection, bid, caller_wid=caller_wid, now=now)
        except FaktoryError as error:
            errors[bid, caller_wid] = error
    return {jid: errors[request] for jid, request in requests.items() if request in errors}


def count_new_members(connection: BaseDatabaseWrapper, bids: Sequence[str]) -> None:
    """Count new members of batches that `admit` has locked, one per bid in the list."""
    for bid, count in sorted(Counter(bids).items()):
        batch = Batch.objects.using(connection.alias).filter(bid=bid)
        counted = {name: F(name) + count for name in ("total", "pending", "unrun")}
        # Usually one UPDATE. Only a batch that already counts as complete has to be read and opened again.
        if not batch.filter(complete_st=CallbackProgress.NOT_YET).update(**counted):
            open_again(connection, get_batch(connection, bid))
            batch.update(**counted)


def lock_for_addition(connection: BaseDatabaseWrapper, bid: str, *, caller_wid: str, now: datetime) -> Batch:
    """Lock and return a batch to which the worker `caller_wid` may add. Raises UnknownBatch, BatchClosed."""
    batch = get_batch(connection, bid)
    refuse_overdue(batch, now)
    if has_fired(batch):
        raise BatchClosed(bid, "a callback of it was enqueued already, nothing can be added any more")
    close_overdue(batch, now)
    if not is_open(batch) and not _is_inside(connection, bid, caller_wid):
        raise BatchClosed(bid, "it is committed, so only one of its own jobs, while it runs, can add to it")
    # An addition reopens the ancestors, which is impossible once one of them has enqueued a callback.
    if fired := next(filter(has_fired, _find_notified_ancestors(connection, batch)), None):
        raise BatchClosed(bid, f"a callback of its parent {fired.bid} was enqueued already")
    return batch


def refuse_overdue(batch: Batch, now: datetime) -> None:
    """Raise BatchClosed if a batch was not committed in time, whether or not maintenance has marked it."""
    if batch.is_expired or (batch.expires_at is not None and batch.expires_at <= now):
        raise BatchClosed(batch.bid, "it was not committed in time, and expired")


def close_overdue(batch: Batch, now: datetime) -> None:
    """Count a batch as committed if it was opened again and not committed in time. Does not save it."""
    if batch.reopened_until is not None and batch.reopened_until <= now:
        batch.reopened_until = None


def open_again(connection: BaseDatabaseWrapper, batch: Batch) -> None:
    """Undo the completion of a batch because members are added; its notified ancestors wait again.

    Possible in a batch without a complete callback: a member may add jobs on a later attempt.
    """
    chain = [batch, *_find_notified_ancestors(connection, batch)]
    for child, parent in pairwise(chain):
        child.reported_complete = False
        parent.open_children += 1
    for changed in chain:
        changed.complete_st = CallbackProgress.NOT_YET
        # Clears it in a root. The last of the chain may have a parent that is over, which is not notified again.
        changed.reported_complete &= changed.parent_bid != ""
        changed.save(using=connection.alias)


def _find_notified_ancestors(connection: BaseDatabaseWrapper, batch: Batch) -> list[Batch]:
    """Return the ancestors, locked, that count this batch as complete.

    Stops at an ancestor that is over, which waits for nothing.
    """
    ancestors: list[Batch] = []
    below = batch
    # From child to parent: the lock order of batches (ADR 0024).
    while below.reported_complete and below.parent_bid:
        parent = _find(connection, below.parent_bid)
        if parent is None or parent.is_over:
            break
        ancestors.append(parent)
        below = parent
    return ancestors


def _is_inside(connection: BaseDatabaseWrapper, bid: str, caller_wid: str) -> bool:
    """Return whether `caller_wid` runs a member of this batch or a callback of a descendant; "" matches any worker.

    A callback cannot be too late: the ancestors of its batch wait for its end.
    """
    working = Job.live.using(connection.alias).in_state(State.WORKING)
    if caller_wid:
        working = working.filter(wid=caller_wid)
    if working.filter(bid=bid).exists():
        return True
    below = working.filter(callback_of__isnull=False).exclude(callback_of=bid)
    callback_bids = below.values_list("callback_of", flat=True)
    return _has_descendant(connection, bid, {callback_bid for callback_bid in callback_bids if callback_bid})


def _has_descendant(connection: BaseDatabaseWrapper, bid: str, bids: set[str]) -> bool:
    """Return whether one of the batches `bids` is a descendant of `bid`. One query per level, from the leaves up."""
    batches = Batch.objects.using(connection.alias)
    seen: set[str] = set()
    while bids:
        seen |= bids
        parents = set(batches.filter(bid__in=bids).exclude(parent_bid="").values_list("parent_bid", flat=True))
        if bid in parents:
            return True
        # Rows changed manually could form a loop, which `seen` ends.
        bids = parents - seen
    return False


def get_batch(connection: BaseDatabaseWrapper, bid: str, *, lock: bool = True) -> Batch:
    """Return this batch, locked unless `lock` is false. Raises UnknownBatch."""
    batch = _find(connection, bid, lock=lock)
    if batch is None:
        raise UnknownBatch(bid)
    return batch


def _find(connection: BaseDatabaseWrapper, bid: str, *, lock: bool = True) -> Batch | None:
    if not is_storable(bid):
        return None  # such text cannot be a query parameter (NUL, lone surrogates)
    rows = Batch.objects.using(connection.alias).filter(bid=bid)
    return (rows.select_for_update() if lock else rows).first()
