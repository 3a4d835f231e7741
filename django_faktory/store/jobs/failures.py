"""Fail, interrupt or reclaim running jobs: after a report, an expired reservation or a lost worker. Rules: W17 to W20.

`_FailureTransaction` does the work of one transaction. All entry points share its order: lock the job rows, by id or
skipping locked ones, change them, then `write_changes` batches, locks, limiters and counters once (order: ADR 0024).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from random import Random

import msgspec
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from ...core.json import jsontext
from ...core.lifecycle import (
    DEAD_FOR_S,
    GONE,
    MAX_LOSSES,
    WORKER_LOST,
    FailureOutcome,
    State,
    outcome_of_failure,
    outcome_of_loss,
)
from ...core.logs import get_logger
from ...core.payloads import (
    LATER,
    Failure,
    Interruption,
    failure_in_ascii,
    in_ascii,
    interruption_failure,
    is_storable,
    limit_backtrace,
    rfc3339,
)
from ...errors import FaktoryError, InvalidPayload, JobNotFound, UnknownJobType
from ...models import Job, JobQuerySet, WorkerProcess
from .. import alarm_records
from ..batches import counters
from ..chunks import chunks
from ..deletion import delete_locked
from ..dialects import clock_of, dialect_of
from ..dialects.base import EndedRun, FailureColumns, Tally, holds
from ..limits import limiters
from ..locks import locks
from ..transactions import run, run_each
from . import history, prefetch
from .acknowledgements import OnFinished, ignore_finished
from .releases import ENQUEUED

logger = get_logger(__name__)

CHUNK = 200

_default_rng = Random()
_NO_REPORTS: Mapping[str, Interruption] = {}
_BY_SHUTDOWN = Interruption(jid="", wid="", attempt=0, queue="", message="")
"""Report that is recorded if a worker unregisters without one for its job."""


def fail(
    failures: Sequence[Failure], *, using: str, now: datetime | None = None, dead_for_s: int = DEAD_FOR_S,
    rng: Random = _default_rng, on_failed: OnFinished = ignore_finished,
) -> list[FaktoryError | bool]:  # fmt: skip
    """Record failed attempts: each job is retried, dead, discarded or deleted (W18).

    Return one item per report: True if it took effect, False if the sender does not hold the job, JobNotFound for an
    unknown jid (W17).
    """

    def fail_part(part: Sequence[Failure]) -> list[FaktoryError | bool]:
        # Inside a caller's transaction the last statement must not carry a COMMIT: only the caller may commit.
        transaction = _FailureTransaction(using, now, dead_for_s, rng, commits=not connections[using].in_atomic_block)
        results = run(using, transaction.build_verb(part))
        on_failed(transaction.failed)
        return results

    def fail_in_ascii(report: Failure, error: InvalidPayload) -> FaktoryError | bool:
        logger.warning("error of a run stored in ASCII jid=%s error=%s", report.jid, error)
        for other in (failure_in_ascii(report), _without_texts(report)):
            with suppress(InvalidPayload):
                return fail_part([other])[0]
        return JobNotFound(report.jid)  # the jid itself is refused, so no job has it

    parts = chunks(failures, CHUNK)
    return [answer for part in parts for answer in run_each(using, fail_part, part, fail_in_ascii)]


def _without_texts(report: Failure) -> Failure:
    return msgspec.structs.replace(
        report,
        errtype="unknown",
        message="the database cannot store the error of this run",
        backtrace=(),
        log=(),
        release="",
    )


def reap(
    *, using: str, now: datetime | None = None, limit: int = CHUNK, dead_for_s: int = DEAD_FOR_S,
    rng: Random = _default_rng, skip_extendable: bool = False,
) -> int:  # fmt: skip
    """Fail at most `limit` jobs with an expired reservation, and return their number. Each uses one retry (W19).

    A job that was claimed for a client is released instead, without using a retry, if its delivery is not confirmed.
    With `skip_extendable`, skip jobs that a heartbeat or a confirmation may still extend: for a node that has just
    started, because during an outage no worker and no server could extend a reservation (ADR 0017).
    """
    overdue = overdue_jobs(using=using, now=now).order_by("reserved_until")
    if skip_extendable:
        beating = WorkerProcess.objects.using(using).filter(beat_at__isnull=False)
        overdue = overdue.filter(Q(claim__isnull=True) | Q(claim__gte=0)).exclude(wid__in=beating.values("wid"))
    # In index order: PostgreSQL may answer `exists()` from the table instead of the index (ADR 0029).
    first_pk = overdue.values_list("pk", flat=True)[:1]
    if not run(using, lambda _: list(first_pk), atomic=False):  # the usual case costs one statement and no transaction
        return 0

    def verb(connection: BaseDatabaseWrapper) -> int:
        transaction = _FailureTransaction(using, now, dead_for_s, rng)
        # Skip locked rows: the transaction that holds them may be ending the job or extending its reservation.
        rows = list(overdue.select_for_update(skip_locked=True)[:limit])
        unconfirmed = [job for job in rows if prefetch.is_unconfirmed(job)]
        if unconfirmed:
            transaction.release_rows(connection, unconfirmed)
            logger.warning(
                "deliveries were not confirmed (a server was killed?), jobs released jobs=%d", len(unconfirmed)
            )
        transaction.fail_rows(connection, [(job, _expiry_failure(job)) for job in rows if job not in unconfirmed])
        transaction.write_changes(connection)
        return len(rows)

    return run(using, verb)


def overdue_jobs(*, using: str, now: datetime | None = None) -> QuerySet[Job]:
    """Return the jobs with an expired reservation."""
    return reserved_jobs(using=using).filter(reserved_until__lt=now or Now())


def reserved_jobs(*, using: str) -> JobQuerySet:
    """Return the jobs with a reservation. The earliest expiry among them is when `reap` next has work."""
    return Job.objects.using(using).in_state(State.WORKING).filter(reserved_until__isnull=False)


def _expiry_failure(job: Job) -> Failure:
    return Failure(
        jid=job.jid,
        errtype="ReservationExpired",
        message=f"worker {job.wid or 'without a wid'} did not finish within {job.reserve_for} seconds",
    )


def _cancellation_failure(job: Job) -> Failure:
    return Failure(
        jid=job.jid, errtype="Cancelled", message=f"cancelled, and its worker {job.wid} was lost while it ran"
    )


def interrupt(
    interruptions: Sequence[Interruption], *, using: str, now: datetime | None = None, dead_for_s: int = DEAD_FOR_S,
    limit: int | None = None, rng: Random = _default_rng, on_failed: OnFinished = ignore_finished,
) -> list[FaktoryError | bool]:  # fmt: skip
    """Move started jobs of a stopping worker back to their old places; count no attempt, error or loss (ADR 0025).

    Return one item per report: True if it took effect, False if the sender no longer holds the job because it ended or
    another worker has it. A job that was interrupted `limit` times before fails instead.
    """

    def interrupt_part(part: Sequence[Interruption]) -> list[FaktoryError | bool]:
        chunk = {report.jid: report for report in part}

        def verb(connection: BaseDatabaseWrapper) -> tuple[set[str], list[EndedRun]]:
            transaction = _FailureTransaction(using, now, dead_for_s, rng)
            rows = Job.objects.using(using).filter(state=State.WORKING, jid__in=chunk).order_by("id")
            held_jobs = [job for job in rows.select_for_update() if _is_sender(chunk[job.jid], job)]
            transaction.interrupt_rows(connection, held_jobs, limit=limit, reports=chunk)
            return {job.jid for job in held_jobs}, transaction.failed

        returned, failed = run(using, verb)
        on_failed(failed)
        return [report.jid in returned for report in part]

    def interrupt_in_ascii(report: Interruption, _: InvalidPayload) -> FaktoryError | bool:
        texts = {name: in_ascii(getattr(report, name)) for name in ("errtype", "message", "summary")}
        return interrupt_part([msgspec.structs.replace(report, **texts)])[0]

    parts = chunks(interruptions, CHUNK)
    return [answer for part in parts for answer in run_each(using, interrupt_part, part, interrupt_in_ascii)]


def interrupt_workers(connection: BaseDatabaseWrapper, wids: Sequence[str], *, using: str) -> int:
    """Interrupt all jobs that these workers still hold, and return their number. Call it inside a transaction."""
    transaction = _FailureTransaction(using, None, DEAD_FOR_S, _default_rng)
    # Waits for locked rows: the caller deletes the workers, so no later call would find a job skipped here.
    working = Job.objects.using(using).filter(state=State.WORKING, wid__in=wids).order_by("id")
    held_jobs = list(working.select_for_update())
    transaction.interrupt_rows(connection, held_jobs)
    return len(held_jobs)


def reclaim_lost(
    wids: Sequence[str],
    *,
    using: str,
    now: datetime | None = None,
    dead_for_s: int = DEAD_FOR_S,
    reason: str = "",
) -> int:
    """Reclaim the jobs of lost workers, unregister the workers, and return the number of jobs (W20).

    The jobs return to their old places without using a retry; the third loss makes a job dead. `reason` is how the
    workers died. The workers' rows are deleted last: after a crash the next call still finds them and continues. A
    worker keeps its row while another transaction has one of its jobs locked, or if it has claimed jobs meanwhile; the
    next call reclaims these jobs unless the worker has sent a BEAT.
    """
    working = Job.objects.using(using).filter(state=State.WORKING, wid__in=wids)
    # Read once: a process that was suspended may resume now and claim the same jobs again, which are not lost then.
    held = run(using, lambda _: list(working.order_by("id").only(*_LOST_COLUMNS)), atomic=False)

    def verb(connection: BaseDatabaseWrapper, held: Sequence[Job]) -> int:
        attempts = {job.pk: job.attempt for job in held}
        transaction = _FailureTransaction(using, now, dead_for_s, _default_rng)
        rows = working.filter(pk__in=attempts).order_by("id").select_for_update(skip_locked=True)
        locked = [job for job in rows if job.attempt == attempts[job.pk]]
        return transaction.lose_rows(connection, locked, reason=reason)

    # At most `CHUNK` jobs per transaction: a worker may hold many, and their rows stay locked until the commit.
    reclaimed = sum(run(using, partial(verb, held=chunk)) for chunk in chunks(held, CHUNK))
    # Two statements: a DELETE with a subquery would lock the job rows that it reads on MariaDB.
    idle_wids = set(wids) - run(using, lambda _: set(working.values_list("wid", flat=True)), atomic=False)
    lost = WorkerProcess.objects.using(using).filter(wid__in=idle_wids)
    alarm_records.record_lost(run(using, lambda _: list(lost), atomic=False), held, using=using)
    run(using, lambda _: lost.delete(), atomic=False, writes=True)
    return reclaimed


_LOST_COLUMNS = ("pk", "attempt", "wid", "jid", "jobtype", "queue")
_RESCHEDULED_FIELDS = ("state", "wid", "run_at", "started_at", "reserved_until", "lock_token", "permits", "errtype")


class _FailureTransaction:
    """The work of one transaction: changes job rows and collects what `write_changes` has to write after them."""

    def __init__(
        self, using: str, now: datetime | None, dead_for_s: int, rng: Random, *, commits: bool = False
    ) -> None:
        self.using, self.now, self.dead_for_s, self.rng = using, now, dead_for_s, rng
        self._commits = commits
        """Whether the last statement may carry the COMMIT: False inside a caller's transaction."""
        self.failed: list[EndedRun] = []
        """The jobs that the latest transaction failed."""
        self._clear()

    def _clear(self) -> None:
        self._lock_holders: list[Job] = []
        self._permits: list[str | None] = []
        self._changes: list[counters.Change] = []
        self._tally = Tally()

    def build_verb(self, failures: Sequence[Failure]) -> Callable[[BaseDatabaseWrapper], list[FaktoryError | bool]]:
        """Return the function that applies reports in a transaction. Each is fenced by wid and attempt (W17)."""

        def verb(connection: BaseDatabaseWrapper) -> list[FaktoryError | bool]:
            self._clear()  # `run` calls this again after a collision: drop what the rolled-back attempt collected
            rows, clock = self._lock_reported(
                connection, {failure.jid for failure in failures if is_storable(failure.jid)}
            )
            reported_jids: set[str] = set()
            results: list[FaktoryError | bool] = []
            failed: list[tuple[Job, Failure]] = []
            rescheduled: list[tuple[Job, Failure]] = []
            for failure in failures:
                job = rows.get(failure.jid)
                has_effect = job is not None and failure.jid not in reported_jids and _is_holder(failure, job)
                if job and has_effect:
                    # The worker did not begin the job: it lacks the code, or the job has to run alone (ADR 0027).
                    is_rescheduled = failure.verdict == LATER and not job.is_cancelled
                    (rescheduled if is_rescheduled else failed).append((job, failure))
                    reported_jids.add(failure.jid)  # a second report on the same job must have no effect
                results.append(has_effect if job else JobNotFound(failure.jid))
            late = sum(result is False for result in results)
            self._reschedule(connection, rescheduled, clock)
            self.fail_rows(connection, failed, late=late, clock=clock)
            self.write_changes(connection, clock)
            return results

        return verb

    def _lock_reported(
        self, connection: BaseDatabaseWrapper, jids: Collection[str]
    ) -> tuple[dict[str, Job], datetime | None]:
        """Lock these jobs; return them by jid, and the time after the lock, or None if unknown.

        The time is read after the wait for the locks, which may be long.
        """
        # On PostgreSQL one message reads the rows, locks them and reads the time (ADR 0010). None: use the ORM.
        reply = dialect_of(connection).lock_failed(connection, jids, self.now)
        if reply is not None:
            rows = [Job.from_db(self.using, reply.columns, row) for row in reply.rows]
            return {job.jid: job for job in rows}, reply.now
        jobs = Job.objects.using(self.using).filter(jid__in=jids).order_by("id").select_for_update()
        return {job.jid: job for job in jobs}, self.now

    def _reschedule(
        self, connection: BaseDatabaseWrapper, jobs: Sequence[tuple[Job, Failure]], clock: datetime | None
    ) -> None:
        """Schedule locked rows for later, for jobs that were not started: counts nothing and uses no retry."""
        if not jobs:
            return
        now = clock or clock_of(connection, self.now)
        self._collect_holds(job for job, _ in jobs)
        for job, failure in jobs:
            job.state, job.wid = State.SCHEDULED, ""
            job.run_at = now + timedelta(seconds=failure.retry_in_s or 0.0)
            job.started_at = job.reserved_until = job.lock_token = job.permits = None
            if failure.errtype == UnknownJobType.__name__:
                job.errtype = failure.errtype  # the alarm about unknown tasks finds the job by it
            Job.objects.using(self.using).filter(pk=job.pk).update(
                **{name: getattr(job, name) for name in _RESCHEDULED_FIELDS}, enqueued_at=None
            )

    def _collect_holds(self, jobs: Iterable[Job]) -> list[Job]:
        """Record locks and permits of these rows, for `write_changes`; return copies of the lock holders."""
        # Copies: the callers clear these fields on the originals, and `locks.release` needs the old values.
        holders = [copy.copy(job) for job in jobs]
        self._permits += [job.permits for job in holders if job.permits is not None]
        lock_holders = [job for job in holders if job.lock_token is not None]
        self._lock_holders += lock_holders
        return lock_holders

    def release_rows(self, connection: BaseDatabaseWrapper, jobs: Sequence[Job]) -> None:
        """Enqueue locked rows again, of jobs without a confirmed delivery."""
        if jobs:
            self._collect_holds(jobs)
            Job.objects.using(connection.alias).filter(pk__in=[job.pk for job in jobs]).update(**ENQUEUED)

    def write_changes(self, connection: BaseDatabaseWrapper, clock: datetime | None = None) -> None:
        """Update batches, locks, limiters and counters for the changed rows, in the lock order of ADR 0024.

        Call it once per transaction, after all changes: a second call would lock rows against that order.
        """
        if self._changes:
            counters.record_changes(connection, self._changes, clock or clock_of(connection, self.now))
        locks.release(connection, self._lock_holders)
        limiters.release(connection, self._permits)
        if self._tally != Tally():
            dialect_of(connection).save(connection, [], clock or clock_of(connection, self.now), self._tally)
        self._clear()

    def fail_rows(
        self,
        connection: BaseDatabaseWrapper,
        failed: Sequence[tuple[Job, Failure]],
        *,
        late: int = 0,
        clock: datetime | None = None,
    ) -> None:
        """Fail locked rows. `clock` is the current time; None reads the database's clock."""
        self.failed = []
        # Late reports change no row but are counted (`total_late`).
        if not failed and not late:
            return
        now = clock or clock_of(connection, self.now)
        self.failed = [counters.build_ended_run(job, now) for job, _ in failed]
        self._collect_holds(job for job, _ in failed)
        deleted: list[Job] = []
        kept: list[Job] = []
        for job, failure in failed:
            (deleted if self._apply_failure(job, failure, now) is GONE else kept).append(job)
        dialect, tally = dialect_of(connection), Tally(processed=len(failed), failed=len(failed), late=late)
        # Plain retries need no further statement, so UPDATE, counter and COMMIT can be one message.
        needs_more = deleted or self._lock_holders or self._permits or any(job.bid or job.callback_of for job in kept)
        if self._commits and not needs_more:
            dialect.save(connection, _columns_to_save(kept), now, tally, is_last=True)
            return
        if deleted:
            ids = [job.pk for job in deleted]
            delete_locked(Job.objects.using(self.using).filter(pk__in=ids), ids)
        dialect.save(connection, _columns_to_save(kept), now, Tally())
        changes = [*((job, GONE) for job in deleted), *((job, State(job.state)) for job in kept)]
        self._changes += [counters.Change(job, to) for job, to in changes]
        self._tally += tally

    def lose_rows(self, connection: BaseDatabaseWrapper, jobs: Sequence[Job], *, reason: str = "") -> int:
        """Take locked rows from their lost workers, and return their number. Cancelled jobs are discarded."""
        if not jobs:
            return 0
        cancelled = [job for job in jobs if job.is_cancelled]
        lost = [job for job in jobs if not job.is_cancelled]
        self.fail_rows(connection, [(job, _cancellation_failure(job)) for job in cancelled])
        now = clock_of(connection, self.now)
        lock_holders = self._collect_holds(lost)
        for job in lost:
            self._apply_loss(job, now, reason)
        dialect_of(connection).save(connection, _columns_to_save(lost), now, Tally())
        dead = sum(job.state == State.DEAD for job in lost)
        self._changes += [counters.Change(job, State(job.state)) for job in lost]
        # A loss counts as a run only if it is the last: a job that returns to its queue has not been processed.
        self._tally += Tally(processed=dead, failed=dead)
        self.write_changes(connection, now)
        # If a job's lock had expired before, another job may hold it by now: then this one has to wait.
        locks.block_if_locked(connection, [job.pk for job in lock_holders])
        return len(jobs)

    def interrupt_rows(
        self,
        connection: BaseDatabaseWrapper,
        jobs: Sequence[Job],
        *,
        limit: int | None = None,
        reports: Mapping[str, Interruption] = _NO_REPORTS,
    ) -> None:
        """Enqueue locked rows again with their old `enqueued_at`, and release their locks and permits.

        A cancelled job is discarded instead, because its worker was about to end it.
        """
        if not jobs:
            return
        failed = [(job, _cancellation_failure(job)) for job in jobs if job.is_cancelled]
        returned = [job for job in jobs if not job.is_cancelled]
        if limit is not None:
            failed += [(job, interruption_failure(reports[job.jid])) for job in returned if job.interruptions >= limit]
            returned = [job for job in returned if job.interruptions < limit]
        self.fail_rows(connection, failed)
        now = clock_of(connection, self.now)
        lock_holders = self._collect_holds(returned)
        for job in returned:
            # Clear the expiry: the job was started in time. Leave the unique key as it is: a job that is unique until
            # its start released the key when it started, and another job may hold it by now.
            Job.objects.using(self.using).filter(pk=job.pk).update(
                state=State.ENQUEUED,
                wid="",
                started_at=None,
                reserved_until=None,
                expires_at=None,
                lock_token=None,
                permits=None,
                interruptions=job.interruptions + 1,
                history=history.append_interruption(job, reports.get(job.jid, _BY_SHUTDOWN), now),
            )
        self.write_changes(connection, now)
        # As in `lose_rows`: a lock that had expired may belong to another job by now.
        locks.block_if_locked(connection, [job.pk for job in lock_holders])

    def _apply_failure(self, job: Job, failure: Failure, now: datetime) -> State | None:
        keep = job.result_ttl is not None
        outcome = outcome_of_failure(
            retry=job.retry,
            failures=job.failures,
            keep=keep,
            verdict="discard" if job.is_cancelled else failure.verdict,
            delay_s=failure.retry_in_s,
            rng=self.rng,
        )
        if outcome.state is GONE:
            return GONE
        self._record_failure(job, failure, outcome, now)
        job.failures += 1
        self._apply_outcome(job, outcome, now)
        return outcome.state

    def _apply_loss(self, job: Job, now: datetime, reason: str) -> None:
        job.losses += 1
        state = outcome_of_loss(job.losses)
        cause = f": {reason}" if reason else ""
        message = f"worker {job.wid} was lost while it ran this job ({job.losses} of {MAX_LOSSES}){cause}"
        failure = Failure(jid=job.jid, errtype=WORKER_LOST, message=message)
        if state is State.DEAD:
            self._record_failure(job, failure, FailureOutcome(state), now)
            self._apply_outcome(job, FailureOutcome(state), now)
        else:
            job.history = history.append_attempt(job, failure, (), now)
            job.state, job.wid, job.started_at, job.reserved_until = state, "", None, None
            job.lock_token = job.permits = None

    def _record_failure(self, job: Job, failure: Failure, outcome: FailureOutcome, now: datetime) -> None:
        """Store the failure in the form that FETCH and results return, and append it to the history."""
        lines = limit_backtrace(failure.backtrace, job.backtrace)
        earlier = jsontext.decode(job.failure) if job.failure else {}
        # `failed_at` is the time of the first failure, as in Faktory.
        record = {
            "retry_count": job.failures,
            "remaining": max(job.retry - job.failures, 0) if job.retry >= 0 else job.retry,
            "failed_at": earlier.get("failed_at") or rfc3339(now),
        }
        if outcome.retry_in_s is not None:
            record["next_at"] = rfc3339(now + timedelta(seconds=outcome.retry_in_s))
        record |= {"message": failure.message, "errtype": failure.errtype}
        if lines:  # Faktory omits an empty backtrace
            record["backtrace"] = lines
        job.failure = jsontext.encode(record)
        # PostgreSQL cannot store NUL in text; `failure` and `history` are JSON, which escapes it.
        job.failed_at = now
        job.errtype = failure.errtype.replace("\x00", "\ufffd")
        job.history = history.append_attempt(job, failure, lines, now)

    def _apply_outcome(self, job: Job, outcome: FailureOutcome, now: datetime) -> None:
        job.state = str(outcome.state)
        job.reserved_until = job.lock_token = job.permits = None
        if outcome.state is State.RETRIES:
            job.run_at = now + timedelta(seconds=outcome.retry_in_s or 0)
            return
        if outcome.state is not State.DEAD:
            job.unique_key = None  # a dead job keeps its key until the key expires (W27)
        job.finished_at = now
        # Dead jobs are kept longer than other finished rows, because people may requeue them.
        keep_s = self.dead_for_s if outcome.state is State.DEAD else job.result_ttl or 0
        job.purge_at = now + timedelta(seconds=keep_s)


def _columns_to_save(jobs: Sequence[Job]) -> list[FailureColumns]:
    """Return the columns to write for these rows."""
    _, _, *others = FailureColumns._fields
    return [FailureColumns(job.pk, str(job.state), *(getattr(job, name) for name in others)) for job in jobs]


def _is_sender(report: Interruption, job: Job) -> bool:
    return holds(report.wid, report.attempt, job.wid, job.attempt)


def _is_holder(failure: Failure, job: Job) -> bool:
    return job.state == State.WORKING and holds(failure.wid, failure.attempt, job.wid, job.attempt)
