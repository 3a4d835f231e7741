"""End runs in one transaction: lock the rows, decide by `core.lifecycle`, then `write` all that follows once.

Failures, losses, interruptions, releases, and every success on SQLite and MariaDB. On PostgreSQL `faktory_end_1` and
`faktory_hand_off_1` end jobs that succeed; only members of batches come here. The order of the writes is that of locks
(ADR 0024): job rows, batches, lock rows, limiters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from ...core.json import jsontext
from ...core.lifecycle import (
    ENDED,
    GONE,
    MAX_LOSSES,
    WORKER_LOST,
    FailureOutcome,
    State,
    outcome_of_failure,
    outcome_of_loss,
)
from ...core.payloads import (
    LATER,
    Ack,
    Failure,
    Interruption,
    interruption_failure,
    is_storable,
    limit_backtrace,
    rfc3339,
)
from ...core.steps import FOREVER, Parking
from ...errors import FaktoryError, JobNotFound, UnknownJobType
from ...models import Job, JobQuerySet
from ..batches import progress
from ..dialects import clock_of
from ..dialects.base import holds, seconds_since
from ..dialects.values import Ended, EndedRun, FailureColumns, RunningJob, Tally
from ..limits import limiters
from ..locks import locks
from ..store import Store
from ..transactions import after_commit
from . import history, steps, waits

_NO_REPORTS: Mapping[str, Interruption] = {}
_BY_SHUTDOWN = Interruption(jid="", wid="", attempt=0, queue="", message="")
"""Report that is recorded if a worker unregisters without one for its job."""

RETURNED: dict[str, Any] = {
    "state": State.ENQUEUED,
    "is_returned": True,
    "wid": "",
    "started_at": None,
    "reserved_until": None,
    "lock_token": None,
    "permits": None,
}
"""Column values of a job that returns to its queue. `enqueued_at` is not among them: it decides the place."""

_FAILURE_COLUMNS = ("wid", "failures", "losses", "errtype", "failure", "history", "purge_at", "failed_at")
"""Columns that a failure changes in a job that ends by it."""

_WAITING = (State.ENQUEUED, State.SCHEDULED)


class Ending:
    """The ends of one transaction: changes locked rows, and collects what `write` has to write after them.

    Create it inside the transaction, and call `write` once, after all changes: a second call would lock rows against
    the order of locks.
    """

    def __init__(self, store: Store) -> None:
        self.failed: list[EndedRun] = []
        """The runs that failed."""
        self._store, self._connection, self._dialect = store, store.connection, store.dialect
        self._cursor = self._connection.cursor()  # one for all statements: each further one takes 10 µs on SQLite
        self._now = store.clock()
        self._deleted: list[int] = []
        self._changed: list[Job] = []
        self._ended: list[Job] = []
        self._holders: list[Job | RunningJob] = []
        self._returned_holders: list[int] = []
        self._changes: list[progress.Change] = []
        self._tally = Tally()

    @cached_property
    def clock(self) -> datetime:
        """The time after the wait for the row locks, which may be long."""
        return clock_of(self._connection, self._now)

    def succeed(self, acks: Sequence[Ack], *, pushed: Collection[str] = (), counted: int = 0) -> Ended:
        """End the jobs whose holders sent these acks; the other acks are late, but for `counted` ones.

        The rows with the jids in `pushed`, which the same transaction is about to insert, are locked too.
        """
        cursor = self._cursor
        running = {job.jid: job for job in self._dialect.lock_running(cursor, {ack.jid for ack in acks}, pushed)}
        clock = self._now = self._now or self._dialect.now(cursor)
        # The first ack of the holder counts; a second one for the same jid is late.
        ended: dict[str, tuple[RunningJob, Ack]] = {}
        for ack in acks:
            job = running.get(ack.jid)
            if job and ack.jid not in ended and holds(ack.wid, ack.attempt, job.wid, job.attempt):
                ended[ack.jid] = job, ack
        if deleted := [job.id for job, _ in ended.values() if job.result_ttl is None]:
            self._dialect.delete(cursor, deleted)
        kept = [(job.id, ack, job.result_ttl) for job, ack in ended.values() if job.result_ttl is not None]
        self._dialect.mark_succeeded(cursor, kept, clock)
        self._record([job for job, _ in ended.values()], succeeded=True)
        self._tally += Tally(processed=len(ended), late=len(acks) - counted - len(ended))
        return {jid: _ended_run(job, clock) for jid, (job, _) in ended.items()}

    def report(self, failures: Sequence[Failure]) -> list[FaktoryError | bool]:
        """Apply reports of failed runs. Each is fenced by wid and attempt (W17)."""
        rows = self._lock_reported({failure.jid for failure in failures if is_storable(failure.jid)})
        reported_jids: set[str] = set()
        results: list[FaktoryError | bool] = []
        failed: list[tuple[Job, Failure]] = []
        for failure in failures:
            job = rows.get(failure.jid)
            has_effect = job is not None and failure.jid not in reported_jids and _is_holder(failure, job)
            if job and has_effect:
                reported_jids.add(failure.jid)  # a second report on the same job must have no effect
                # The worker did not begin the job: it lacks the code, or the job has to run alone (ADR 0038).
                if failure.verdict == LATER and not job.is_cancelled:
                    self._reschedule(job, failure)
                else:
                    failed.append((job, failure))
            results.append(has_effect if job else JobNotFound(failure.jid))
        self.fail(failed)
        # Late reports change no row but are counted (`total_late`).
        self._tally += Tally(late=sum(result is False for result in results))
        return results

    def _lock_reported(self, jids: Collection[str]) -> dict[str, Job]:
        # On PostgreSQL one message reads the rows, locks them and reads the time (ADR 0043). None: use the ORM.
        reply = self._dialect.lock_failed(self._connection, jids, self._now)
        if reply is not None:
            self._now = reply.now
            rows = [Job.from_db(self._connection.alias, reply.columns, row) for row in reply.rows]
            return {job.jid: job for job in rows}
        return {job.jid: job for job in self._store.jobs.filter(jid__in=jids).order_by("id").select_for_update()}

    def fail(self, failed: Sequence[tuple[Job, Failure]]) -> None:
        """Fail locked rows: each job is retried, dead, discarded or deleted (W18)."""
        for job, failure in failed:
            self.failed.append(_ended_run(job, self.clock))
            if failure.has_progressed:
                _count_anew(job)
            outcome = outcome_of_failure(
                retry=job.retry,
                failures=job.failures,
                keep=job.result_ttl is not None,
                verdict="discard" if job.is_cancelled else failure.verdict,
                delay_s=failure.retry_in_s,
                rng=self._store.rng,
            )
            if outcome.state is GONE:
                self._deleted.append(job.pk)
            else:
                self._record_failure(job, failure, outcome)
                job.failures += 1
                self._apply_outcome(job, outcome)
            self._record([job], outcome.state)
        self._tally += Tally(processed=len(failed), failed=len(failed))

    def lose(self, jobs: Sequence[Job], *, reason: str = "") -> None:
        """Take locked rows from their lost workers. Cancelled jobs are discarded."""
        self.fail([(job, _cancellation_failure(job)) for job in jobs if job.is_cancelled])
        progressed = steps.find_progressed(jobs, using=self._store.alias)
        for job in jobs:
            if job.is_cancelled:
                continue
            if job.pk in progressed:
                _count_anew(job)
            job.losses += 1
            state = outcome_of_loss(job.losses)
            cause = f": {reason}" if reason else ""
            message = f"worker {job.wid} was lost while it ran this job ({job.losses} of {MAX_LOSSES}){cause}"
            failure = Failure(jid=job.jid, errtype=WORKER_LOST, message=message, has_progressed=job.pk in progressed)
            if state is State.DEAD:
                # A loss counts as a run only if it is the last: a job that returns to its queue was not processed.
                self._tally += Tally(processed=1, failed=1)
                self._record_failure(job, failure, FailureOutcome(state))
                self._apply_outcome(job, FailureOutcome(state))
            else:
                job.history = history.append_attempt(job, failure, (), self.clock)
                job.state, job.wid, job.started_at = state, "", None
                self._changed.append(job)
            self._record([job], state)

    def interrupt(
        self, jobs: Sequence[Job], *, limit: int | None = None, reports: Mapping[str, Interruption] = _NO_REPORTS
    ) -> None:
        """Enqueue locked rows again with their old `enqueued_at`, or schedule those whose task ended its run.

        A cancelled job is discarded instead, because its worker was about to end it; one that was interrupted `limit`
        times before fails.
        """
        failed = [(job, _cancellation_failure(job)) for job in jobs if job.is_cancelled]
        returned = [job for job in jobs if not job.is_cancelled]
        parked = {
            job.pk: self._park(job, report) for job in returned if isinstance(report := reports.get(job.jid), Parking)
        }
        progressed = steps.find_progressed(returned, using=self._store.alias)
        for job in returned:
            if job.pk in progressed:
                _count_anew(job)
                job.interruptions = 0
        if limit is not None:
            exceeding = [job for job in returned if job.interruptions >= limit and job.pk not in parked]
            failed += [(job, interruption_failure(reports[job.jid])) for job in exceeding]
            returned = [job for job in returned if job not in exceeding]
        self.fail(failed)
        for job in returned:
            report = reports.get(job.jid, _BY_SHUTDOWN)
            # Clear the expiry: the job was started in time. Leave the unique key as it is: a job that is unique until
            # its start released the key when it started, and another job may hold it by now.
            self._store.jobs.filter(pk=job.pk).update(
                **parked.get(job.pk, RETURNED),
                expires_at=None,
                interruptions=job.interruptions + (job.pk not in parked),
                failures=job.failures,
                losses=job.losses,
                failure=job.failure,
                history=history.append_interruption(job, report, self.clock, has_progressed=job.pk in progressed),
            )
        self._record([job for job in returned if job.pk not in parked], State.ENQUEUED)
        self._record([job for job in returned if job.pk in parked], State.SCHEDULED)
        if parked:  # a signal whose sender saw the job at work did not wake it
            after_commit(self._store.alias, waits.wake, self._store, list(parked))

    def _park(self, job: Job, report: Parking) -> dict[str, Any]:
        """Record the sleep or wait of a locked row, and return the values of its columns."""
        run_at = FOREVER if report.in_s is None else self.clock + timedelta(seconds=report.in_s)
        if report.pause is not None:
            run_at = steps.record_pause(job, *report.pause, run_at, self.clock)
        # An end that has passed meanwhile would be behind the bound of the query for due jobs (ADR 0046).
        return _scheduled(max(run_at, self.clock)) | {"waits_for": report.waits_for}

    def release(self, jobs: Sequence[Job]) -> None:
        """Enqueue locked rows again, of jobs that were not started."""
        if jobs:
            self._store.jobs.filter(pk__in=[job.pk for job in jobs]).update(**RETURNED)
            self._record(jobs, State.ENQUEUED)

    def _reschedule(self, job: Job, failure: Failure) -> None:
        """Schedule a locked row for later, of a job that was not started: counts nothing and uses no retry."""
        run_at = self.clock + timedelta(seconds=failure.retry_in_s or 0.0)
        # The alarm about unknown tasks finds the job by its error type.
        errtype = failure.errtype if failure.errtype == UnknownJobType.__name__ else job.errtype
        self._store.jobs.filter(pk=job.pk).update(**_scheduled(run_at), errtype=errtype, waits_for=None)
        self._record([job], State.SCHEDULED)

    def _record(self, jobs: Iterable[Job | RunningJob], to: State | None = None, *, succeeded: bool = False) -> None:
        """Collect the locks, permits and batches of these jobs, which moved to the state `to`."""
        for job in jobs:
            if job.lock_token is not None or job.permits is not None:
                self._holders.append(job)
                if to is State.ENQUEUED and job.lock_token is not None:
                    self._returned_holders.append(job.id)
            # A member that waits again changes no batch.
            if to not in _WAITING and (job.bid or job.callback_of):
                self._changes.append(progress.Change(job, to, succeeded=succeeded))

    def write(self, *, commits: bool = False) -> None:
        """Write changed rows, then batches, locks, limiters and totals.

        With `commits` the last statement may carry the COMMIT, which a caller's own transaction must not get.
        """
        if self._deleted:
            self._dialect.delete(self._cursor, self._deleted)
        for job in self._ended:
            values = {name: getattr(job, name) for name in _FAILURE_COLUMNS}
            self._dialect.keep(self._cursor, [job.pk], State(job.state), self.clock, **values)
        columns, needs_more = _columns_to_save(self._changed), self._changes or self._holders
        if columns and needs_more:
            self._dialect.save(self._connection, columns, self.clock, Tally())
            columns = []
        if self._changes:
            progress.record_changes(self._connection, self._changes, self.clock)
        if self._holders:
            locks.release(self._connection, self._holders)
            limiters.release(self._connection, [job.permits for job in self._holders])
        if columns:
            # Plain retries need no further statement, so UPDATE, counter and COMMIT can be one message.
            is_last = commits and not needs_more and not self._deleted and not self._ended
            self._dialect.save(self._connection, columns, self.clock, self._tally, is_last=is_last)
        elif self._tally != Tally():
            self._dialect.count(self._cursor, self.clock, self._tally)
        self._cursor.close()
        # If the lock of a returned job had expired before, another job may hold it by now: then this one has to wait.
        if self._returned_holders:
            locks.block_if_locked(self._connection, self._returned_holders)

    def _record_failure(self, job: Job, failure: Failure, outcome: FailureOutcome) -> None:
        """Store the failure in the form that FETCH and results return, and append it to the history."""
        lines = limit_backtrace(failure.backtrace, job.backtrace)
        earlier = jsontext.decode(job.failure) if job.failure else {}
        # `failed_at` is the time of the first failure, as in Faktory.
        record = {
            "retry_count": job.failures,
            "remaining": max(job.retry - job.failures, 0) if job.retry >= 0 else job.retry,
            "failed_at": earlier.get("failed_at") or rfc3339(self.clock),
        }
        if outcome.retry_in_s is not None:
            record["next_at"] = rfc3339(self.clock + timedelta(seconds=outcome.retry_in_s))
        record |= {"message": failure.message, "errtype": failure.errtype}
        if lines:  # Faktory omits an empty backtrace
            record["backtrace"] = lines
        job.failure = jsontext.encode(record)
        # PostgreSQL cannot store NUL in text; `failure` and `history` are JSON, which escapes it.
        job.failed_at = self.clock
        job.errtype = failure.errtype.replace("\x00", "\ufffd")
        job.history = history.append_attempt(job, failure, lines, self.clock)

    def _apply_outcome(self, job: Job, outcome: FailureOutcome) -> None:
        (self._ended if outcome.state in ENDED else self._changed).append(job)
        job.state = str(outcome.state)
        if outcome.state is State.RETRIES:
            job.run_at = self.clock + timedelta(seconds=outcome.retry_in_s or 0)
            return
        job.finished_at = self.clock
        # Dead jobs are kept longer than other finished ones, because people may requeue them, and keep their unique
        # keys (W27).
        keep_s = self._store.dead_for_s if outcome.state is State.DEAD else job.result_ttl or 0
        job.purge_at = self.clock + timedelta(seconds=keep_s)


def release_rows(store: Store, working: JobQuerySet) -> int:
    """Lock these working jobs, enqueue them again, and return their number. Call it inside a transaction.

    Only the locked rows are changed: a job that starts to match the filter after the SELECT stays unchanged, because
    its locks and permits were not read.
    """
    jobs = list(working.order_by("id").only("lock_key", "lock_token", "permits").select_for_update())
    ending = Ending(store)
    ending.release(jobs)
    ending.write()
    return len(jobs)


def _columns_to_save(jobs: Sequence[Job]) -> list[FailureColumns]:
    """Return the columns to write for these rows, whose runs are over: without reservation, lock and permits."""
    _, _, *others = FailureColumns._fields
    return [
        FailureColumns(job.pk, str(job.state), *(getattr(job, name) for name in others))._replace(
            reserved_until=None, lock_token=None, permits=None
        )
        for job in jobs
    ]


def _scheduled(run_at: datetime) -> dict[str, Any]:
    """Return the column values of a job whose run is over, and that runs again at this time."""
    return RETURNED | {"state": State.SCHEDULED, "is_returned": False, "run_at": run_at, "enqueued_at": None}


def _count_anew(job: Job) -> None:
    """Count from the latest run on, which committed a step: what ended earlier runs was no obstacle (ADR 0051)."""
    job.failures = job.losses = 0
    job.failure = ""


def _cancellation_failure(job: Job) -> Failure:
    return Failure(
        jid=job.jid, errtype="Cancelled", message=f"cancelled, and its worker {job.wid} was lost while it ran"
    )


def _is_holder(failure: Failure, job: Job) -> bool:
    return job.state == State.WORKING and holds(failure.wid, failure.attempt, job.wid, job.attempt)


def _ended_run(job: Job | RunningJob, now: datetime) -> EndedRun:
    return EndedRun(job.wid, job.attempt, job.queue, job.jobtype, seconds_since(job.started_at, now))
