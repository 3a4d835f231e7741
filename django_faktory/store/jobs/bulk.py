"""Change any number of jobs in short steps: MUTATE, QUEUE REMOVE, FLUSH and bulk actions. Rules: W23 to W25.

Each operation reads the ids of the matching jobs, `PORTION` per statement, and returns an iterator of steps. A step is
one short transaction over at most `CHUNK` jobs, so locks stay short. Jobs that arrive after the ids were read are not
included. After a crash the completed steps stay done; repeating the command finishes the work.
"""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Exists, OuterRef, Q, Value
from django.db.models.functions import Concat, Length

from ...core.globs import Glob
from ...core.json import jsontext
from ...core.lifecycle import ENDED, State
from ...core.mutation import Mutation
from ...core.payloads import Reservation, is_storable
from ...errors import FaktoryError
from ...models import Batch, Job, JobLock, JobQuerySet, Queue, Tracking
from .. import scan
from ..chunks import chunks
from ..deletion import delete_locked
from ..dialects.values import TOTALS
from ..limits import limiters
from ..locks import locks
from ..queues import CHUNK as QUEUES_AT_ONCE
from ..queues import known_names, read_ages
from ..statistics import deltas
from ..store import Store
from ..transactions import read, run
from .transitions import Change, discarded, killed, lock_rows, requeued

CHUNK = 500
"""Maximum jobs of one step: about 20 ms, which is also how long its row locks are held."""

READ_AT_ONCE = 100
"""Maximum jobs for which texts are read together and compared with a glob."""

READ_CHARACTERS = 4 * 1024 * 1024
"""Maximum characters of job texts in memory at a time; a longer text is read alone."""

PORTION = 2000
"""Ids read per statement."""
MAX_PAUSE_S = 0.05


class StepSizes(NamedTuple):
    """Sizes of the steps, and of the statements that find their jobs."""

    chunk: int = CHUNK
    portion: int = PORTION
    read_at_once: int = READ_AT_ONCE
    read_characters: int = READ_CHARACTERS


DEFAULT_SIZES = StepSizes()

Step = Callable[[], int]
"""Executes one step and returns the number of changed jobs."""


def execute_steps(steps: Iterable[Step], should_continue: Callable[[], bool]) -> Iterator[int]:
    """Execute the steps while `should_continue` returns True, and yield the number of jobs each step changed.

    The first step is always executed. Raise FaktoryError if steps are left when `should_continue` returns False; the
    completed steps stay done.
    """
    begun = False
    for step in steps:
        if begun and not should_continue():
            raise FaktoryError("shutdown in progress: the jobs so far were changed; send it again for the rest")
        begun = True
        yield step()


def mutate(store: Store, mutation: Mutation, *, sizes: StepSizes = DEFAULT_SIZES) -> Iterator[Step]:
    """Return the steps of a MUTATE (W23)."""
    changes: dict[str, Change] = {
        "clear": discarded,
        "discard": discarded,
        "kill": killed(store.dead_for_s),
        "requeue": requeued,
    }
    change = changes[mutation.command]
    target = State(mutation.target)
    jobs = store.jobs
    if mutation.jids is not None:
        return _by_jids(jobs.in_state(target), mutation.jids, change, sizes)
    if not is_storable(mutation.jobtype):  # no row can match, and the database would reject the parameter
        return iter(())
    jobs = jobs.filter(jobtype=mutation.jobtype) if mutation.jobtype else jobs.all()
    if mutation.regexp:
        return _by_glob(jobs, target, Glob(mutation.regexp), change, sizes)
    return _by_ids(jobs, target, change, sizes)


def read_ids(jobs: JobQuerySet, states: Collection[State], *, portion_size: int = PORTION) -> Sequence[int]:
    """Return the ids of these jobs in one of the states.

    A slice cannot be filtered further: its states are checked by `change` only.
    """
    return _read_ids(jobs if jobs.query.is_sliced else jobs.in_state(*states), portion_size)


def change(ids: Sequence[int], states: Collection[State], change: Change, *, using: str) -> int:
    """Apply `change` to the jobs that are still in one of the states, as one step; return the number changed."""
    return _change(_still_in(using, ids, states), change) if ids else 0


def remove_queues(store: Store, queues: Sequence[str] | None, *, sizes: StepSizes = DEFAULT_SIZES) -> Iterator[Step]:
    """Return the steps of a QUEUE REMOVE (W24).

    Enqueued jobs are discarded before the queue and its pause are deleted, so that no worker gets them in between.
    Scheduled and retrying jobs of these queues stay; the queue is created again when they become due.
    """
    for names in chunks(known_names(using=store.alias) if queues is None else queues, QUEUES_AT_ONCE):
        # Reading the jobs of each name took 7 statements: 2.5 s for 1,000 names without jobs on PostgreSQL.
        for queue in read_ages(names, using=store.alias):
            # Blocked jobs first: discarding an enqueued job would make the next blocked job of its key ready.
            for state in (State.BLOCKED, State.ENQUEUED):
                yield from _by_ids(store.jobs, state, discarded, sizes, queue=queue)
        yield partial(_forget_queues, names, store.alias)


def _forget_queues(names: Sequence[str], using: str) -> int:
    def verb(_: BaseDatabaseWrapper) -> int:
        rows = Queue.objects.using(using).filter(name__in=names)
        in_order = rows.order_by("name").select_for_update().values_list("name", flat=True)
        rows.filter(name__in=list(in_order)).delete()
        return 0

    return run(using, verb)


def flush(store: Store, *, sizes: StepSizes = DEFAULT_SIZES) -> Iterator[Step]:
    """Return the steps of a FLUSH (W25): delete all jobs, batches, progress records, queues with pauses, and totals.

    Worker processes stay: they are connected, and notice when they report on a job that no longer exists.
    """
    jobs = Job.objects.using(store.alias)
    # Before the batches are deleted: a batch created from now on keeps its members.
    job_ids = _read_ids(jobs.all(), sizes.portion)
    yield partial(_forget_batches, store.alias)  # before the jobs: deleting members then updates no batch
    for ids in chunks(job_ids, sizes.chunk):
        yield partial(_change, jobs.filter(pk__in=ids), _delete_flushed)
    tracked = Tracking.objects.using(store.alias)
    tracked_jids = read(tracked.values_list("jid", flat=True))
    for jids in chunks(tracked_jids, sizes.chunk):
        yield partial(_forget_tracked, jids, store.alias)
    yield partial(_forget_all_but_workers, store.alias)


def _delete_flushed(jobs: JobQuerySet) -> int:
    """Delete live and ended jobs, and release the locks and permits that they hold."""
    connection = connections[jobs.db]
    rows = list(lock_rows(jobs).only("lock_key", "lock_token", "permits"))
    ids = [row.pk for row in rows]
    deleted = delete_locked(Job.live.using(jobs.db).filter(pk__in=ids), ids)
    locks.release(connection, rows)
    limiters.release(connection, [row.permits for row in rows])
    return deleted + jobs.stored_for(*ENDED).delete()[0]


def _forget_batches(using: str) -> int:
    run(using, lambda _: Batch.objects.using(using).all().delete())
    return 0


def _forget_tracked(jids: Sequence[str], using: str) -> int:
    return run(using, lambda _: Tracking.objects.using(using).filter(jid__in=jids).delete()[0])


def _forget_all_but_workers(using: str) -> int:
    def verb(_: BaseDatabaseWrapper) -> int:
        Queue.objects.using(using).all().delete()
        # A job that was pushed and claimed during the FLUSH keeps its lock.
        holders = Job.live.using(using).in_state(State.WORKING).filter(lock_token=OuterRef("pk"))
        JobLock.objects.using(using).filter(~Exists(holders)).delete()
        return 0

    run(using, verb)
    run(using, lambda connection: deltas.subtract(connection, TOTALS))
    return 0


def _by_jids(jobs: JobQuerySet, jids: Sequence[str], change: Change, sizes: StepSizes) -> Iterator[Step]:
    # A jid that no database can store would fail the statement for all jids of its step.
    for chunk in chunks(sorted(filter(is_storable, jids)), sizes.chunk):
        yield partial(_change, jobs.filter(jid__in=chunk), change)


def _by_ids(
    jobs: JobQuerySet, state: State, change: Change, sizes: StepSizes, queue: str | None = None
) -> Iterator[Step]:
    for ids in chunks(_walk_ids(jobs, state, sizes.portion, queue), sizes.chunk):
        yield partial(_change, _still_in(jobs.db, ids, {state}), change)


def _by_glob(jobs: JobQuerySet, state: State, glob: Glob, change: Change, sizes: StepSizes) -> Iterator[Step]:
    for ids in chunks(_walk_ids(jobs.filter(_may_match(glob)), state, sizes.portion), sizes.read_at_once):
        unchanged = _still_in(jobs.db, ids, {state})
        yield partial(_change_matching, unchanged, state, glob, change, max_characters=sizes.read_characters)


def _read_ids(jobs: JobQuerySet, portion_size: int) -> array[int]:
    """Return the ids of these jobs in ascending order, 8 bytes each in memory.

    Each portion is one statement, so that no statement exceeds the database time limit, and so that converting a
    million ids does not hold the GIL for long. A slice is read at once, because its length is bounded.
    """
    all_ids = array("q")
    if jobs.query.is_sliced:
        return run(jobs.db, lambda _: array("q", sorted(jobs.values_list("pk", flat=True))), atomic=False)
    in_order = jobs.order_by("pk").values_list("pk", flat=True)
    # By the last id seen: an OFFSET would read all earlier rows again for each portion.
    last = 0
    while True:
        portion = in_order.filter(pk__gt=last)[:portion_size]
        ids = read(portion)
        all_ids.extend(ids)
        if len(ids) < portion_size:
            return all_ids
        last = ids[-1]


def _walk_ids(jobs: JobQuerySet, state: State, portion_size: int, queue: str | None = None) -> array[int]:
    """Return the ids of the jobs in one state by walking the index of the state, in index order (ADR 0029)."""
    all_ids = array("q")
    for ids in scan.ids_of(jobs, state, queue=queue, size=portion_size):
        all_ids.extend(ids)
    return all_ids


def _still_in(using: str, ids: Sequence[int], states: Collection[State]) -> JobQuerySet:
    """Return a queryset of the jobs with these ids that are still in one of the states.

    The state is compared as an expression that matches no index: after a million changes the statistics are outdated,
    and the database would scan the index of the state in each step (PostgreSQL: 218 s instead of 20 s).
    """
    jobs = Job.objects.using(using).stored_for(*states).filter(pk__in=ids)
    return jobs.alias(state_now=Concat("state", Value(""))).filter(state_now__in=sorted(states))


def _change(jobs: JobQuerySet, change: Change) -> int:
    began = time.monotonic()
    changed = run(jobs.db, lambda _: change(jobs))
    _let_others_write(jobs.db, time.monotonic() - began)
    return changed


def _let_others_write(using: str, took_s: float) -> None:
    """Pause on SQLite for as long as the step took, at most `MAX_PAUSE_S`, so that other writers get a turn.

    SQLite has one writer and no fair queue of processes for it.
    """
    connection = connections[using]
    if connection.vendor == "sqlite" and not connection.in_atomic_block:
        time.sleep(min(took_s, MAX_PAUSE_S))


def _change_matching(jobs: JobQuerySet, state: State, glob: Glob, change: Change, *, max_characters: int) -> int:
    """Find the matching jobs outside the transaction, then change them: no lock is held during the slow matching."""
    ids = []
    for portion in _by_size(jobs, max_characters):
        rows = jobs.filter(pk__in=portion).only("id", "jid", "queue", "payload", "created_at", "enqueued_at", "failure")
        jobs_read = read(rows)
        ids += [job.pk for job in jobs_read if glob.matches(_format_as_fetched(job))]
    # Check the state again: it may have changed since the texts were read.
    return _change(_still_in(jobs.db, ids, {state}), change) if ids else 0


def _by_size(jobs: JobQuerySet, max_characters: int) -> Iterator[list[int]]:
    """Yield the ids of these jobs in portions of at most `max_characters` characters of job text."""
    sizes = jobs.order_by("pk").values_list("pk", Length("payload"))
    portion: list[int] = []
    room = max_characters
    for pk, size in read(sizes):
        if portion and size > room:
            yield portion
            portion, room = [], max_characters
        portion.append(pk)
        room -= size
    if portion:
        yield portion


def _format_as_fetched(job: Job) -> str:
    """Return the job as compact JSON, in the form that FETCH returns: globs are matched against this text (W23)."""
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


_JSON_PUNCTUATION = re.compile(r"[:,{}\[\] \t\r\n]")
_TIME_PART = re.compile(r'["0-9TZ.-]+')
_KEYS_ADDED_BY_FETCH = ('"created_at"', '"enqueued_at"', '"failure"')
MAX_CONDITIONS = 4
MAX_PIECE = 24
"""Characters of a piece that are searched for: LIKE compares each of them at each position of a text of 15 MiB."""


def _may_match(glob: Glob) -> Q:
    """Return a condition that every match satisfies, and that the database can check, so that few texts are read.

    Literals of the glob are split at JSON punctuation, where the stored text may contain white space. Pieces that may
    occur only in fields that FETCH adds are left out, because the stored text does not have them.
    """
    pieces = {piece for literal in glob.literals for piece in _JSON_PUNCTUATION.split(literal)}
    selective = [
        piece
        for piece in pieces
        if len(piece) > 1
        and is_storable(piece)
        and not _TIME_PART.fullmatch(piece)
        and not any(piece in key for key in _KEYS_ADDED_BY_FETCH)
    ]
    # The longest pieces select best; each one costs a text search in every row.
    condition = Q()
    for piece in sorted(selective, key=len, reverse=True)[:MAX_CONDITIONS]:
        condition &= Q(payload__contains=piece[:MAX_PIECE]) | Q(failure__contains=piece[:MAX_PIECE])
    return condition
