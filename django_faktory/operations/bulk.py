"""Apply bulk operations to jobs and queues: retry, requeue, cancel, kill, discard, prune, pause, resume.

Adds the notifications and the project's settings to the functions of `store.jobs.bulk`; used by querysets, the admin,
the API and the command line. Each step is one short transaction over at most `store.jobs.bulk.CHUNK` jobs; inside a
transaction of the caller all steps are part of that transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from django.db import transaction
from django.db.models import Q

from .. import conf
from ..core.lifecycle import LIVE, Event, State, sources
from ..models import Job, JobQuerySet
from ..models.queue import QueueQuerySet
from ..store import notifier, queues
from ..store.batches import tree
from ..store.jobs import bulk, cancellations, transitions
from ..store.notifier.postgresql import ANY_QUEUE

TESTED_FOR_S = 3600
"""Seconds for which a job keeps its row after it ended, if `test_one` retried it."""


class Verb(StrEnum):
    """Operations that can be applied to any set of jobs."""

    RETRY = "retry"
    REQUEUE = "requeue"
    CANCEL = "cancel"
    KILL = "kill"
    DISCARD = "discard"
    PRUNE = "prune"


STATES: dict[Verb, frozenset[State]] = {
    Verb.RETRY: frozenset({State.RETRIES, State.DEAD}),
    Verb.REQUEUE: sources(Event.REQUEUE),
    Verb.CANCEL: LIVE,
    Verb.KILL: sources(Event.KILL),
    Verb.DISCARD: sources(Event.DISCARD),
    Verb.PRUNE: sources(Event.PURGE),
}
"""States a job must be in for each verb; jobs in other states are not changed."""


class BulkOperation(NamedTuple):
    """A bulk operation in progress, returned by `begin`."""

    total: int
    """Jobs found by the query. Jobs that leave their state before their step runs are not changed."""
    steps: Iterator[int]
    """Lazy steps: advancing the iterator executes one step and yields the number of jobs it changed."""


def begin(verb: Verb, jobs: JobQuerySet) -> BulkOperation:
    """Find the jobs to change and return the steps; jobs created later are not included."""
    total, steps = bulk.change(jobs, STATES[verb], _change_for(verb))
    return BulkOperation(total, _run_steps(verb, jobs.db, steps))


def execute(verb: Verb, jobs: JobQuerySet) -> int:
    """Execute all steps; return the number of jobs changed."""
    return sum(begin(verb, jobs).steps)


def retry_batches(bids: Iterable[str], *, using: str, limit: int | None = None) -> int:
    """Retry the failed members and callbacks of these batches and of all batches nested in them.

    Return the number of jobs changed, at most `limit`. Retried jobs leave their state, so a repetition continues.
    """
    changed = 0
    for chunk in tree.with_nested(bids, using=using):
        # A failed callback keeps a batch from its end as a failed member does.
        jobs = Job.objects.using(using).filter(Q(bid__in=chunk) | Q(callback_of__in=chunk))
        if limit is not None:
            jobs = jobs.in_state(*STATES[Verb.RETRY]).order_by("pk")[: limit - changed]
        changed += execute(Verb.RETRY, jobs)
        if changed == limit:
            break
    return changed


def spread(ids: Sequence[int], *, first_at: datetime, every_s: float, using: str, chunk_size: int = bulk.CHUNK) -> int:
    """Defer failed jobs so that they run one after the other, in the order of `ids`.

    The jobs wait in the retries state, `every_s` seconds apart, so workers receive them no faster than that pace.
    Return the number of jobs changed.
    """
    # In short transactions, so that no row is locked for long.
    changed = 0
    for start in range(0, len(ids), chunk_size):
        indexes = range(start, min(start + chunk_size, len(ids)))
        # Times depend on the place in `ids` and not on the clock, so a later chunk continues the pace of the first.
        times = {ids[index]: first_at + timedelta(seconds=every_s * index) for index in indexes}
        changed += transitions.defer(times, using=using)
    if changed:
        _announce(using, {ANY_QUEUE})
    return changed


def test_one(job: Job) -> bool:
    """Retry this job now and keep its row for `TESTED_FOR_S` after it ends.

    Return False if the job has left the retries and dead states.
    """
    using = job._state.db or conf.get("DATABASE")  # noqa: SLF001  (documented)
    # Before the retry: a fast worker could end the job, and so remove its row, between the two statements.
    transitions.keep_for(job.pk, TESTED_FOR_S, using=using)
    # The UPDATE checks the state, so of two requests for the same job only one succeeds.
    return execute(Verb.RETRY, Job.objects.using(using).filter(pk=job.pk)) == 1


def pause(rows: QueueQuerySet, by: str, reason: str) -> int:
    """Stop delivering jobs of these queues; return how many were not paused before."""
    return len(queues.pause(_names(rows), using=rows.db, by=by, reason=reason))


def resume(rows: QueueQuerySet) -> int:
    """Deliver jobs of these queues again; return how many were paused."""
    using = rows.db
    resumed = queues.resume(_names(rows), using=using)
    if resumed:
        _announce(using, set(resumed))
    return len(resumed)


def _names(rows: QueueQuerySet) -> list[str]:
    return list(rows.values_list("name", flat=True))


def _change_for(verb: Verb) -> transitions.Change:
    match verb:
        case Verb.KILL:
            return transitions.killed(conf.get("DEAD_TTL"))
        case Verb.CANCEL:
            return cancellations.cancelled
        case Verb.DISCARD:
            return transitions.discarded
        case Verb.PRUNE:
            return transitions.purged
    return transitions.requeued


def _run_steps(verb: Verb, using: str, steps: Iterator[bulk.Step]) -> Iterator[int]:
    for step in steps:
        changed = step()
        # Workers are notified after each step and not at the end, so that they start while other steps run.
        if changed and verb in (Verb.RETRY, Verb.REQUEUE):
            _announce(using, {ANY_QUEUE})
        yield changed


def _announce(using: str, names: set[str]) -> None:
    # After the commit: a worker that wakes up earlier would not see the jobs.
    transaction.on_commit(partial(notifier.announce, using, names), using=using)
