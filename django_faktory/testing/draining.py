"""`drain()`: runs ready jobs through the real broker and worker code, in the test's thread.

Works inside a test's transaction too, where it restores what a job would have outside: a database error rolls back that
job only, and on_commit hooks run when the job has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from unittest import mock

from django.db import DatabaseError, connections
from django.db.models import Min
from django.utils import timezone
from msgspec.structs import replace

from .. import conf
from ..brokers import get_broker
from ..brokers.orm import OrmBroker
from ..core.lifecycle import DELAYED, State, count_claims
from ..core.payloads import LATER, Ack, Failure, FetchRequest, Interruption, Reservation, TrackUpdate
from ..errors import FaktoryError
from ..models import Job
from ..store.batches import batches
from ..store.jobs import waits
from ..store.maintenance import due as due_work
from ..tasks.compat import TaskResult
from ..tasks.results import call_of
from ..worker.execution import prepare
from ..worker.job_buffer import Report
from .recorded_execution import RecordedExecution

MAX_ATTEMPTS = 1000
"""Attempts after which `drain` assumes an endless loop."""
WID = "drain"
"""Wid under which `drain` claims jobs."""


class JobFailed(AssertionError):
    """Raised by `drain(raise_errors=True)` for a failed job; the task's own exception is the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One attempt at one job."""

    jid: str
    jobtype: str
    queue: str
    attempt: int
    state: str
    """State of the job afterwards: succeeded, retries, dead or discarded; enqueued after an interruption."""
    result: TaskResult[..., Any] | None = field(repr=False)
    """Result with id, arguments, return value and errors; None for an unknown task."""
    error: BaseException | None = None
    """Exception that the task raised; FaktoryError if the job could not be run at all."""


def drain(
    *,
    now: datetime | None = None,
    until: timedelta | None = None,
    queue: str | None = None,
    raise_errors: bool = False,
    limit: int = MAX_ATTEMPTS,
) -> list[Ran]:
    """Run every ready job, including jobs enqueued by jobs; return each attempt, in order.

    `until` advances the time by this much: scheduled jobs and retries run when they are due, in order, and
    `timezone.now()` returns the time at which they run. `now` sets the time to that moment: jobs due by then run.
    Neither sleeps. With `queue`, jobs of other queues stay. Raises JobFailed at the first failure with `raise_errors`,
    AssertionError after `limit` attempts, FaktoryError if jobs are on another server.
    """
    broker = get_broker()
    if not isinstance(broker, OrmBroker):
        raise FaktoryError('drain() runs jobs of this project\'s database: expected FAKTORY["BROKER"] = "orm"')
    if now is not None and until is not None:
        raise TypeError("drain: expected now or until, got both")
    if now is not None and timezone.is_naive(now):
        raise ValueError(f"drain: now: expected an aware datetime, got {now!r}; timezone.now() gives one")
    return _Drain(broker, queue=queue, raise_errors=raise_errors, limit=limit).run(now=now, until=until)


class _Drain:
    def __init__(self, broker: OrmBroker, *, queue: str | None, raise_errors: bool, limit: int) -> None:
        self._broker = broker
        self._queue = queue
        self._raise_errors = raise_errors
        self._limit = limit
        self._clock = _Clock()
        self._runs: list[Ran] = []

    def run(self, *, now: datetime | None, until: timedelta | None) -> list[Ran]:
        with self._clock.install(self._broker):
            if now is not None:
                self._clock.move_to(now)
            self._run_ready()
            if until is not None:
                self._run_until(self._clock.now() + until)
        return self._runs

    def _run_until(self, end: datetime) -> None:
        """Advance the clock from one due job to the next, and at last to `end`."""
        while (due := self._next_due()) is not None and due <= end:
            # max: a job may be overdue, and time must not run backwards.
            self._clock.move_to(max(due, self._clock.now()))
            self._run_ready()
        self._clock.move_to(end)
        self._run_ready()

    def _next_due(self) -> datetime | None:
        next_due: datetime | None = self._jobs().in_state(*DELAYED).aggregate(first=Min("run_at"))["first"]
        return next_due

    def _run_ready(self) -> None:
        while True:
            self._run_maintenance()
            queues = self._queues()
            # One job at a time, so that a job that it enqueues with a higher priority runs next.
            [jobs] = self._broker.fetch([FetchRequest(queues=queues, wid=WID)]) if queues else [[]]
            if not jobs:
                return
            if len(self._runs) >= self._limit:
                # The job must stay ready: the test may call drain again with a higher limit.
                self._broker.release(jobs)
                raise AssertionError(
                    f"drain: {self._limit} attempts, and jobs are still ready ({jobs[0].jid} in queue "
                    f"{jobs[0].queue!r}): does a task enqueue itself? If this is intended: drain(limit=…)"
                )
            self._perform(jobs[0])

    def _run_maintenance(self) -> None:
        # The steps of maintenance that depend on time. Loops, because each call handles a bounded number of rows.
        while due_work.enqueue_due(self._broker):
            pass
        # In a test's transaction no signal wakes its job by a commit.
        after = None
        while (after := waits.sweep(self._broker, after=after)[1]) is not None:
            pass
        while due_work.expire(self._broker):
            pass
        while batches.expire(self._broker):
            pass

    def _queues(self) -> tuple[str, ...]:
        """Return queues with ready jobs, in the order of FAKTORY["QUEUES"], then by name."""
        ready = set(self._jobs().in_state(State.ENQUEUED).values_list("queue", flat=True).distinct())
        configured = [spec.partition(":")[0] for spec in conf.get("QUEUES") or ()]
        return tuple(name for name in dict.fromkeys([*configured, *sorted(ready)]) if name in ready)

    def _jobs(self) -> Any:
        jobs = Job.objects.using(self._broker.alias)
        return jobs if self._queue is None else jobs.filter(queue=self._queue)

    def _perform(self, reservation: Reservation) -> None:
        prepared = prepare(reservation)
        if isinstance(prepared, Failure):  # a test has no newer worker to which it could be deferred
            self._report(replace(prepared, verdict="", retry_in_s=None) if prepared.verdict == LATER else prepared)
            self._add_run(reservation, None, FaktoryError(prepared.message))
            return
        execution = RecordedExecution(reservation, call_of(reservation.text), prepared.task)
        updates: list[TrackUpdate] = []
        execution.control.report_progress = lambda percent, note, _: updates.append(
            TrackUpdate(jid=reservation.jid, wid=WID, percent=percent, desc=note)
        )
        with _as_if_committed():
            report = execution.perform(self._broker)
        if updates:
            self._broker.track_set(updates[-1:])  # after the run: a task's event loop must not query
        self._report(report)
        self._add_run(reservation, execution, execution.error)

    def _report(self, report: Report | None) -> None:
        match report:
            case Ack():
                [answer] = self._broker.ack([report])
                if isinstance(answer, FaktoryError):
                    raise answer
            case Failure():
                self._broker.fail([report])
            case Interruption():
                self._broker.interrupt([report])

    def _add_run(
        self, reservation: Reservation, execution: RecordedExecution | None, error: BaseException | None
    ) -> None:
        row = Job.objects.using(self._broker.alias).latest_of(reservation.jid)
        # A deleted row has no state to read: without a `result_ttl` a finished row is deleted at once.
        assumed_state = State.DISCARDED if error else State.SUCCEEDED
        run = Ran(
            jid=reservation.jid,
            jobtype=execution.task.jobtype if execution else (row.jobtype if row else ""),
            queue=reservation.queue,
            attempt=count_claims(reservation.attempt),
            state=row.state if row else str(assumed_state),
            result=execution.result if execution else None,
            error=error,
        )
        self._runs.append(run)
        if error is not None and self._raise_errors:
            raise JobFailed(
                f"job {run.jid} ({run.jobtype}) failed in attempt {run.attempt}: {type(error).__name__}: {error}"
            ) from error


class _Clock:
    """Clock that runs `shift` ahead of the real one. While `shift` is None, the broker uses the database's clock."""

    def __init__(self) -> None:
        self._real = timezone.now  # a test may have frozen it: the frozen clock counts as the real one
        self.shift: timedelta | None = None

    def now(self) -> datetime:
        """Return the current time of this clock."""
        return self._real() + (self.shift or timedelta(0))

    def for_store(self) -> datetime | None:
        """Return the current time, or None for the database's clock if this one was not moved."""
        return None if self.shift is None else self.now()

    def move_to(self, moment: datetime) -> None:
        self.shift = moment - self._real()

    @contextmanager
    def install(self, broker: OrmBroker) -> Iterator[None]:
        """Make the broker and `timezone.now()` use this clock inside the block."""
        previous_clock = broker.clock
        broker.clock = self.for_store
        try:
            # Patched in the module, where `timezone.now()` is looked up; `from … import now` stays unpatched.
            with mock.patch.object(timezone, "now", self.now):
                yield
        finally:
            broker.clock = previous_clock


@contextmanager
def _as_if_committed() -> Iterator[None]:
    """Give a job inside a test's transaction the behaviour of a connection of its own."""
    # Only connections with an open transaction need it; on the other ones a job commits normally.
    aliases = [connection.alias for connection in connections.all(initialized_only=True) if connection.in_atomic_block]
    savepoints = {alias: connections[alias].savepoint() or "" for alias in aliases}  # "" if savepoints are unsupported
    hook_counts = {alias: len(connections[alias].run_on_commit) for alias in aliases}
    depths = {alias: len(connections[alias].savepoint_ids) for alias in aliases}
    yield
    for alias in aliases:
        connection = connections[alias]
        # The task entered atomic() without leaving it, so the stack of savepoints differs.
        if len(connection.savepoint_ids) != depths[alias]:
            connection.savepoint_rollback(savepoints[alias])
            del connection.savepoint_ids[depths[alias] :], connection.atomic_blocks[depths[alias] + 1 :]
            raise AssertionError(
                f"the task left a transaction open on {alias!r}: use `with transaction.atomic():`, which ends by itself"
            )
        # After a database error PostgreSQL rejects every statement of the transaction: roll back to the savepoint, and
        # the test can continue.
        if _is_broken(alias):
            connection.needs_rollback = False
            connection.savepoint_rollback(savepoints[alias])
        else:
            connection.savepoint_commit(savepoints[alias])
        _run_hooks(alias, hook_counts[alias])


def _is_broken(alias: str) -> bool:
    """Return True if a database error has aborted the transaction."""
    connection = connections[alias]
    if connection.needs_rollback:
        return True
    # Django's flag is not set for an error that the task itself caught, so ask the database.
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return True
    return False


def _run_hooks(alias: str, start_index: int) -> None:
    """Run the on_commit hooks of the job, including hooks that hooks register."""
    connection = connections[alias]
    while len(connection.run_on_commit) > start_index:
        # Removed before the call, so that the test's own commit does not run it a second time.
        _savepoint_ids, hook, *_ = connection.run_on_commit.pop(start_index)
        hook()
