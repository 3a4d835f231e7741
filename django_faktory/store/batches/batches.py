"""Batch operations: create, open, commit, status, expire, purge and sweep. Rules: W26, `batch_rules`; ADR 0011.

Each operation is one transaction, or part of the caller's.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

from django.db import IntegrityError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now

from ...core.batch_rules import CallbackProgress, is_open
from ...core.payloads import BatchStatus, NewBatch
from ...errors import UnknownBatch
from ...models import Batch
from ..dialects import clock_of
from ..transactions import read, run
from . import counters
from .membership import get_batch, lock_for_addition, open_again, refuse_overdue

CHUNK = 200
COMMIT_WITHIN_S = 1800
KEPT_FOR_S = 7 * 86_400


def new(
    batch: NewBatch,
    *,
    using: str,
    caller_wid: str = "",
    commit_within_s: float = COMMIT_WITHIN_S,
    now: datetime | None = None,
) -> str:
    """Store a batch and return its bid. A child counts in its parent from now on.

    A batch with a `bid` is stored once, however often it is sent. Raises UnknownBatch or BatchClosed for a parent that
    cannot take it.
    """
    bid = batch.bid or new_bid()

    def verb(connection: BaseDatabaseWrapper) -> str:
        if batch.bid and Batch.objects.using(using).filter(bid=bid).exists():  # repeated after a lost reply
            return bid
        clock = clock_of(connection, now)
        depth = 0
        if batch.parent_bid:
            parent = lock_for_addition(connection, batch.parent_bid, caller_wid=caller_wid, now=clock)
            if parent.complete_st:
                open_again(connection, parent)
            parent.children += 1
            parent.open_children += 1
            parent.unsucceeded_children += 1
            parent.save(using=using)
            depth = parent.depth + 1
        row = Batch(
            bid=bid,
            parent_bid=batch.parent_bid,
            depth=depth,
            description=batch.description.encode("utf-8", "replace").decode().replace("\x00", "\ufffd"),
            complete=batch.complete.text if batch.complete else "",
            complete_jid=batch.complete.jid if batch.complete else "",
            success=batch.success.text if batch.success else "",
            success_jid=batch.success.jid if batch.success else "",
            created_at=clock,
            expires_at=clock + timedelta(seconds=commit_within_s),
        )
        row.save(using=using, force_insert=True)  # an UPDATE of a concurrent attempt's row would count it twice
        return bid

    try:
        return run(using, verb)
    except IntegrityError:  # an earlier attempt without a reply has committed by now
        if connections[using].in_atomic_block:  # the error has broken the caller's transaction
            raise
        return run(using, verb)


def new_bid() -> str:
    """Generate the id of a new batch."""
    return f"b-{uuid4().hex}"


def withdraw(bids: Collection[str], *, using: str) -> int:
    """Delete batches after a BATCH NEW that failed for its client; return how many.

    The client never received the bid. Parents are corrected. A batch that was committed, or has a member or a child, is
    kept.
    """
    rows = Batch.objects.using(using).filter(bid__in=bids).values_list("bid", flat=True)
    stored_bids = read(rows)
    return sum(run(using, partial(_withdraw, bid=bid)) for bid in stored_bids)


def _withdraw(connection: BaseDatabaseWrapper, *, bid: str) -> bool:
    try:
        # Read again, under its lock: the client may use the batch at the same moment.
        batch = get_batch(connection, bid)
    except UnknownBatch:
        return False
    if batch.is_committed or batch.is_expired or batch.total or batch.children:
        return False
    using = connection.alias
    batch.delete(using=using)
    parent = Batch.objects.using(using).filter(bid=batch.parent_bid)
    decremented = {name: F(name) - 1 for name in ("children", "open_children", "unsucceeded_children")}
    if batch.parent_bid and parent.update(**decremented):
        counters.advance_batches(connection, [batch.parent_bid], clock_of(connection))
    return True


def check_open(bid: str, *, using: str, caller_wid: str = "", now: datetime | None = None) -> None:
    """Raise UnknownBatch or BatchClosed if `caller_wid` cannot add to this batch now. Changes nothing."""
    run(
        using,
        lambda connection: lock_for_addition(connection, bid, caller_wid=caller_wid, now=clock_of(connection, now)),
    )


def reopen(
    bid: str, *, using: str, caller_wid: str = "", commit_within_s: float = COMMIT_WITHIN_S, now: datetime | None = None
) -> str:
    """Open a committed batch again and return its bid: no callback fires until its next commit.

    A batch that is not committed, or is open again already, stays unchanged. Raises UnknownBatch, BatchClosed.
    """

    def verb(connection: BaseDatabaseWrapper) -> None:
        clock = clock_of(connection, now)
        batch = lock_for_addition(connection, bid, caller_wid=caller_wid, now=clock)
        if is_open(batch):
            return
        if batch.complete_st:
            open_again(connection, batch)
        batch.reopened_until = clock + timedelta(seconds=commit_within_s)
        batch.save(using=using)

    run(using, verb)
    return bid


def commit(bid: str, *, using: str, now: datetime | None = None) -> None:
    """Complete the definition of a batch: from now on its callbacks fire when they are due. Idempotent.

    Raises UnknownBatch, and BatchClosed if it was not committed in time.
    """

    def verb(connection: BaseDatabaseWrapper) -> None:
        batch = get_batch(connection, bid)
        if not is_open(batch):
            return
        clock = clock_of(connection, now)
        refuse_overdue(batch, clock)
        Batch.objects.using(using).filter(pk=batch.pk).update(
            committed_at=batch.committed_at or clock, expires_at=None, reopened_until=None
        )
        # All members may have ended before the commit: then the callbacks fire now.
        counters.advance_batches(connection, [bid], clock)

    run(using, verb)


def status(bid: str, *, using: str) -> BatchStatus:
    """Return the progress of a batch; reads one row. Raises UnknownBatch."""

    def verb(connection: BaseDatabaseWrapper) -> BatchStatus:
        batch = get_batch(connection, bid, lock=False)
        return BatchStatus(
            bid=batch.bid,
            parent_bid=batch.parent_bid,
            description=batch.description,
            created_at=batch.created_at,
            total=batch.total,
            pending=batch.pending,
            failed=batch.failed,
            complete_st=batch.complete_st,
            success_st=batch.success_st,
            is_broken=batch.is_broken,
        )

    return run(using, verb, atomic=False)


def expire(*, using: str, now: datetime | None = None, limit: int = CHUNK) -> int:
    """Expire batches that were not committed in time; return how many changed.

    A batch that was opened again counts as committed when its time is over. The jobs of both keep running.
    """

    def verb(connection: BaseDatabaseWrapper, field: str) -> int:
        rows = _find_overdue(field, using, now)
        # Deepest first, then by bid: the order in which `counters` locks batches (ADR 0024).
        overdue = list(rows.order_by("-depth", "bid").select_for_update(skip_locked=True)[:limit])
        clock = clock_of(connection, now)
        changes: dict[str, Any] = {field: None}
        if field == "expires_at":
            # `advance_batches` marks the ancestors as broken too: their success callbacks must not wait for it.
            changes |= {"expired_at": clock, "is_broken": True}
        Batch.objects.using(using).filter(pk__in=[batch.pk for batch in overdue]).update(**changes)
        counters.advance_batches(connection, [batch.bid for batch in overdue], clock)
        return len(overdue)

    count = 0
    for field in ("expires_at", "reopened_until"):
        overdue = _find_overdue(field, using, now)
        # Nearly always there is none: one read by the index, and no transaction.
        if run(using, lambda _, overdue=overdue: overdue.exists(), atomic=False):  # type: ignore[misc]
            count += run(using, partial(verb, field=field))
    return count


def _find_overdue(field: str, using: str, now: datetime | None) -> QuerySet[Batch]:
    return Batch.objects.using(using).filter(**{f"{field}__lte": now or Now()})


def purge(*, using: str, kept_for_s: float = KEPT_FOR_S, now: datetime | None = None, limit: int = CHUNK) -> int:
    """Delete batches that ended more than `kept_for_s` seconds ago; return how many."""
    old_batches = Batch.objects.using(using).filter(finished_at__lt=(now or Now()) - timedelta(seconds=kept_for_s))

    def verb(_: BaseDatabaseWrapper) -> int:
        oldest = old_batches.order_by("finished_at").select_for_update(skip_locked=True)
        ids = list(oldest.values_list("pk", flat=True)[:limit])
        return Batch.objects.using(using).filter(pk__in=ids).delete()[0] if ids else 0

    return run(using, verb) if run(using, lambda _: old_batches.exists(), atomic=False) else 0


def sweep(*, using: str, now: datetime | None = None) -> int:
    """Take the due steps that committed batches have missed; return how many batches had such steps.

    There are none unless rows were changed manually or there is a bug: each change takes its steps itself.
    """
    batches = Batch.objects.using(using).filter(
        committed_at__isnull=False, finished_at__isnull=True, reopened_until__isnull=True
    )
    # The conditions of `batch_rules.advance` as a query.
    due = batches.filter(
        Q(complete_st=CallbackProgress.NOT_YET, unrun=0, open_children=0)
        | Q(complete_st=CallbackProgress.FINISHED, success_st=CallbackProgress.NOT_YET)
        & Q(pending=0, is_broken=False, unsucceeded_children=0)
    )

    def verb(connection: BaseDatabaseWrapper) -> int:
        bids = list(due.order_by("-depth", "bid").values_list("bid", flat=True)[:CHUNK])
        return counters.advance_batches(connection, bids, clock_of(connection, now)) if bids else 0

    return run(using, verb) if run(using, lambda _: due.exists(), atomic=False) else 0
