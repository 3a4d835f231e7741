"""Changes to as many jobs as there are: MUTATE, QUEUE REMOVE, FLUSH. Rules: W23 to W25.

Each is a series of steps, and each step one short transaction over a range of ids that holds `CHUNK` jobs at most of
those that were there at the start: no step waits long for others nor they for it, and what arrives meanwhile is not
run after. A crash leaves the steps behind it done; the same command again does the rest.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Max, Q, Window
from django.db.models.functions import RowNumber

from .. import jsontext
from ..globs import Glob
from ..lifecycle import DEAD_FOR_S, State
from ..models import Counter, Job, JobQuerySet, Queue, Tracking
from ..mutations import Mutation
from ..payloads import Reservation
from .jobs import is_storable
from .operations import Change, discarded, killed, requeued
from .queues import known_names
from .transactions import run

CHUNK = 500
"""Jobs of one step: some 20 ms, and no lock is held for longer."""

READ_AT_ONCE = 100
"""Jobs whose texts are read together to be compared with a glob: texts can be large."""

LONGEST_PAUSE_S = 0.05

Step = Callable[[], int]
"""Carry out one step; returns how many jobs it changed."""


def mutate(mutation: Mutation, *, using: str, dead_for_s: int = DEAD_FOR_S) -> Iterator[Step]:
    """The steps of a MUTATE (W23)."""
    changes: dict[str, Change] = {
        "clear": discarded,
        "discard": discarded,
        "kill": killed(dead_for_s),
        "requeue": requeued,
    }
    change = changes[mutation.command]
    targeted = Job.objects.using(using).in_state(State(mutation.target))
    if mutation.command == "clear":
        return _by_ranges(targeted, change)
    if mutation.jids is not None:
        return _by_jids(targeted, mutation.jids, change)
    if not is_storable(mutation.jobtype):
        return iter(())
    jobs = targeted.filter(jobtype=mutation.jobtype) if mutation.jobtype else targeted
    if mutation.regexp:
        return _by_glob(jobs, Glob(mutation.regexp), change)
    return _by_ranges(jobs, change)


def remove_queues(queues: Sequence[str] | None, *, using: str) -> Iterator[Step]:
    """The steps of a QUEUE REMOVE (W24): what is enqueued goes first, so that no worker gets it when the pause goes.

    Scheduled and retrying jobs of these queues stay; they bring the queue back when their time comes.
    """
    for queue in known_names(using=using) if queues is None else queues:
        yield from _by_ranges(Job.objects.using(using).in_state(State.ENQUEUED).filter(queue=queue), discarded)
        yield partial(_forget_queue, queue, using)


def _forget_queue(queue: str, using: str) -> int:
    run(using, lambda _: Queue.objects.using(using).filter(name=queue).delete())
    return 0


def flush(*, using: str) -> Iterator[Step]:
    """The steps of a FLUSH (W25): jobs in any state, then queues with their pauses, and the totals.

    Worker processes stay: they are connected, and will hear of it when they report on a job that is gone.
    """
    yield from _by_ranges(Job.objects.using(using), lambda jobs: jobs.delete()[0])
    yield partial(_forget_all_but_workers, using)


def _forget_all_but_workers(using: str) -> int:
    def verb(_: BaseDatabaseWrapper) -> int:
        Queue.objects.using(using).all().delete()
        Counter.objects.using(using).all().delete()
        Tracking.objects.using(using).all().delete()
        return 0

    return run(using, verb)


def _by_jids(jobs: JobQuerySet, jids: Sequence[str], change: Change) -> Iterator[Step]:
    named = sorted(filter(is_storable, jids))
    for start in range(0, len(named), CHUNK):
        yield partial(_change, jobs.filter(jid__in=named[start : start + CHUNK]), change)


def _by_ranges(jobs: JobQuerySet, change: Change) -> Iterator[Step]:
    for low, high in _ranges(jobs, CHUNK):
        yield partial(_change, jobs.filter(pk__gt=low, pk__lte=high), change)


def _by_glob(jobs: JobQuerySet, glob: Glob, change: Change) -> Iterator[Step]:
    candidates = jobs.filter(_may_match(glob))
    for low, high in _ranges(candidates, READ_AT_ONCE):
        yield partial(_change_matching, candidates.filter(pk__gt=low, pk__lte=high), glob, change)


def _ranges(jobs: JobQuerySet, size: int) -> Iterator[tuple[int, int]]:
    """Ranges (after, up to) of ids that have `size` of these jobs each, as they are now; counted by the database.

    Ids, and not the times the sets are ordered by: many jobs may share a time, and a change to one moves it.
    """
    using = jobs.db
    last = run(using, lambda _: jobs.aggregate(last=Max("pk"))["last"], atomic=False)
    if last is None:
        return
    numbered = jobs.filter(pk__lt=last).order_by().annotate(number=Window(RowNumber(), order_by=F("pk").asc()))
    every = numbered.annotate(rest=F("number") % size).filter(rest=0).order_by("pk").values_list("pk", flat=True)
    bounds = run(using, lambda _: [0, *every, last], atomic=False)
    yield from pairwise(bounds)


def _change(jobs: JobQuerySet, change: Change) -> int:
    began = time.monotonic()
    if connections[jobs.db].vendor == "mysql":
        # There a DELETE waits for every row it looks at that others hold, and not only for those it deletes.
        ids = run(jobs.db, lambda _: list(jobs.values_list("pk", flat=True)), atomic=False)
        jobs = jobs.filter(pk__in=ids)
    changed = run(jobs.db, lambda _: change(jobs))
    _let_others_write(jobs.db, time.monotonic() - began)
    return changed


def _let_others_write(using: str, took_s: float) -> None:
    """Where there is one writer at a time and no queue for it, step aside as long as others had to wait."""
    connection = connections[using]
    if connection.vendor == "sqlite" and not connection.in_atomic_block:
        time.sleep(min(took_s, LONGEST_PAUSE_S))


def _change_matching(jobs: JobQuerySet, glob: Glob, change: Change) -> int:
    """Read first, outside of the transaction that changes: comparing takes time that no lock should be held for."""
    rows = jobs.only("id", "jid", "queue", "payload", "created_at", "enqueued_at", "failure")
    found = run(jobs.db, lambda _: list(rows), atomic=False)
    ids = [job.pk for job in found if glob.matches(_text(job))]
    return _change(jobs.filter(pk__in=ids), change) if ids else 0


def _text(job: Job) -> str:
    """The job as FETCH would give it, compact."""
    reservation = Reservation(
        jid=job.jid,
        queue=job.queue,
        text=job.payload,
        wid="",
        attempt=0,
        created_at=job.created_at,
        enqueued_at=job.enqueued_at,
        failure=job.failure,
    )
    return jsontext.compact(reservation.wire())


_between_tokens = re.compile(r"[:,{}\[\] \t\r\n]")
_in_times = re.compile(r'["0-9TZ.-]+')
_OUR_KEYS = ('"created_at"', '"enqueued_at"', '"failure"')
MOST_CONDITIONS = 4


def _may_match(glob: Glob) -> Q:
    """What a match must have in its columns: a condition the database can check, so that few texts are read.

    Literals are cut where a client may have put white space, and left out where they may come from what FETCH adds.
    """
    pieces = {piece for literal in glob.literals for piece in _between_tokens.split(literal)}
    telling = [
        piece
        for piece in pieces
        if len(piece) > 1
        and is_storable(piece)
        and not _in_times.fullmatch(piece)
        and not any(piece in key for key in _OUR_KEYS)
    ]
    condition = Q()
    for piece in sorted(telling, key=len, reverse=True)[:MOST_CONDITIONS]:
        condition &= Q(payload__contains=piece) | Q(failure__contains=piece)
    return condition
