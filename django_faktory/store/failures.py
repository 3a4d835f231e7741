"""How jobs fail: by report, by a reservation that ran out, by a worker that is gone. Rules: W17 to W20."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from random import Random
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from .. import jsontext
from ..errors import FaktoryError, JobNotFound
from ..lifecycle import DEAD_FOR_S, GONE, WORKER_LOST, Outcome, State, outcome_of_failure, outcome_of_loss
from ..logs import get_logger
from ..models import Job, JobQuerySet, WorkerProcess
from ..payloads import INTERRUPTED, Failure, Interruption, kept_lines, rfc3339, shutdown_failure
from . import ahead, gates, locks, members
from .dialects import dialect_of
from .dialects.base import Changed, Held, Tally, holds
from .giving_back import ENQUEUED
from .jobs import OnEnded, is_storable, nobody_asks
from .transactions import run

logger = get_logger(__name__)

CHUNK = 200
HISTORY_LIMIT = 50
"""Failed attempts a row remembers; the oldest go first, so that no row grows without end."""
INTERRUPTIONS_LIMIT = 10
"""Interrupted runs among them: a job that every deployment interrupts keeps its errors."""

_chance = Random()
_NO_REPORTS: Mapping[str, Interruption] = {}


def fail(
    failures: Sequence[Failure], *, using: str, now: datetime | None = None, dead_for_s: int = DEAD_FOR_S,
    rng: Random = _chance, on_failed: OnEnded = nobody_asks,
) -> list[FaktoryError | bool]:  # fmt: skip
    """Report failures. True where it had effect; False for a stranger's; JobNotFound for an unknown jid (W17)."""
    answers: list[FaktoryError | bool] = []
    for start in range(0, len(failures), CHUNK):
        chunk = failures[start : start + CHUNK]
        failing = _Failing(using, now, dead_for_s, rng, commits=not connections[using].in_atomic_block)
        answers += run(using, failing.reports(chunk))
        on_failed(failing.failed)
    return answers


def reap(
    *, using: str, now: datetime | None = None, limit: int = CHUNK, dead_for_s: int = DEAD_FOR_S, rng: Random = _chance,
    spares_kept: bool = False,
) -> int:  # fmt: skip
    """Fail jobs whose reservation ran out, at most `limit`; returns how many. One retry is used up (W19).

    A job that was claimed for a client and whose delivery is not confirmed is released instead: no retry is used.
    `spares_kept`: leave the jobs that a heartbeat or a confirmation may still extend. For a node that has just
    begun to listen: after an outage no worker and no server could extend anything (ADR 0017).
    """
    overdue = overdue_jobs(using=using, now=now).order_by("reserved_until")
    if spares_kept:
        beating = WorkerProcess.objects.using(using).filter(beat_at__isnull=False)
        overdue = overdue.filter(Q(claim__isnull=True) | Q(claim__gte=0)).exclude(wid__in=beating.values("wid"))
    first = overdue.values_list("pk", flat=True)[:1]  # in order: `exists()` may read the table for it
    if not run(using, lambda _: list(first), atomic=False):  # nearly always: one statement, no transaction
        return 0

    def verb(connection: BaseDatabaseWrapper) -> int:
        failing = _Failing(using, now, dead_for_s, rng)
        rows = list(failing.locked(overdue, skip=True)[:limit])
        unconfirmed = [job for job in rows if ahead.is_unconfirmed(job)]
        if unconfirmed:
            failing.put_back(connection, unconfirmed)
            logger.warning(
                "deliveries were not confirmed (a server was killed?), jobs released jobs=%d", len(unconfirmed)
            )
        failing.fail_rows(connection, [(job, _reservation_expired(job)) for job in rows if job not in unconfirmed])
        failing.settle(connection)
        return len(rows)

    return run(using, verb)


def overdue_jobs(*, using: str, now: datetime | None = None) -> QuerySet[Job]:
    """Jobs whose reservation has run out."""
    return reserved_jobs(using=using).filter(reserved_until__lt=now or Now())


def reserved_jobs(*, using: str) -> JobQuerySet:
    """Jobs with a reservation: the first to run out says whether `reap` has anything to do."""
    return Job.objects.using(using).in_state(State.WORKING).filter(reserved_until__isnull=False)


def _reservation_expired(job: Job) -> Failure:
    return Failure(
        jid=job.jid,
        errtype="ReservationExpired",
        message=f"worker {job.wid or 'without a wid'} did not finish within {job.reserve_for} seconds",
    )


def _cancelled(job: Job) -> Failure:
    return Failure(jid=job.jid, errtype="Cancelled", message=f"cancelled while worker {job.wid} ran it, and was lost")


def interrupt(
    interruptions: Sequence[Interruption], *, using: str, now: datetime | None = None, dead_for_s: int = DEAD_FOR_S,
    limit: int | None = None, rng: Random = _chance, on_failed: OnEnded = nobody_asks,
) -> list[FaktoryError | bool]:  # fmt: skip
    """Return jobs that a stopping worker began to their old places. No attempt, error or loss is counted.

    True where it had effect, False where the sender no longer holds the job: it ended, or another worker has it. A job
    that was interrupted `limit` times before fails instead.
    """
    answers: list[FaktoryError | bool] = []
    for start in range(0, len(interruptions), CHUNK):
        chunk = {one.jid: one for one in interruptions[start : start + CHUNK]}

        def verb(
            connection: BaseDatabaseWrapper, chunk: dict[str, Interruption] = chunk
        ) -> tuple[set[str], list[Held]]:
            failing = _Failing(using, now, dead_for_s, rng)
            rows = Job.objects.using(using).filter(state=State.WORKING, jid__in=chunk).order_by("id")
            held = [job for job in failing.locked(rows) if holds(*_holder(chunk[job.jid]), job.wid, job.attempt)]
            failing.interrupt_rows(connection, held, limit=limit, reports=chunk)
            return {job.jid for job in held}, failing.failed

        returned, failed = run(using, verb)
        on_failed(failed)
        answers += [one.jid in returned for one in interruptions[start : start + CHUNK]]
    return answers


def interrupt_workers(connection: BaseDatabaseWrapper, wids: Sequence[str], *, using: str) -> int:
    """`interrupt` whatever these workers still hold; returns how many jobs. Inside a transaction."""
    failing = _Failing(using, None, DEAD_FOR_S, _chance)
    held = list(failing.locked(Job.objects.using(using).filter(state=State.WORKING, wid__in=wids).order_by("id")))
    failing.interrupt_rows(connection, held)
    return len(held)


def lose(
    wids: Sequence[str],
    *,
    using: str,
    now: datetime | None = None,
    dead_for_s: int = DEAD_FOR_S,
    reason: str = "",
) -> int:
    """Give up workers: their jobs go back to their old places, no retry used, or to dead at the third loss (W20).

    `reason` is how the workers died. Returns how many jobs they had. The workers' rows are deleted last, so that
    the next call repairs what a crash in between left, and gets the jobs whose rows a dying transaction still locked.
    """
    lost = 0

    def verb(connection: BaseDatabaseWrapper) -> int:
        failing = _Failing(using, now, dead_for_s, _chance)
        held = Job.objects.using(using).filter(state=State.WORKING, wid__in=wids).order_by("id")
        return failing.lose_rows(connection, list(failing.locked(held, skip=True)[:CHUNK]), reason=reason)

    while count := run(using, verb):
        lost += count
    working = Job.objects.using(using).filter(state=State.WORKING, wid__in=wids)
    # Read before: MariaDB's DELETE would lock what it reads.
    free = set(wids) - run(using, lambda _: set(working.values_list("wid", flat=True)), atomic=False)
    run(using, lambda _: WorkerProcess.objects.using(using).filter(wid__in=free).delete(), atomic=False)
    return lost


_PUT_OFF = ("state", "wid", "run_at", "started_at", "reserved_until", "lock_token", "passes")


class _Failing:
    """One transaction's worth of failing: the moment it happens, and what is written."""

    def __init__(
        self, using: str, now: datetime | None, dead_for_s: int, rng: Random, *, commits: bool = False
    ) -> None:
        self.using, self.now, self.dead_for_s, self.rng = using, now, dead_for_s, rng
        self._commits = commits
        """Whether what it writes last may commit the transaction, as nobody else's is around it."""
        self.failed: list[Held] = []
        """What the latest transaction let fail."""
        self._forget()

    def _forget(self) -> None:
        """Nothing is left to `settle`, which is done once for all rows of a transaction: two could deadlock."""
        self._held: list[Job] = []
        self._passes: list[str | None] = []
        self._changes: list[members.Change] = []
        self._tally = Tally()

    def reports(self, failures: Sequence[Failure]) -> Callable[[BaseDatabaseWrapper], list[FaktoryError | bool]]:
        """The verb that carries out reports, each fenced by who sent it."""

        def verb(connection: BaseDatabaseWrapper) -> list[FaktoryError | bool]:
            self._forget()  # what an attempt left that was rolled back
            rows, clock = self._reported(connection, {failure.jid for failure in failures if is_storable(failure.jid)})
            told: set[str] = set()
            answers: list[FaktoryError | bool] = []
            failed: list[tuple[Job, Failure]] = []
            put_off: list[tuple[Job, Failure]] = []
            for failure in failures:
                job = rows.get(failure.jid)
                has_effect = job is not None and failure.jid not in told and _is_holder(failure, job)
                if job and has_effect:
                    is_put_off = failure.verdict == "later" and not job.is_cancelled
                    (put_off if is_put_off else failed).append((job, failure))
                    told.add(failure.jid)  # a second report finds it failed
                answers.append(has_effect if job else JobNotFound(failure.jid))
            late = sum(answer is False for answer in answers)
            self._put_off(connection, put_off, clock)
            self.fail_rows(connection, failed, late=late, clock=clock)
            self.settle(connection, clock)
            return answers

        return verb

    def _reported(
        self, connection: BaseDatabaseWrapper, jids: Collection[str]
    ) -> tuple[dict[str, Job], datetime | None]:
        """These jobs, locked, by jid; and what time it was then, where that is known."""
        found = dialect_of(connection).failing(connection, jids, self.now)
        if found is not None:
            rows = [Job.from_db(self.using, found.columns, row) for row in found.rows]
            return {job.jid: job for job in rows}, found.now
        jobs = Job.objects.using(self.using).filter(jid__in=jids).order_by("id")
        return {job.jid: job for job in self.locked(jobs)}, self.now

    def _put_off(
        self, connection: BaseDatabaseWrapper, jobs: Sequence[tuple[Job, Failure]], clock: datetime | None
    ) -> None:
        """Give back locked rows that nobody began, for later: nothing is counted, and no retry used."""
        if not jobs:
            return
        now = clock or self._clock(connection)
        self._let_go(job for job, _ in jobs)
        for job, failure in jobs:
            job.state, job.wid = State.SCHEDULED, ""
            job.run_at = now + timedelta(seconds=failure.retry_in_s or 0.0)
            job.started_at = job.reserved_until = job.lock_token = job.passes = None
            Job.objects.using(self.using).filter(pk=job.pk).update(
                **{name: getattr(job, name) for name in _PUT_OFF}, enqueued_at=None
            )

    def _let_go(self, jobs: Iterable[Job]) -> list[Job]:
        """Note what these locked rows hold, before they are changed; returns those that hold locks."""
        holders = [copy.copy(job) for job in jobs]
        self._passes += [job.passes for job in holders if job.passes is not None]
        held = [job for job in holders if job.lock_token is not None]
        self._held += held
        return held

    def put_back(self, connection: BaseDatabaseWrapper, jobs: Sequence[Job]) -> None:
        """Make locked rows enqueued again whose delivery to a worker was not confirmed."""
        if jobs:
            self._let_go(jobs)
            Job.objects.using(connection.alias).filter(pk__in=[job.pk for job in jobs]).update(**ENQUEUED)

    def settle(self, connection: BaseDatabaseWrapper, clock: datetime | None = None) -> None:
        """Do what follows for batches, locks, gates and counters, in the order in which they are locked (ADR 0024)."""
        if self._changes:
            members.note(connection, self._changes, clock or self._clock(connection))
        locks.release(connection, self._held)
        gates.release(connection, self._passes)
        if self._tally != Tally():
            dialect_of(connection).save(connection, [], clock or self._clock(connection), self._tally)
        self._forget()

    def locked(self, jobs: Any, *, skip: bool = False) -> Any:
        """These rows, locked where the database can; `skip` leaves out those another node is busy with."""
        features = connections[self.using].features
        if not features.has_select_for_update:
            return jobs
        return jobs.select_for_update(skip_locked=skip and features.has_select_for_update_skip_locked)

    def fail_rows(
        self,
        connection: BaseDatabaseWrapper,
        failed: Sequence[tuple[Job, Failure]],
        *,
        late: int = 0,
        clock: datetime | None = None,
    ) -> int:
        """Let locked rows fail; returns how many. `clock`: what time it is."""
        self.failed = []
        if not failed and not late:
            return 0
        now = clock or self._clock(connection)
        self.failed = [members.held_job(job, now) for job, _ in failed]
        self._let_go(job for job, _ in failed)
        gone: list[Job] = []
        kept: list[Job] = []
        for job, failure in failed:
            (gone if self._failed(job, failure, now) is GONE else kept).append(job)
        dialect, tally = dialect_of(connection), Tally(processed=len(failed), failed=len(failed), late=late)
        is_apart = gone or self._held or self._passes or any(job.bid or job.callback_of for job in kept)
        if self._commits and not is_apart:
            dialect.save(connection, _changed(kept), now, tally, is_last=True)
            return len(failed)
        if gone:
            Job.objects.using(self.using).filter(pk__in=[job.pk for job in gone]).delete()
        dialect.save(connection, _changed(kept), now, Tally())
        changes = [*((job, GONE) for job in gone), *((job, State(job.state)) for job in kept)]
        self._changes += [members.Change(job, to) for job, to in changes]
        self._add(tally)
        return len(failed)

    def _add(self, tally: Tally) -> None:
        had = self._tally
        self._tally = Tally(
            processed=had.processed + tally.processed, failed=had.failed + tally.failed, late=had.late + tally.late
        )

    def _clock(self, connection: BaseDatabaseWrapper) -> datetime:
        if self.now:
            return self.now
        with connection.cursor() as cursor:
            return dialect_of(connection).now(cursor)

    def lose_rows(self, connection: BaseDatabaseWrapper, jobs: Sequence[Job], *, reason: str = "") -> int:
        """Take locked rows from their lost workers."""
        if not jobs:
            return 0
        cancelled = [job for job in jobs if job.is_cancelled]
        lost = [job for job in jobs if not job.is_cancelled]
        self.fail_rows(connection, [(job, _cancelled(job)) for job in cancelled])
        now = self._clock(connection)
        held = self._let_go(lost)
        for job in lost:
            self._lost(job, now, reason)
        dialect_of(connection).save(connection, _changed(lost), now, Tally())
        dead = sum(job.state == State.DEAD for job in lost)
        self._changes += [members.Change(job, State(job.state)) for job in lost]
        self._add(Tally(processed=dead, failed=dead))
        self.settle(connection, now)
        locks.arrived(connection, [job.pk for job in held])  # where the lock was lost before, another has it
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

        A cancelled job ends instead: its worker was about to end it.
        """
        if not jobs:
            return
        failed = [(job, _cancelled(job)) for job in jobs if job.is_cancelled]
        returned = [job for job in jobs if not job.is_cancelled]
        if limit is not None:
            failed += [(job, shutdown_failure(reports[job.jid])) for job in returned if job.interruptions >= limit]
            returned = [job for job in returned if job.interruptions < limit]
        self.fail_rows(connection, failed)
        now = self._clock(connection)
        held = self._let_go(returned)
        for job in returned:
            # A worker took it in time, so that it does not expire any more. Its unique key stays as it is: a key that
            # counts until the start was given up when it started, and another job may have it by now.
            Job.objects.using(self.using).filter(pk=job.pk).update(
                state=State.ENQUEUED,
                wid="",
                started_at=None,
                reserved_until=None,
                expires_at=None,
                lock_token=None,
                passes=None,
                interruptions=job.interruptions + 1,
                history=_with_interruption(job, now),
            )
        self.settle(connection, now)
        locks.arrived(connection, [job.pk for job in held])  # if a lock was lost before, another job has it

    def _failed(self, job: Job, failure: Failure, now: datetime) -> State | None:
        keep = job.result_ttl is not None
        outcome = outcome_of_failure(
            retry=job.retry,
            failures=job.failures,
            keep=keep,
            verdict="discard" if job.is_cancelled else failure.verdict,
            wish_s=failure.retry_in_s,
            rng=self.rng,
        )
        if outcome.state is GONE:
            return GONE
        self._note(job, failure, outcome, now)
        job.failures += 1
        self._end(job, outcome, now)
        return outcome.state

    def _lost(self, job: Job, now: datetime, reason: str) -> None:
        job.losses += 1
        state = outcome_of_loss(job.losses)
        failure = Failure(
            jid=job.jid,
            errtype=WORKER_LOST,
            message=f"worker {job.wid} was lost while it ran this job ({job.losses} of 3){reason and f': {reason}'}",
        )
        if state is State.DEAD:
            self._note(job, failure, Outcome(state), now)
            self._end(job, Outcome(state), now)
        else:
            job.history = _longer(job, failure, (), now)
            job.state, job.wid, job.started_at, job.reserved_until = state, "", None, None
            job.lock_token = job.passes = None

    def _note(self, job: Job, failure: Failure, outcome: Outcome, now: datetime) -> None:
        """Write down the failure as FETCH and results will tell it."""
        lines = kept_lines(failure.backtrace, job.backtrace)
        earlier = jsontext.decode(job.failure) if job.failure else {}
        told = {
            "retry_count": job.failures,
            "remaining": max(job.retry - job.failures, 0) if job.retry >= 0 else job.retry,
            "failed_at": earlier.get("failed_at") or rfc3339(now),
        }
        if outcome.retry_in_s is not None:
            told["next_at"] = rfc3339(now + timedelta(seconds=outcome.retry_in_s))
        told |= {"message": failure.message, "errtype": failure.errtype}
        if lines:  # the original server leaves an empty one out
            told["backtrace"] = lines
        job.failure = jsontext.encode(told)
        job.errtype = failure.errtype.replace("\x00", "\ufffd")
        job.history = _longer(job, failure, lines, now)

    def _end(self, job: Job, outcome: Outcome, now: datetime) -> None:
        job.state = str(outcome.state)
        job.reserved_until = job.lock_token = job.passes = None
        if outcome.state is State.RETRIES:
            job.run_at = now + timedelta(seconds=outcome.retry_in_s or 0)
            return
        if outcome.state is not State.DEAD:
            job.unique_key = None  # a dead job keeps it until its time is over (W27)
        job.finished_at = now
        keep_s = self.dead_for_s if outcome.state is State.DEAD else job.result_ttl or 0
        job.purge_at = now + timedelta(seconds=keep_s)


def _changed(jobs: Sequence[Job]) -> list[Changed]:
    """What is to be written of them."""
    _, _, *others = Changed._fields
    return [Changed(job.pk, str(job.state), *(getattr(job, name) for name in others)) for job in jobs]


def _with_interruption(job: Job, now: datetime) -> str:
    """Return the job's history with this interrupted run at its end, and the oldest interruptions left out."""
    items = jsontext.items(job.history) if job.history else []
    interrupted = [item for item in items if _is_interruption(item)]
    superfluous = set(interrupted[: max(0, len(interrupted) - INTERRUPTIONS_LIMIT + 1)])
    entry = {
        "kind": INTERRUPTED,
        "attempt": job.attempt,
        "wid": job.wid,
        "started_at": rfc3339(job.started_at) if job.started_at else "",
        "failed_at": rfc3339(now),
        "errtype": "WorkerShutdown",
        "message": "interrupted by shutdown",
        "backtrace": [],
    }
    kept = [item for item in items if item not in superfluous][1 - HISTORY_LIMIT :]
    return f"[{','.join([*kept, jsontext.encode(entry)])}]"


def _is_interruption(item: str) -> bool:
    entry = jsontext.decode(item)
    return isinstance(entry, dict) and entry.get("kind") == INTERRUPTED


def _holder(report: Interruption) -> tuple[str, int]:
    return report.wid, report.attempt


def _longer(job: Job, failure: Failure, lines: Sequence[str], now: datetime) -> str:
    """The job's history with this failed attempt at its end."""
    attempts = jsontext.items(job.history)[1 - HISTORY_LIMIT :] if job.history else []
    attempt = {
        "attempt": job.attempt,
        "wid": job.wid,
        "started_at": rfc3339(job.started_at) if job.started_at else "",
        "failed_at": rfc3339(now),
        "errtype": failure.errtype,
        "message": failure.message,
        "backtrace": lines,
    }
    return f"[{','.join([*attempts, jsontext.encode(attempt)])}]"


def _is_holder(failure: Failure, job: Job) -> bool:
    return job.state == State.WORKING and holds(failure.wid, failure.attempt, job.wid, job.attempt)
