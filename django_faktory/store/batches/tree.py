"""Read batches: the tree of one, its ancestors and all their descendants, and those in a stage. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.db.models import Max, Q, QuerySet

from ...models import Batch

HAS_FAILED = Q(failed__gt=0) | Q(is_broken=True) | Q(complete_failed=True) | Q(success_failed=True)
"""Batches with a failed member or callback."""

# Each condition matches a partial index of batches, or the index of live ones.
STAGES = {
    "open": Q(expires_at__isnull=False) | Q(reopened_until__isnull=False),
    "running": Q(committed_at__isnull=False, finished_at=None, reopened_until=None),
    "failing": Q(failed__gt=0, finished_at=None),
    "broken": Q(is_broken=True),
    "over": Q(finished_at__isnull=False),
}
"""Stages by which lists are filtered. A batch may be in several of them."""

RECENT = 20_000
"""Number of the newest batches that are searched for failed ones: no index contains the failed batches."""
MAX_FAILED = 1000

MAX_BATCHES = 200
"""Maximum number of batches that are read of one tree."""

BIDS_AT_ONCE = 500
"""Maximum number of batch ids in one statement."""


def tree_of(batch: Batch, *, max_count: int = MAX_BATCHES) -> list[Batch]:
    """Return the tree that contains this batch, from its root, depth first. One statement per level.

    If the tree is larger, return about `max_count` batches: level by level from the root, and always the path to this
    batch.
    """
    # Without the callbacks' job texts, which may be long.
    batches = Batch.objects.using(batch._state.db).order_by("pk").defer("complete", "success")  # noqa: SLF001  (documented)
    path = [batch]
    while path[0].parent_bid and (parent := batches.filter(bid=path[0].parent_bid).first()):
        path.insert(0, parent)
    children: dict[str, list[Batch]] = {}
    level, count = path[:1], 1
    while level and count < max_count:
        parents = [node.bid for node in level if node.children]
        level = list(batches.filter(parent_bid__in=parents)[: max_count - count]) if parents else []
        for node in level:
            children.setdefault(node.parent_bid, []).append(node)
        count += len(level)
    for node in path[1:]:  # the path is included even if the tree was cut
        siblings = children.setdefault(node.parent_bid, [])
        siblings += [node] if node not in siblings else []
    return _depth_first(path[0], children)


def in_stage(batches: QuerySet[Batch], stage: str) -> QuerySet[Batch]:
    """Filter batches by a stage of `STAGES`. A batch is failing, too, if a batch nested in it is."""
    condition = STAGES[stage]
    if stage == "failing":
        condition |= Q(bid__in=find_failing_ancestors(using=batches.db))
    return batches.filter(condition)


def with_nested(bids: Iterable[str], *, using: str) -> Iterator[list[str]]:
    """Yield the ids of these batches and of all batches nested in them, at most `BIDS_AT_ONCE` at a time, each once."""
    batches = Batch.objects.using(using)
    waiting = list(dict.fromkeys(bids))
    found = set(waiting)
    while waiting:
        chunk, waiting = waiting[:BIDS_AT_ONCE], waiting[BIDS_AT_ONCE:]
        yield chunk
        nested = batches.filter(parent_bid__in=chunk).values_list("bid", flat=True)
        new = [bid for bid in nested if bid not in found]
        found.update(new)
        waiting += new


def find_failing_ancestors(*, using: str) -> set[str]:
    """Return the bids of unfinished batches with a failed batch somewhere below them. One statement per level."""
    batches = Batch.objects.using(using)
    newest = batches.aggregate(newest=Max("pk"))["newest"] or 0
    nested = batches.filter(pk__gt=newest - RECENT, depth__gt=0, finished_at=None)
    level = set(nested.filter(HAS_FAILED).order_by("-pk").values_list("parent_bid", flat=True)[:MAX_FAILED])
    found: set[str] = set()
    while level := level - found - {""}:
        found |= level
        level = set(batches.filter(bid__in=level, depth__gt=0).values_list("parent_bid", flat=True))
    return found


def _depth_first(root: Batch, children: dict[str, list[Batch]]) -> list[Batch]:
    ordered, stack = [], [root]
    while stack:
        ordered.append(stack.pop())
        stack += reversed(children.get(ordered[-1].bid, []))
    return ordered
