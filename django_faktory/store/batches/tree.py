"""Read the tree of a batch: its ancestors and all their descendants. Changes nothing."""

from __future__ import annotations

from ...models import Batch

MAX_BATCHES = 200
"""Batches of a tree that are read at most."""


def tree_of(batch: Batch, *, max_count: int = MAX_BATCHES) -> list[Batch]:
    """Return the tree that contains this batch, from its root, depth first. One statement per level.

    Of a larger tree it returns about `max_count` batches: whole levels from the root down, and always the path to this
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


def _depth_first(root: Batch, children: dict[str, list[Batch]]) -> list[Batch]:
    ordered, stack = [], [root]
    while stack:
        ordered.append(stack.pop())
        stack += reversed(children.get(ordered[-1].bid, []))
    return ordered
