"""Batch operations: create, open, commit, status, expire, purge and sweep. Rules: W26, `batch_rules`; ADR 0011.

Each operation is one transaction, or part of the caller's.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

from django.db import IntegrityError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now

from ...core.batch_rules import CallbackProgress, is_open
from ...core.payloads import BatchStatus, NewBatch
from ...errors import UnknownBatch
from ...models import Batch
from ..dialects import clock_of
from ..notifier.base import ANY_QUEUE
from ..store import Store
from ..transactions import read, run
from . import progress
from .membership import get_batch, lock_for_addition, open_again, refuse_overdue

CHUNK = 200
KEPT_FOR_S = 7 * 86_400


def new(store: Store, batch: NewBatch, *, caller_wid: str = "") -> str:
    """Store a batch and return its bid. A child counts in its parent from now on.

    A batch with a `bid` is stored once, however often it is sent. Raises UnknownBatch or BatchClosed for a parent that
    cannot take it.
    """
    bid = batch.bid or new_bid()

    def verb(connection: BaseDatabaseWrapper) -> str:
        if batch.bid and Batch.objects.using(store.alias).filter(bid=bid).exists():  # repeated after a lost reply
            return bid
        clock = store.now()
        depth = 0
        if batch.parent_bid:
            parent = lock_for_addition(connection, batch.parent_bid, caller_wid=caller_wid, now=clock)
            if parent.complete_st:
                open_again(connection, parent)
            parent.children += 1
            parent.open_children += 1
            parent.unsucceeded_children += 1
            parent.save(using=store.alias)
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
            expires_at=clock + timedelta(seconds=store.commit_within_s),
        )
        row.save(using=store.alias, force_insert=True)  # an UPDATE of a concurrent attempt's row would count it twice
        return bid

    try:
        return run(store.alias, verb)
    except IntegrityError:  # an earlier attempt without a reply has committed by now
        if store.connection.in_atomic_block:  # the error has broken the caller's transaction
            raise
        return run(store.alias, verb)


def new_bid() -> str:
    """Generate the id of a new batch."""
    return f"b-{uuid4().hex}"


def withdraw(store: Store, bids: Collection[str]) -> None:
    """Delete batches after a BATCH NEW that failed for its client.

    The client never received the bid. Parents are corrected. A batch that was committed, or has a member or a child, is
    kept.
    """
    rows = Batch.objects.using(store.alias).filter(bid__in=bids).values_list("bid", flat=True)
    stored_bids = read(rows)
    withdrawn = [run(store.alias, partial(_withdraw, bid=bid)) for bid in stored_bids]
    if any(withdrawn):
        store.announce({ANY_QUEUE})  # a parent's callback may be due


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
        progress.advance_batches(connection, [batch.parent_bid], clock_of(connection))
    return True


def check_open(store: Store, bid: str, *, caller_wid: str = "") -> None:
    """Raise UnknownBatch or BatchClosed if `caller_wid` cannot add to this batch now. Changes nothing."""
    run(store.alias, lambda connection: lock_for_addition(connection, bid, caller_wid=caller_wid, now=store.now()))


def reopen(store: Store, bid: str, *, caller_wid: str = "") -> str:
    """Open a committed batch again and return its bid: no callback fires until its next commit.

    A batch that is not committed, or is open again already, stays unchanged. Raises UnknownBatch, BatchClosed.
    """

    def verb(connection: BaseDatabaseWrapper) -> None:
        clock = store.now()
        batch = lock_for_addition(connection, bid, caller_wid=caller_wid, now=clock)
        if is_open(batch):
            return
        if batch.complete_st:
            open_again(connection, batch)
        batch.reopened_until = clock + timedelta(seconds=store.commit_within_s)
        batch.save(using=store.alias)

    run(store.alias, verb)
    return bid


def commit(store: Store, bid: str) -> None:
    """Complete the definition of a batch: from now on its callbacks fire when they are due. Idempotent.

    Raises UnknownBatch, and BatchClosed if it was not committed in time.
    """

    def verb(connection: BaseDatabaseWrapper) -> None:
        batch = get_batch(connection, bid)
        if not is_open(batch):
            return
        clock = store.now()
        refuse_overdue(batch, clock)
        Batch.objects.using(store.alias).filter(pk=batch.pk).update(
            committed_at=batch.committed_at or clock, expires_at=None, reopened_until=None
        )
        # All members may have ended before the commit: then the callbacks fire now.
        progress.advance_batches(connection, [bid], clock)

    run(store.alias, verb)
    store.announce({ANY_QUEUE})


def status(store: Store, bid: str) -> BatchStatus:
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

    return run(store.alias, verb, atomic=False)


def expire(store: Store, *, limit: int = CHUNK) -> int:
    """Expire batches that were not committed in time; return how many changed.

    A batch that was opened again counts as committed when its time is over. The jobs of both keep running.
    """

    def verb(connection: BaseDatabaseWrapper, field: str) -> int:
        rows = _find_overdue(store, field)
        # Deepest first, then by bid: the order in which `progress` locks batches (ADR 0024).
        overdue = list(rows.order_by("-depth", "bid").select_for_update(skip_locked=True)[:limit])
        clock = store.now()
        changes: dict[str, Any] = {field: None}
        if field == "expires_at":
            # `advance_batches` marks the ancestors as broken too: their success callbacks must not wait for it.
            changes |= {"expired_at": clock, "is_broken": True}
        Batch.objects.using(store.alias).filter(pk__in=[batch.pk for batch in overdue]).update(**changes)
        progress.advance_batches(connection, [batch.bid for batch in overdue], clock)
        return len(overdue)

    count = 0
    for field in ("expires_at", "reopened_until"):
        overdue = _find_overdue(store, field)
        # Nearly always there is none: one read by the index, and no transaction.
        if run(store.alias, lambda _, overdue=overdue: overdue.exists(), atomic=False):  # type: ignore[misc]
            count += run(store.alias, partial(verb, field=field))
    return count


def _find_overdue(store: Store, field: str) -> QuerySet[Batch]:
    return Batch.objects.using(store.alias).filter(**{f"{field}__lte": store.clock() or Now()})


def purge(store: Store, *, kept_for_s: float = KEPT_FOR_S, limit: int = CHUNK) -> int:
    """Delete batches that ended more than `kept_for_s` seconds ago; return how many."""
    since = (store.clock() or Now()) - timedelta(seconds=kept_for_s)
    old_batches = Batch.objects.using(store.alias).filter(finished_at__lt=since)

    def verb(_: BaseDatabaseWrapper) -> int:
        oldest = old_batches.order_by("finished_at").select_for_update(skip_locked=True)
        ids = list(oldest.values_list("pk", flat=True)[:limit])
        return Batch.objects.using(store.alias).filter(pk__in=ids).delete()[0] if ids else 0

    return run(store.alias, verb) if run(store.alias, lambda _: old_batches.exists(), atomic=False) else 0


def sweep(store: Store) -> int:
    """Take the due steps that committed batches have missed; return how many batches had such steps.

    There are none unless rows were changed manually or there is a bug: each change takes its steps itself.
    """
    batches = Batch.objects.using(store.alias).filter(
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
        return progress.advance_batches(connection, bids, store.now()) if bids else 0

    return run(store.alias, verb) if run(store.alias, lambda _: due.exists(), atomic=False) else 0
