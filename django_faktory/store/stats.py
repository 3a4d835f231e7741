"""One snapshot of the numbers: INFO, metrics and the admin show the same. True on every node: the database counts."""

from __future__ import annotations

from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Count, Sum

from ..lifecycle import State
from ..models import Counter, Job, Queue, WorkerProcess
from .transactions import run
from .workers import living

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
        for state in (State.ENQUEUED, State.BLOCKED):
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


def add_queues(names: set[str], *, using: str) -> None:
    """Remember these queues, so that they are shown while they are empty."""
    if names:
        rows = [Queue(name=name) for name in sorted(names)]
        run(using, lambda _: Queue.objects.using(using).bulk_create(rows, ignore_conflicts=True), atomic=False)
