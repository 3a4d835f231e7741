"""Store sets of jobs. Rule: W10.

On PostgreSQL by `faktory_push_1`, on SQLite and MariaDB by the INSERT of `store.dialects.portable`, both called by
`Dialect.insert`. Jobs of a batch, and jobs with keys on SQLite and MariaDB, go through `keyed_push`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter

from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.job_options import JobOptions
from ...core.json import jsontext
from ...core.payloads import JobPayload
from ...errors import FaktoryError, InvalidPayload, InvalidTransition, JobNotFound, NotUnique
from ..dialects.base import Dialect, OrderedJobs, insertion_order, unique_key_of
from ..dialects.values import ALL_STORED, PushResult
from ..locks import locks
from ..store import Store
from ..transactions import run, run_each
from . import keyed_push, waits

_has_new_jid = attrgetter("has_new_jid")

CHUNK = 500
"""Maximum rows of one statement: enough to make its fixed cost negligible, few enough to keep row locks short."""


def push(store: Store, jobs: Sequence[JobPayload], *, chunk_size: int = CHUNK) -> Sequence[FaktoryError | None]:
    """Store jobs in one transaction, or in the caller's transaction if there is one.

    Return one item per job: None, or the reason for the refusal: NotUnique (W27), UnknownBatch or BatchClosed (W26),
    InvalidPayload if the database refuses a value; in a caller's transaction InvalidPayload is raised instead. A
    stored job that has not finished stays unchanged, a finished one is replaced. Of two jobs with the same jid, the
    first is stored (W10). A push can therefore be repeated after a lost connection. Each statement stores at most
    `chunk_size` jobs.
    """
    if not jobs:
        return []
    push_part = partial(_push_set, store, chunk_size=chunk_size)
    return run_each(store.alias, push_part, jobs, lambda _, error: error)


def _push_set(store: Store, jobs: Sequence[JobPayload], *, chunk_size: int) -> Sequence[FaktoryError | None]:
    dialect = store.dialect
    if _any_needs_lookup(jobs, dialect):
        return _push_with_lookups(store, jobs, chunk_size=chunk_size)
    distinct = jobs if len(jobs) == 1 else _select_distinct(jobs)
    places = insertion_order(distinct) if len(jobs) > 1 else (0,)
    may_exist = not all(map(_has_new_jid, jobs))

    def insert(connection: BaseDatabaseWrapper) -> list[PushResult]:
        """Return the results other than `ALL_STORED`."""
        clock = store.clock()
        if len(places) > chunk_size:
            with connection.cursor() as cursor:
                clock = clock or dialect.time_of_write(cursor)  # the places of all jobs count from one time
            if may_exist or any(map(unique_key_of, jobs)):
                dialect.lock_stored(connection, [(place, distinct[place]) for place in places], clock)
        results = []
        for start in range(0, len(places), chunk_size):
            # Built for each statement: 10,000 pairs at once would make the garbage collector run more often.
            ordered = [(place, distinct[place]) for place in places[start : start + chunk_size]]
            result = dialect.insert(connection, ordered, clock, may_exist=may_exist)
            if result is not ALL_STORED:
                results.append(result)
        # Check the keys of blocked jobs again after the commit: their holder may be releasing the lock now, and neither
        # transaction sees the other (ADR 0015).
        if blocked := {key for result in results for key in result.blocked}:
            locks.promote_waiters_later(connection, blocked)
        return results

    # Some dialects insert a set with several statements. One row needs a single statement on every database.
    is_one_statement = len(places) == 1 or (dialect.one_statement and len(places) <= chunk_size)
    results = run(store.alias, insert, atomic=not is_one_statement, writes=True)
    if not results:
        return [None] * len(jobs)
    if any(result.is_undecided for result in results):
        return _push_with_lookups(store, jobs, chunk_size=chunk_size)
    refused = {jid for result in results for jid in result.refused}
    return [NotUnique(job.jid) if job.jid in refused else None for job in jobs]


def _push_with_lookups(store: Store, jobs: Sequence[JobPayload], *, chunk_size: int) -> Sequence[FaktoryError | None]:
    refusals: dict[str, FaktoryError] = {}
    if ordered := order_jobs([job for job in jobs if not (job.options and job.options.signals)]):
        push_ordered = partial(keyed_push.push, jobs=ordered, now=store.clock(), chunk_size=chunk_size)
        refusals = run(store.alias, push_ordered, atomic=False, writes=True)
    for job in jobs:
        if job.options and job.options.signals:
            try:
                waits.signal(store, job.options.signals, job.jobtype, _first_argument(job.text))
            except (InvalidPayload, InvalidTransition, JobNotFound) as error:
                refusals[job.jid] = error
    return [refusals.get(job.jid) for job in jobs]


def _first_argument(text: str) -> str:
    """Return the JSON of the first argument of a job, the payload of a signal."""
    return next(iter(jsontext.items(jsontext.members(text)["args"])), "null")


def _any_needs_lookup(jobs: Sequence[JobPayload], dialect: Dialect) -> bool:
    """Return True if one of the jobs needs lookups before its insert: of its batch, or of its keys."""
    return any(job.options and _needs_lookup(job.options, dialect) for job in jobs)


def _needs_lookup(options: JobOptions, dialect: Dialect) -> bool:
    has_key = options.unique_key is not None or options.lock_key is not None
    return (options.bid or options.signals) is not None or (has_key and not dialect.stores_keyed)


def may_wait(jobs: Sequence[JobPayload], dialect: Dialect) -> bool:
    """Return True if the push of one of the jobs may wait for another transaction, or needs lookups."""
    # A loop: a generator takes longer than the rest of it, and nearly all jobs have no options.
    for job in jobs:  # noqa: SIM110
        if job.options and (job.options.may_block or _needs_lookup(job.options, dialect)):
            return True
    return False


def order_jobs(jobs: Sequence[JobPayload]) -> OrderedJobs:
    """Return the first job of each jid, in the insertion order that all transactions share."""
    if len(jobs) == 1:
        return [(0, jobs[0])]
    distinct = _select_distinct(jobs)
    return [(place, distinct[place]) for place in insertion_order(distinct)]


def _select_distinct(jobs: Sequence[JobPayload]) -> Sequence[JobPayload]:
    """Return the first job of each jid, in the same order."""
    return list({job.jid: job for job in reversed(jobs)}.values())[::-1]
