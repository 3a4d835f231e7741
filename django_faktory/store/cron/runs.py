"""Run due cron entries: enqueue the job of each tick in the transaction that takes the tick. ADR 0014.

Each tick thus enqueues at most one job, and a crash loses none. Main functions: `enqueue_due_runs`, `run_now`; their
caller supplies the function that creates an entry's job. Lock order: the entry, then the rows its job needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import OuterRef, Q, Subquery
from django.db.models.functions import Now

from ...core.cron import Overlap, RunOutcome, Schedule, due
from ...core.lifecycle import FINISHED, UNFINISHED
from ...core.logs import get_logger
from ...core.payloads import in_ascii
from ...errors import BrokerUnavailable, FaktoryError, InvalidCron
from ...models import Job
from ...models.cron import CronEntry, CronRun
from ..database_errors import ErrorKind, first_line, kind_of
from ..dialects import clock_of
from ..transactions import read, run
from .entries import log_problem

logger = get_logger(__name__)

CHUNK = 500
ENTRIES = 100
KEPT_FOR_S = 3600
"""Minimum seconds that the row of an entry's job is kept after its end.

`record_run_outcomes` reads its outcome from it.
"""

KEPT_RUNS = 100
"""Runs kept per entry; runs with an unfinished job are kept in addition."""

MAX_NOTE_LENGTH = 1000


class CronJob(NamedTuple):
    """The jid and the queue of the job that was made."""

    jid: str
    queue: str


Enqueue = Callable[[CronEntry], CronJob]
"""Makes and pushes an entry's job within the current transaction. Raises the reason if it cannot."""


def enqueue_due_runs(enqueue: Enqueue, *, using: str, now: datetime | None = None) -> set[str]:
    """Take the due runs of all entries, one transaction per entry; return the queues that got a job.

    Entries that another node has locked are left to that node.
    """
    entries = CronEntry.objects.using(using).filter(next_at__lte=now or Now()).order_by("next_at")
    ids: list[int] = read(entries.values_list("pk", flat=True)[:ENTRIES])
    queues: set[str] = set()
    for pk in ids:
        queues |= run(using, lambda connection, pk=pk: _take_runs(connection, pk, enqueue, now))  # type: ignore[misc]  # a default is no parameter to mypy
    return queues


def run_now(pk: int, enqueue: Enqueue, *, using: str) -> CronJob:
    """Enqueue an entry's job at once, regardless of its pause and overlap setting.

    Raises FaktoryError if the job cannot be made; the attempt is recorded as a run.
    """

    def verb(_: BaseDatabaseWrapper) -> tuple[CronRun, CronJob | None]:
        entry = CronEntry.objects.using(using).get(pk=pk)
        cron_run, job = _enqueue_run(entry, None, enqueue, using)
        cron_run.save(using=using)
        return cron_run, job

    cron_run, job = run(using, verb)
    if job is None:
        raise FaktoryError(cron_run.note)
    return job


def _take_runs(connection: BaseDatabaseWrapper, pk: int, enqueue: Enqueue, now: datetime | None) -> set[str]:
    using = connection.alias
    clock = clock_of(connection, now)
    rows = CronEntry.objects.using(using).filter(pk=pk)
    entry = rows.filter(next_at__lte=clock).select_for_update(skip_locked=True).first()
    if entry is None or entry.next_at is None:
        return set()
    try:
        schedule = Schedule.of(entry.schedule, entry.zone)
    except InvalidCron as error:  # the zone data changed, or the row was edited manually
        entry.problem = str(error)
        log_problem(entry)
        rows.update(next_at=None, problem=entry.problem)
        return set()
    plan = due(schedule, entry.next_at, clock, missed=entry.missed, window_s=entry.window_s)
    if not rows.filter(next_at=entry.next_at).update(next_at=plan.next_at):
        return set()  # on databases without row locks, this UPDATE is the claim
    # Ticks that are stored already: a second row would violate the unique constraint and undo everything (ADR 0014).
    taken_ticks = set(
        CronRun.objects.using(using).filter(entry=entry, tick__gte=entry.next_at).values_list("tick", flat=True)
    )
    runs, queues = [], set()
    if plan.passed and plan.passed not in taken_ticks:
        note = "missed: no node ran at that time; later missed ticks are not listed"
        runs.append(CronRun(entry=entry, tick=plan.passed, outcome=RunOutcome.MISSED, note=note))
        logger.warning("cron entry missed ticks name=%s first=%s", entry.name, plan.passed.isoformat())
    # The loop also sets it after the first job: of several missed ticks with overlap "skip", one enqueues a job.
    is_busy = entry.overlap == Overlap.SKIP and _is_busy(entry, using)
    for tick in plan.ticks:
        if tick in taken_ticks:
            continue
        if is_busy:
            runs.append(CronRun(entry=entry, tick=tick, outcome=RunOutcome.OVERLAPPED))
            continue
        cron_run, job = _enqueue_run(entry, tick, enqueue, using)
        runs.append(cron_run)
        if job:
            queues.add(job.queue)
            is_busy = entry.overlap == Overlap.SKIP
    CronRun.objects.using(using).bulk_create(runs)
    return queues


def _enqueue_run(
    entry: CronEntry, tick: datetime | None, enqueue: Enqueue, using: str
) -> tuple[CronRun, CronJob | None]:
    """Make the job; return its run, not saved yet, and the job. After an error the run is refused and the job None.

    The error is not raised, so that other entries still run.
    """
    try:
        # A savepoint: a database error in the project's code must not break the transaction that takes the run.
        with transaction.atomic(using=using):
            job = enqueue(entry)
            too_short = Q(result_ttl=None) | Q(result_ttl__lt=KEPT_FOR_S)
            Job.live.using(using).filter(too_short, jid=job.jid).update(result_ttl=KEPT_FOR_S)
    except Exception as error:  # enqueueing runs the project's middleware
        if isinstance(error, BrokerUnavailable) or kind_of(error) in (ErrorKind.OUTAGE, ErrorKind.COLLISION):
            raise  # `run` retries the whole transaction
        logger.exception("cron entry's job could not be enqueued name=%s", entry.name)
        note = in_ascii(f"{type(error).__name__}: {first_line(error)}")[:MAX_NOTE_LENGTH]
        return CronRun(entry=entry, tick=tick, outcome=RunOutcome.REFUSED, note=note), None
    return CronRun(entry=entry, tick=tick, outcome=RunOutcome.ENQUEUED, jid=job.jid), job


def _is_busy(entry: CronEntry, using: str) -> bool:
    """Return whether a job of an earlier run waits, runs or will be retried, also after a retry of a dead job."""
    earlier = CronRun.objects.using(using).filter(entry=entry, outcome__in=[RunOutcome.ENQUEUED, RunOutcome.DEAD])
    jids = list(earlier.order_by("-id").values_list("jid", flat=True)[:CHUNK])
    return Job.live.using(using).filter(jid__in=jids, state__in=[str(state) for state in UNFINISHED]).exists()


def read_outcomes(jids: list[str], *, using: str) -> dict[str, RunOutcome]:
    """Return the outcomes of these jobs by jid; jobs that are not stored are left out."""
    # The last of a jid is its latest run, or the job that has not ended.
    jobs = Job.objects.using(using).filter(jid__in=jids).order_by("pk").values_list("jid", "state")
    return {jid: RunOutcome(state) if state in FINISHED else RunOutcome.ENQUEUED for jid, state in jobs}


def read_latest(ids: Sequence[int], *, using: str) -> dict[int, CronRun]:
    """Return the latest run of each of these entries with its job's present outcome, in three statements."""
    newest = CronRun.objects.using(using).filter(entry=OuterRef("pk")).order_by("-pk").values("pk")[:1]
    known = CronEntry.objects.using(using).filter(pk__in=ids).values_list(Subquery(newest), flat=True)
    runs = list(CronRun.objects.using(using).filter(pk__in=[pk for pk in known if pk is not None]))
    outcome_by_jid = read_outcomes([cron_run.jid for cron_run in runs if cron_run.jid], using=using)
    for cron_run in runs:
        cron_run.outcome = outcome_by_jid.get(cron_run.jid, cron_run.outcome)
    return {cron_run.entry_id: cron_run for cron_run in runs}


def record_run_outcomes(*, using: str, now: datetime | None = None) -> bool:
    """Record how the entries' jobs ended, before their rows are purged.

    Handles all unfinished runs; returns False, since nothing is left for another call.
    """

    def verb(connection: BaseDatabaseWrapper) -> None:
        clock = clock_of(connection, now)
        outcome_by_jid = read_outcomes([cron_run.jid for cron_run in open_runs], using=using)
        for cron_run in open_runs:
            outcome = outcome_by_jid.get(
                cron_run.jid,
                RunOutcome.GONE if cron_run.outcome == RunOutcome.ENQUEUED else RunOutcome(cron_run.outcome),
            )
            if outcome != cron_run.outcome:
                ended_at = None if outcome == RunOutcome.ENQUEUED else clock
                rows.filter(pk=cron_run.pk, outcome=cron_run.outcome).update(outcome=outcome, ended_at=ended_at)

    rows = CronRun.objects.using(using)
    # By primary key and in chunks: runs with a live job stay in the set and would be read again and again.
    last_id = 0
    is_open = Q(outcome__in=[RunOutcome.ENQUEUED, RunOutcome.DEAD])
    while open_runs := read(rows.filter(is_open, pk__gt=last_id).order_by("pk")[:CHUNK]):
        run(using, verb)
        last_id = open_runs[-1].pk
    return False


def forget_old(*, using: str, kept_runs: int = KEPT_RUNS) -> bool:
    """Delete all but the latest `kept_runs` runs of each entry. Return whether more remain to be deleted."""
    runs = CronRun.objects.using(using)
    ids: list[int] = read(CronEntry.objects.using(using).values_list("pk", flat=True))
    has_more = False
    for pk in ids:
        newest = runs.filter(entry=pk).order_by("-pk").values_list("pk", flat=True)[kept_runs - 1 : kept_runs]
        for oldest_kept in read(newest):
            old_runs = runs.filter(entry=pk, pk__lt=oldest_kept).exclude(outcome=RunOutcome.ENQUEUED)
            old_ids = list(old_runs.order_by("pk").values_list("pk", flat=True)[:CHUNK])
            run(using, lambda _, old_ids=old_ids: runs.filter(pk__in=old_ids).delete())  # type: ignore[misc]
            has_more = has_more or len(old_ids) == CHUNK
    return has_more
