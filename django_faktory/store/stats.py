"""One snapshot of the numbers: INFO, metrics and the admin show the same. True on every node: the database counts."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Count, Sum

from ..lifecycle import State
from ..models import Batch, Counter, Job, Queue, WorkerProcess
from . import scalars, walking
from .transactions import run
from .workers import living

_WAITING = (State.ENQUEUED, State.BLOCKED)
_SETS = ((State.SCHEDULED, State.RETRIES), (State.WORKING,), (State.DEAD,))
"""As they share an index: to count all of them at once PostgreSQL would read the whole table."""


def snapshot(*, using: str, worker_timeout_s: float = 60) -> dict[str, Any]:
    """The sizes of queues and sets, the totals and the workers that live; taken in one transaction.

    Sizes are counted over the partial indexes of the live states, so the cost grows with the backlog: callers
    that show them often keep one for a second.
    """

    def verb(_: BaseDatabaseWrapper) -> dict[str, Any]:
        blocked = 0
        queues = dict.fromkeys(Queue.objects.using(using).values_list("name", flat=True), 0)
        jobs = Job.objects.using(using)
        for state in _WAITING:
            for queue, count in jobs.in_state(state).order_by().values_list("queue").annotate(Count("pk")):
                queues[queue] = queues.get(queue, 0) + count
                blocked += count if state is State.BLOCKED else 0
        sets = dict.fromkeys(sorted(str(state) for states in _SETS for state in states), 0)
        first, *others = (
            jobs.in_state(*states).order_by().values_list("state").annotate(Count("pk")) for states in _SETS
        )
        sets[str(State.BLOCKED)] = blocked  # in their queues' sizes too
        sets.update(first.union(*others, all=True))
        totals = Counter.objects.using(using).aggregate(
            processed=Sum("processed"), failed=Sum("failed"), late=Sum("late")
        )
        return {
            "queues": dict(sorted(queues.items())),
            "sets": sets,
            "total_processed": totals["processed"] or 0,
            "total_failures": totals["failed"] or 0,
            "total_late": totals["late"] or 0,
            "total_enqueued": sum(queues.values()),
            "total_queues": len(queues),
            "workers": WorkerProcess.objects.using(using).filter(living(worker_timeout_s)).count(),
        }

    return run(using, verb)


class Bounded(NamedTuple):
    """The numbers, none of them counted beyond a limit."""

    totals: dict[str, int]
    """Ends, failures and late reports since the beginning: kept as they happen, and exact."""
    sets: dict[str, int]
    """Jobs by state."""
    batches: dict[str, int]
    """Those that are not over: open, committed."""
    queues: int


def bounded(*, using: str, most: int) -> Bounded:
    """The same at a cost that does not grow with the backlog: `most` means so many or more."""
    live = Batch.objects.using(using).filter(finished_at=None)
    states = (*_WAITING, *(state for states in _SETS for state in states))
    rows = [
        *(walking.in_index_order(state, using=using) for state in states),
        live.filter(committed_at=None),
        live.filter(committed_at__isnull=False),
        Queue.objects.using(using).all(),
    ]
    *counts, open_, committed, queues = scalars.counts(rows, most=most, using=using)
    sums = {name: Sum(name) for name in ("processed", "failed", "late")}
    totals = run(using, lambda _: Counter.objects.using(using).aggregate(**sums), atomic=False)
    return Bounded(
        totals={name: total or 0 for name, total in totals.items()},
        sets={str(state): count for state, count in sorted(zip(states, counts, strict=True))},
        batches={"open": open_, "committed": committed},
        queues=queues,
    )


def add_queues(names: set[str], *, using: str) -> None:
    """Remember these queues, so that they are shown while they are empty."""
    if names:
        rows = [Queue(name=name) for name in sorted(names)]
        run(using, lambda _: Queue.objects.using(using).bulk_create(rows, ignore_conflicts=True), atomic=False)
