"""Fail, interrupt or reclaim running jobs: after a report, an expired reservation or a lost worker. Rules: W17 to W20.

Each function locks the rows of jobs, by id or skipping locked ones; `Ending` does the rest of the transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from ...core.lifecycle import State
from ...core.logs import get_logger
from ...core.payloads import Failure, Interruption, failure_in_ascii, in_ascii
from ...errors import FaktoryError, InvalidPayload, JobNotFound
from ...models import Job, JobQuerySet, WorkerProcess
from .. import alarm_records
from ..chunks import chunks
from ..dialects.base import holds
from ..dialects.values import EndedRun
from ..notifier.base import ANY_QUEUE
from ..store import Store
from ..transactions import read, run, run_each
from . import prefetch, steps
from .endings import Ending

logger = get_logger(__name__)

CHUNK = 200


def fail(store: Store, failures: Sequence[Failure]) -> list[FaktoryError | bool]:
    """Record failed attempts: each job is retried, dead, discarded or deleted (W18).

    Return one item per report: True if it took effect, False if the sender does not hold the job, JobNotFound for an
    unknown jid (W17).
    """

    def fail_part(part: Sequence[Failure]) -> list[FaktoryError | bool]:
        # Inside a caller's transaction the last statement must not carry a COMMIT: only the caller may commit.
        commits = not store.connection.in_atomic_block

        def verb(_: BaseDatabaseWrapper) -> tuple[list[FaktoryError | bool], list[EndedRun]]:
            ending = Ending(store)
            results = ending.report(part)
            ending.write(commits=commits)
            return results, ending.failed

        results, failed = run(store.alias, verb)
        store.record_ended(failed, succeeded=False)
        return results

    def fail_in_ascii(report: Failure, error: InvalidPayload) -> FaktoryError | bool:
        logger.warning("error of a run stored in ASCII jid=%s error=%s", report.jid, error)
        for other in (failure_in_ascii(report), _without_texts(report)):
            with suppress(InvalidPayload):
                return fail_part([other])[0]
        return JobNotFound(report.jid)  # the jid itself is refused, so no job has it

    parts = chunks(failures, CHUNK)
    return [answer for part in parts for answer in run_each(store.alias, fail_part, part, fail_in_ascii)]


def _without_texts(report: Failure) -> Failure:
    return msgspec.structs.replace(
        report,
        errtype="unknown",
        message="the database cannot store the error of this run",
        backtrace=(),
        log=(),
        release="",
    )


def reap(store: Store, *, limit: int = CHUNK, skip_extendable: bool = False) -> int:
    """Fail at most `limit` jobs with an expired reservation, and return their number. Each uses one retry (W19).

    A job that was claimed for a client is released instead, without using a retry, if its delivery is not confirmed.
    With `skip_extendable`, skip jobs that a heartbeat or a confirmation may still extend: for a node that has just
    started, because during an outage no worker and no server could extend a reservation (ADR 0017).
    """
    overdue = overdue_jobs(store).order_by("reserved_until")
    if skip_extendable:
        beating = WorkerProcess.objects.using(store.alias).filter(beat_at__isnull=False)
        overdue = overdue.filter(Q(claim__isnull=True) | Q(claim__gte=0)).exclude(wid__in=beating.values("wid"))
    # In index order: PostgreSQL may answer `exists()` from the table instead of the index (ADR 0029).
    first_pk = overdue.values_list("pk", flat=True)[:1]
    if not read(first_pk):  # the usual case costs one statement and no transaction
        return 0

    def verb(_: BaseDatabaseWrapper) -> int:
        ending = Ending(store)
        # Skip locked rows: the transaction that holds them may be ending the job or extending its reservation.
        rows = list(overdue.select_for_update(skip_locked=True)[:limit])
        unconfirmed = [job for job in rows if prefetch.is_unconfirmed(job)]
        if unconfirmed:
            ending.release(unconfirmed)
            logger.warning(
                "deliveries were not confirmed (a server was killed?), jobs released jobs=%d", len(unconfirmed)
            )
        failed = [job for job in rows if job not in unconfirmed]
        progressed = steps.find_progressed(failed, using=store.alias)
        ending.fail([(job, _expiry_failure(job, has_progressed=job.pk in progressed)) for job in failed])
        ending.write()
        return len(rows)

    return run(store.alias, verb)


def overdue_jobs(store: Store) -> QuerySet[Job]:
    """Return the jobs with an expired reservation."""
    return reserved_jobs(using=store.alias).filter(reserved_until__lt=store.clock() or Now())


def reserved_jobs(*, using: str) -> JobQuerySet:
    """Return the jobs with a reservation. The earliest expiry among them is when `reap` next has work."""
    return Job.live.using(using).in_state(State.WORKING).filter(reserved_until__isnull=False)


def _expiry_failure(job: Job, *, has_progressed: bool) -> Failure:
    return Failure(
        jid=job.jid,
        has_progressed=has_progressed,
        errtype="ReservationExpired",
        message=f"worker {job.wid or 'without a wid'} did not finish within {job.reserve_for} seconds",
    )


def interrupt(store: Store, interruptions: Sequence[Interruption]) -> list[FaktoryError | bool]:
    """Move started jobs of a stopping worker back to their old places; count no attempt, error or loss (ADR 0025).

    Return one item per report: True if it took effect, False if the sender no longer holds the job because it ended or
    another worker has it. A job that was interrupted `store.max_interruptions` times before
    fails instead.
    """

    def interrupt_part(part: Sequence[Interruption]) -> list[FaktoryError | bool]:
        chunk = {report.jid: report for report in part}

        def verb(_: BaseDatabaseWrapper) -> tuple[set[str], list[EndedRun]]:
            ending = Ending(store)
            rows = store.jobs.filter(state=State.WORKING, jid__in=chunk).order_by("id")
            held_jobs = [job for job in rows.select_for_update() if _is_sender(chunk[job.jid], job)]
            ending.interrupt(held_jobs, limit=store.max_interruptions, reports=chunk)
            ending.write()
            return {job.jid for job in held_jobs}, ending.failed

        returned, failed = run(store.alias, verb)
        store.record_ended(failed, succeeded=False)
        return [report.jid in returned for report in part]

    def interrupt_in_ascii(report: Interruption, _: InvalidPayload) -> FaktoryError | bool:
        texts = {name: in_ascii(getattr(report, name)) for name in ("errtype", "message", "summary")}
        return interrupt_part([msgspec.structs.replace(report, **texts)])[0]

    parts = chunks(interruptions, CHUNK)
    answers = [answer for part in parts for answer in run_each(store.alias, interrupt_part, part, interrupt_in_ascii)]
    if any(answer is True for answer in answers):
        store.announce({report.queue for report in interruptions})
    return answers


def interrupt_workers(store: Store, wids: Sequence[str]) -> int:
    """Interrupt all jobs that these workers still hold, and return their number. Call it inside a transaction."""
    ending = Ending(store)
    # Waits for locked rows: the caller deletes the workers, so no later call would find a job skipped here.
    working = store.jobs.filter(state=State.WORKING, wid__in=wids).order_by("id")
    held_jobs = list(working.select_for_update())
    ending.interrupt(held_jobs)
    ending.write()
    return len(held_jobs)


def reclaim_lost(store: Store, wids: Sequence[str], *, reason: str = "") -> int:
    """Reclaim the jobs of lost workers, unregister the workers, and return the number of jobs (W20).

    Called for workers without a BEAT (`runtime.maintenance`) and for processes that the supervisor saw end
    (`runtime.supervisor.lost_workers`). The jobs return to their old places without using a retry; the third loss makes
    a job dead (`core.lifecycle.outcome_of_loss`), and its next run is alone in its process (`worker.suspects`).
    `reason` is how the workers died. The workers' rows are deleted last: after a crash the next call still finds them
    and continues. A worker keeps its row while another transaction has one of its jobs locked, or if it has claimed
    jobs meanwhile; the next call reclaims these jobs unless the worker has sent a BEAT.
    """
    working = store.jobs.filter(state=State.WORKING, wid__in=wids)
    # Read once: a process that was suspended may resume now and claim the same jobs again, which are not lost then.
    held = read(working.order_by("id").only(*_LOST_COLUMNS))

    def verb(_: BaseDatabaseWrapper, held: Sequence[Job]) -> int:
        attempts = {job.pk: job.attempt for job in held}
        ending = Ending(store)
        rows = working.filter(pk__in=attempts).order_by("id").select_for_update(skip_locked=True)
        locked = [job for job in rows if job.attempt == attempts[job.pk]]
        ending.lose(locked, reason=reason)
        ending.write()
        return len(locked)

    # At most `CHUNK` jobs per transaction: a worker may hold many, and their rows stay locked until the commit.
    reclaimed = sum(run(store.alias, partial(verb, held=chunk)) for chunk in chunks(held, CHUNK))
    # Two statements: a DELETE with a subquery would lock the job rows that it reads on MariaDB.
    idle_wids = set(wids) - run(store.alias, lambda _: set(working.values_list("wid", flat=True)), atomic=False)
    lost = WorkerProcess.objects.using(store.alias).filter(wid__in=idle_wids)
    alarm_records.record_lost(read(lost), held, using=store.alias)
    run(store.alias, lambda _: lost.delete(), atomic=False, writes=True)
    if reclaimed:
        store.announce({ANY_QUEUE})
    return reclaimed


_LOST_COLUMNS = ("pk", "attempt", "wid", "jid", "jobtype", "queue")


def _is_sender(report: Interruption, job: Job) -> bool:
    return holds(report.wid, report.attempt, job.wid, job.attempt)
