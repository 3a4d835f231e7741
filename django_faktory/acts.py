"""What people do to sets of jobs and queues: the store's steps, with the hints that follow and the project's settings.

Used by querysets, the admin, the API and the command line. Each step is one short transaction over at most
`many.CHUNK` jobs; in a transaction of the caller's all of them are part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from django.db import transaction

from . import conf, wakeups
from .lifecycle import Event, State, sources
from .models import Job, JobQuerySet
from .querysets import QueueQuerySet
from .store import many, operations, queues
from .wakeups.postgresql import ANY_QUEUE

TRIED_FOR_S = 3600
"""How long a job that was run to see how it fares leaves a row."""


class Verb(StrEnum):
    """What can be done to any set of jobs."""

    RETRY = "retry"
    REQUEUE = "requeue"
    KILL = "kill"
    DISCARD = "discard"
    PRUNE = "prune"


STATES: dict[Verb, frozenset[State]] = {
    Verb.RETRY: frozenset({State.RETRIES, State.DEAD}),
    Verb.REQUEUE: sources(Event.REQUEUE),
    Verb.KILL: sources(Event.KILL),
    Verb.DISCARD: sources(Event.DISCARD),
    Verb.PRUNE: sources(Event.PURGE),
}
"""The states in which a job must be for each; others are left alone."""


class Under(NamedTuple):
    """A verb under way."""

    total: int
    """Jobs that were found: those that leave their state before their turn are left alone."""
    steps: Iterator[int]
    """How many were changed, step by step; nothing is done before it is asked for."""


def begin(verb: Verb, jobs: JobQuerySet) -> Under:
    """Find the jobs that are meant; what comes later is not among them."""
    jobs = jobs.using(_writable(jobs))
    found, steps = many.change(jobs, STATES[verb], _change(verb))
    return Under(found, _carried_out(verb, jobs.db, steps))


def carry_out(verb: Verb, jobs: JobQuerySet) -> int:
    """All of it; returns how many jobs were changed."""
    return sum(begin(verb, jobs).steps)


def spread(ids: Sequence[int], *, first_at: datetime, every_s: float, using: str) -> int:
    """Have jobs that failed run again one after the other, in the order of `ids`; returns how many will.

    They wait among the retries: their workers get no more at a time than the pace allows.
    """
    changed = 0
    for start in range(0, len(ids), many.CHUNK):
        places = range(start, min(start + many.CHUNK, len(ids)))
        times = {ids[place]: first_at + timedelta(seconds=every_s * place) for place in places}
        changed += operations.defer(times, using=using)
    if changed:
        _announce(using, {ANY_QUEUE})
    return changed


def try_one(job: Job) -> bool:
    """Run this one now, and keep its row for a while whatever comes of it; False where it has left its state."""
    using = job._state.db or conf.get("DATABASE")  # noqa: SLF001  (documented)
    operations.keep_for(job.pk, TRIED_FOR_S, using=using)
    return carry_out(Verb.RETRY, Job.objects.using(using).filter(pk=job.pk)) == 1


def pause(found: QueueQuerySet) -> int:
    """Give out no job of these queues; returns how many were not paused yet."""
    return len(queues.pause(_names(found), using=_writable(found)))


def resume(found: QueueQuerySet) -> int:
    """Give out jobs of these queues again; returns how many were paused."""
    using = _writable(found)
    resumed = queues.resume(_names(found), using=using)
    if resumed:
        _announce(using, set(resumed))
    return len(resumed)


def _names(found: QueueQuerySet) -> list[str]:
    return list(found.values_list("name", flat=True))


def _writable(rows: JobQuerySet | QueueQuerySet) -> str:
    """The database of a set, where it can be written; sets that were read from a replica are changed at its source."""
    rows._for_write = True  # type: ignore[union-attr]  # noqa: SLF001  (as QuerySet's own update does)
    return rows.db


def _change(verb: Verb) -> operations.Change:
    match verb:
        case Verb.KILL:
            return operations.killed(conf.get("DEAD_TTL"))
        case Verb.DISCARD:
            return operations.discarded
        case Verb.PRUNE:
            return operations.purged
    return operations.requeued


def _carried_out(verb: Verb, using: str, steps: Iterator[many.Step]) -> Iterator[int]:
    for step in steps:
        changed = step()
        if changed and verb in (Verb.RETRY, Verb.REQUEUE):
            _announce(using, {ANY_QUEUE})
        yield changed


def _announce(using: str, names: set[str]) -> None:
    transaction.on_commit(partial(wakeups.announce, using, names), using=using)
