"""The batch verbs: NEW, OPEN, COMMIT, STATUS, and who may add what. Rules: W26, `batching`; ADR 0011.

Each is one transaction, or part of the caller's.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import uuid4

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Count, Q
from django.db.models.functions import Now

from ..batching import Progress
from ..errors import BatchClosed
from ..models import Batch
from ..payloads import BatchStatus, NewBatch
from . import members
from .dialects import dialect_of
from .joining import add_to, existing, open_again
from .transactions import run
from .upkeep import skip_locked

CHUNK = 200
COMMIT_WITHIN_S = 1800
KEPT_FOR_S = 7 * 86_400


def new(
    batch: NewBatch,
    *,
    using: str,
    by: str = "",
    commit_within_s: float = COMMIT_WITHIN_S,
    now: datetime | None = None,
) -> str:
    """Store a batch; returns its bid. As a child it is part of its parent from now on.

    Raises UnknownBatch or BatchClosed for a parent that cannot take it.
    """

    def verb(connection: BaseDatabaseWrapper) -> str:
        clock = _clock(connection, now)
        depth = 0
        if batch.parent_bid:
            parent = add_to(connection, batch.parent_bid, by=by)
            if parent.complete_st:
                open_again(connection, parent)
            parent.children += 1
            parent.open_children += 1
            parent.unsucceeded_children += 1
            parent.save(using=using)
            depth = parent.depth + 1
        made = Batch(
            bid=f"b-{uuid4().hex}",
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
        made.save(using=using, force_insert=True)
        return str(made.bid)

    return run(using, verb)


def reopen(bid: str, *, using: str, by: str = "") -> str:
    """Ask whether more can be added now; returns the bid. Changes nothing: who may add is asked again at each push."""
    run(using, lambda connection: add_to(connection, bid, by=by))
    return bid


def commit(bid: str, *, using: str, now: datetime | None = None) -> None:
    """Its definition is complete: callbacks come when they are due. A second time it changes nothing."""

    def verb(connection: BaseDatabaseWrapper) -> None:
        found = existing(connection, bid)
        if found.is_committed:
            return
        if found.is_expired:
            raise BatchClosed(bid, "it was not committed in time, and expired")
        clock = _clock(connection, now)
        Batch.objects.using(using).filter(pk=found.pk).update(committed_at=clock, expires_at=None)
        members.look_again(connection, [bid], clock)

    run(using, verb)


def status(bid: str, *, using: str) -> BatchStatus:
    """How it is doing: one row is read."""

    def verb(connection: BaseDatabaseWrapper) -> BatchStatus:
        found = existing(connection, bid, lock=False)
        return BatchStatus(
            bid=found.bid,
            parent_bid=found.parent_bid,
            description=found.description,
            created_at=found.created_at,
            total=found.total,
            pending=found.pending,
            failed=found.failed,
            complete_st=found.complete_st,
            success_st=found.success_st,
            is_broken=found.is_broken,
        )

    return run(using, verb, atomic=False)


def expire(*, using: str, now: datetime | None = None, limit: int = CHUNK) -> int:
    """Give up batches that were not committed in time; returns how many. Their jobs run on."""
    late = Batch.objects.using(using).filter(expires_at__lt=now or Now())

    def verb(connection: BaseDatabaseWrapper) -> int:
        clock = _clock(connection, now)
        found = list(skip_locked(late.order_by("-depth", "bid"))[:limit])
        Batch.objects.using(using).filter(pk__in=[batch.pk for batch in found]).update(
            expired_at=clock, expires_at=None, is_broken=True
        )
        members.look_again(connection, [batch.bid for batch in found], clock)
        return len(found)

    return run(using, verb) if run(using, lambda _: late.exists(), atomic=False) else 0


def purge(*, using: str, kept_for_s: float = KEPT_FOR_S, now: datetime | None = None, limit: int = CHUNK) -> int:
    """Delete batches that ended long enough ago; returns how many."""
    old = Batch.objects.using(using).filter(finished_at__lt=(now or Now()) - timedelta(seconds=kept_for_s))

    def verb(_: BaseDatabaseWrapper) -> int:
        ids = list(skip_locked(old.order_by("finished_at")).values_list("pk", flat=True)[:limit])
        return Batch.objects.using(using).filter(pk__in=ids).delete()[0] if ids else 0

    return run(using, verb) if run(using, lambda _: old.exists(), atomic=False) else 0


def sweep(*, using: str, now: datetime | None = None) -> int:
    """Take steps that are due in committed batches and that nobody took; returns how many batches had some.

    None has, unless somebody changed rows by hand, or there is a bug: each change takes its steps itself.
    """
    batches = Batch.objects.using(using).filter(committed_at__isnull=False, finished_at__isnull=True)
    due = batches.filter(
        Q(complete_st=Progress.NOT_YET, unrun=0, open_children=0)
        | Q(complete_st=Progress.FINISHED, success_st=Progress.NOT_YET)
        & Q(pending=0, is_broken=False, unsucceeded_children=0)
    )

    def verb(connection: BaseDatabaseWrapper) -> int:
        bids = list(due.order_by("-depth", "bid").values_list("bid", flat=True)[:CHUNK])
        return members.look_again(connection, bids, _clock(connection, now)) if bids else 0

    return run(using, verb) if run(using, lambda _: due.exists(), atomic=False) else 0


def unfinished(*, using: str) -> dict[str, int]:
    """How many batches are open to whoever makes them, and how many are committed and not over."""
    live = Batch.objects.using(using).filter(finished_at=None)
    is_open = Q(committed_at=None)
    counted = {"open": Count("pk", filter=is_open), "committed": Count("pk", filter=~is_open)}
    return run(using, lambda _: live.aggregate(**counted), atomic=False)


def _clock(connection: BaseDatabaseWrapper, now: datetime | None) -> datetime:
    with connection.cursor() as cursor:
        return now or dialect_of(connection).now(cursor)
