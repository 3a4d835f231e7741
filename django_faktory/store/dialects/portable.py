"""Implement `Dialect` for SQLite and MariaDB: lock and read rows, decide in Python, write the set.

`PortableDialect` is the common base class; a few statements per operation replace PostgreSQL's single one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from msgspec.structs import astuple

from ...core.lifecycle import CLAIMS_OF_ROW, State
from ...core.payloads import Ack, Delivery, Reservation
from ...core.steps import StepRecord
from ..chunks import chunks
from .base import DELTA, FOLD_FROM, JOB, LIMIT, LIMITER, QUEUE, STEP, WORKER, Dialect, OrderedJobs, Sql, marks, utc
from .bounds import Bounds
from .job_columns import PLAIN, REPLACED, UNKEYED, new_row
from .values import ALL_STORED, ClaimPlan, ClaimSlot, PushResult

STEP_COLUMNS = (
    "job_id", "pushed_at", "attempt", "name", "step_key", "result", "reached", "done", "total", "is_finished",
    "until", "started_at", "recorded_at",
)  # fmt: skip

MAX_QUEUES = 200
"""Maximum number of queues in one count: SQLite takes 500 parts of a UNION and, before 3.32, 999 parameters."""


FOLDED_AT_ONCE = 500
"""Deltas that one transaction folds."""


class PortableDialect(Dialect):
    """Base class of the dialects without data-modifying common table expressions.

    A subclass sets `upsert_tail` (what follows VALUES), and `greatest` and `least` (names of functions).
    """

    upsert_tail = ""
    lock_order = ""  # MariaDB locks rows in the order in which it reads them, not in that of the sorted result
    greatest, least = "GREATEST", "LEAST"

    # `state` is last, because MariaDB's other assignments read it.
    _replaced = (*(column for column in REPLACED if column != "state"), "state")

    def insert(
        self,
        connection: BaseDatabaseWrapper,
        jobs: OrderedJobs,
        now: datetime | None,
        *,
        may_exist: bool = True,  # noqa: ARG002  (an upsert looks for the row in any case)
    ) -> PushResult:
        """Insert jobs by upsert. Jobs with keys are inserted elsewhere."""
        with connection.cursor() as cursor:
            clock = now or self.now(cursor)
            adapt = connection.ops.adapt_datetimefield_value
            created_at = adapt(clock)
            # One width for the whole set, so that it needs one statement text.
            width = UNKEYED if any(job.options for _, job in jobs) else PLAIN
            rows = [astuple(new_row(job, clock, created_at, place, adapt))[:width] for place, job in jobs]
            self.write_rows(cursor, rows, self.upsert_tail)
        return ALL_STORED

    def claim(self, connection: BaseDatabaseWrapper, plan: ClaimPlan, now: datetime | None) -> list[Reservation]:
        """Reserve jobs queue by queue, then mark them with one UPDATE per wid."""
        with connection.cursor() as cursor:
            clock = now or self.now(cursor)
            adapted = connection.ops.adapt_datetimefield_value(clock)
            paused = read_paused_sources(connection, {slot.wid for slot in plan.slots if slot.wid}, adapted)
            reservations: list[Reservation] = []
            locked_rows: list[tuple[Any, ...]] = []
            # Between two slots the limit shrinks: earlier slots of the plan take precedence.
            for slot in self._select_slots_with_ready_jobs(cursor, plan.slots, adapted):
                room = min(slot.count, plan.limit - len(reservations))
                if room > 0 and slot.queue not in paused.queues and slot.wid not in paused.wids:
                    rows = self._lock_first(cursor, slot.queue, room, [row[0] for row in locked_rows], adapted)
                    locked_rows += rows
                    reservations += [self._to_reservation(row, slot.wid, clock, paused) for row in rows]
            for wid in {reservation.wid for reservation in reservations}:
                claimed = [(row[0], job) for row, job in zip(locked_rows, reservations, strict=True) if job.wid == wid]
                # Jobs with and without limits need different assignments: two sets are cheaper than a CASE per row.
                for is_limited in {job.permits is not None for _, job in claimed}:
                    ids = [row_id for row_id, job in claimed if (job.permits is not None) == is_limited]
                    self._mark_working(cursor, ids, wid, adapted, plan, is_limited=is_limited)
        return reservations

    def _select_slots_with_ready_jobs(
        self, cursor: CursorWrapper, slots: Sequence[ClaimSlot], clock: Any
    ) -> Sequence[ClaimSlot]:
        """Return the slots of queues that have ready jobs.

        A few slots are returned unchecked. With many, a statement for each empty queue would cost more than the check.
        """
        if len(slots) <= MAX_QUEUES // 10:
            return slots
        sizes = self._count_queues(cursor, list(dict.fromkeys(slot.queue for slot in slots)), clock, 1)
        return [slot for slot in slots if sizes[slot.queue]]

    def _lock_first(
        self, cursor: CursorWrapper, queue: str, room: int, locked_ids: list[int], clock: Any
    ) -> list[tuple[Any, ...]]:
        # SKIP LOCKED does not skip rows that this transaction has locked itself: exclude them by id.
        exclusion = f" AND id NOT IN ({marks(locked_ids)})" if locked_ids else ""
        cursor.execute(
            "SELECT id, jid, queue, payload, attempt, created_at, enqueued_at, failure, history, reserve_for,"
            " result_ttl, jobtype, lock_key, limit_key, bid IS NULL AND callback_of IS NULL"
            f" FROM {JOB} WHERE state = 'enqueued' AND queue = %s"
            f" AND (expires_at IS NULL OR expires_at > %s){exclusion}"
            f" ORDER BY sort_priority, enqueued_at, id LIMIT %s{self.skip_lock}",
            [queue, clock, *locked_ids, room],
        )
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows

    def _to_reservation(self, row: tuple[Any, ...], wid: str, now: datetime, paused: PausedSources) -> Reservation:
        (row_id, jid, queue, payload, attempt, created_at, enqueued_at, failure, history, reserve_for, result_ttl,
         jobtype, lock_key, limit_key, is_batchless) = row  # fmt: skip
        is_limited = limit_key is not None or ("task", jobtype) in paused.limited or ("queue", queue) in paused.limited
        return Reservation(
            jid=jid,
            queue=queue,
            jobtype=jobtype,
            text=payload,
            wid=wid,
            attempt=max(attempt, row_id * CLAIMS_OF_ROW) + 1,
            created_at=utc(created_at),
            enqueued_at=utc(enqueued_at),
            started_at=now,
            failure=failure,
            history=history,
            reserve_for=reserve_for,
            result_ttl=result_ttl,
            lock_key=lock_key,
            limit_key=limit_key,
            # Empty: the job must acquire permits before it is delivered (ADR 0016).
            permits="" if is_limited else None,
            is_batchless=bool(is_batchless),
        )

    def _mark_working(
        self, cursor: CursorWrapper, ids: list[int], wid: str, clock: Any, plan: ClaimPlan, *, is_limited: bool
    ) -> None:
        # A job that needs a permit keeps its `unique_until_start` key until it has the permit
        # (`limits.sql.record_permits`).
        starts = "CASE WHEN unique_until_start AND lock_key IS NULL THEN NULL ELSE unique_key END"
        limited = "permits = ''" if is_limited else f"unique_key = {starts}"
        cursor.execute(
            f"UPDATE {JOB} SET state = 'working', wid = %s, started_at = %s, run_at = NULL, limiter = NULL,"
            f" attempt = {self.greatest}(attempt, id * {CLAIMS_OF_ROW}) + 1, claim = %s, {limited},"
            f" reserved_until = {self.after('%s', self._lease(plan))}"
            f" WHERE id IN ({marks(ids)})",
            [wid, clock, plan.mark, clock, *ids],
        )

    def _lease(self, plan: ClaimPlan) -> str:
        """Return SQL for how many seconds a claim of this plan reserves a job."""
        seconds = "reserve_for"
        if plan.at_least_s is not None:
            seconds = f"{self.greatest}({seconds}, {float(plan.at_least_s)!r})"
        if plan.at_most_s is not None:
            seconds = f"{self.least}({seconds}, {float(plan.at_most_s)!r})"
        return seconds

    def confirm(
        self,
        connection: BaseDatabaseWrapper,
        deliveries: Sequence[Delivery],
        now: datetime | None,  # noqa: ARG002  (the reservation starts with the claim)
    ) -> set[str]:
        holders = {delivery.job.jid: (delivery.job.wid, delivery.job.attempt) for delivery in deliveries}
        with connection.cursor() as cursor:
            # A negative claim number marks a delivery that is not confirmed yet (ADR 0026).
            unconfirmed = (
                f"SELECT id, jid, wid, attempt FROM {JOB} WHERE jid IN ({marks(holders)}) AND claim < 0"
                " AND reserved_until IS NOT NULL"
            )
            cursor.execute(f"{unconfirmed}{self.skip_lock}", [*holders])
            row_ids = {jid: row_id for row_id, jid, *holder in cursor.fetchall() if holders[jid] == tuple(holder)}
            if row_ids:
                cursor.execute(
                    f"UPDATE {JOB} SET claim = -claim, reserved_until ="
                    # TRACK SET may have extended the reservation already.
                    f" {self.greatest}(reserved_until, {self.after('started_at', 'reserve_for')})"
                    f" WHERE id IN ({marks(row_ids)})",
                    [*row_ids.values()],
                )
            if not self.skip_lock or len(row_ids) == len(holders):
                return set()
            # A row that the first statement did not return is either locked or confirmed already: read without a lock
            # to see which.
            cursor.execute(unconfirmed, [*holders])
            return {jid for _, jid, *holder in cursor.fetchall() if holders[jid] == tuple(holder)} - row_ids.keys()

    def extend(
        self,
        connection: BaseDatabaseWrapper,
        held_jobs: Sequence[tuple[str, str, int]],
        at_least_s: float,
        now: datetime | None,
    ) -> None:
        holders = {jid: (wid, attempt) for wid, jid, attempt in held_jobs}
        seconds = f"{self.greatest}(reserve_for, {float(at_least_s)!r})"
        with connection.cursor() as cursor:
            clock = connection.ops.adapt_datetimefield_value(now or self.now(cursor))
            # Read without locks first: few jobs are due, and the others must not be locked for a heartbeat.
            due_query = (
                f"SELECT id, jid, wid, attempt FROM {JOB} WHERE jid IN ({marks(holders)})"
                f" AND reserved_until < {self.after('%s', f'({seconds} / 2)')}"
            )
            cursor.execute(due_query, [*holders, clock])
            row_ids = [row_id for row_id, jid, *holder in cursor.fetchall() if holders[jid] == tuple(holder)]
            if row_ids and self.skip_lock:  # read again: another transaction may have changed the row in between
                cursor.execute(
                    f"SELECT id, jid, wid, attempt FROM {JOB} WHERE id IN ({marks(row_ids)}){self.skip_lock}", row_ids
                )
                row_ids = [row_id for row_id, jid, *holder in cursor.fetchall() if holders[jid] == tuple(holder)]
            if row_ids:
                cursor.execute(
                    f"UPDATE {JOB} SET reserved_until = {self.after('%s', seconds)}"
                    f" WHERE id IN ({marks(row_ids)}) AND reserved_until IS NOT NULL",
                    [clock, *row_ids],
                )

    def count_ready(
        self,
        connection: BaseDatabaseWrapper,
        queues: Sequence[str],
        max_count: int,
        wids: Collection[str],
        now: datetime | None,
        *,
        bounds: Bounds | None = None,  # noqa: ARG002
    ) -> tuple[dict[str, int], set[str]]:
        with connection.cursor() as cursor:
            clock = connection.ops.adapt_datetimefield_value(now or self.now(cursor))
            paused = read_paused_sources(connection, wids, clock)
            running = [queue for queue in queues if queue not in paused.queues]
            return self._count_queues(cursor, running, clock, max_count), paused.wids

    def _count_queues(self, cursor: CursorWrapper, queues: Sequence[str], clock: Any, max_count: int) -> dict[str, int]:
        """Return how many jobs are ready in each queue, counted up to `max_count`."""
        sizes: dict[str, int] = {}
        for chunk in chunks(queues, MAX_QUEUES):
            cursor.execute(
                " UNION ALL ".join([self._count_query] * len(chunk)),
                [value for queue in chunk for value in (queue, queue, clock, max_count)],
            )
            sizes.update(cursor.fetchall())
        return sizes

    # LIMIT bounds the count: a queue may hold millions of jobs, and callers only ask for a few.
    _count_query = (
        f"SELECT %s AS name, (SELECT COUNT(*) FROM (SELECT 1 FROM {JOB} WHERE state = 'enqueued' AND queue = %s"
        " AND (expires_at IS NULL OR expires_at > %s) LIMIT %s) AS ready) AS waiting"
    )

    def mark_succeeded(self, cursor: CursorWrapper, ended: Sequence[tuple[int, Ack, int]], now: datetime) -> None:
        if not ended:
            return
        # A CASE by id, because each job has its own result: a statement per job would be a round trip per job
        # (ADR 0043).
        results = Sql(
            f"CASE id{' WHEN %s THEN %s' * len(ended)} END",
            [item for row_id, ack, _ in ended for item in (row_id, ack.result)],
        )
        purge_at = Sql(self.after("%s", "result_ttl"), [cursor.db.ops.adapt_datetimefield_value(now)])
        self.keep(cursor, [row_id for row_id, _, _ in ended], State.SUCCEEDED, now, result=results, purge_at=purge_at)

    def record_step(
        self, connection: BaseDatabaseWrapper, job: Reservation, step: StepRecord, now: datetime | None
    ) -> bool:
        with connection.cursor() as cursor:
            clock, adapt = now or self.now(cursor), connection.ops.adapt_datetimefield_value
            values = [
                step.name, step.key, step.result, step.reached, step.done, step.total, step.is_finished,
                adapt(step.until), adapt(clock - timedelta(seconds=step.ran_s)), adapt(clock),
            ]  # fmt: skip
            # The job is locked by this statement, the last one, and not from the begin of the step on: heartbeats would
            # skip its row for as long. LOWER: see `lock_running`. A step is recorded once, a walk after each chunk, a
            # sleep or wait at its end too.
            cursor.execute(
                f"{'INSERT' if step.kind == 'step' else 'REPLACE'} INTO {STEP} ({', '.join(STEP_COLUMNS)})"
                f" SELECT id, created_at, attempt, {marks(values)} FROM {JOB}"
                f" WHERE jid = %s AND LOWER(state) = 'working' AND wid = %s AND attempt = %s{self.plain_lock}",
                [*values, job.jid, job.wid, job.attempt],
            )
            return bool(cursor.rowcount)

    def needs_fold(self, connection: BaseDatabaseWrapper) -> bool:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT SUM(mark <> 0 OR amount = 0), COUNT(*) FROM {DELTA}")
            [(foldable, total)] = cursor.fetchall()
        return bool((foldable or 0) * FOLD_FROM > total)

    def fold(self, connection: BaseDatabaseWrapper) -> None:
        """Add up to `FOLDED_AT_ONCE` rows to those with mark 0, which only folds write. Skips rows in use."""
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT mark, kind, name, amount FROM {DELTA} WHERE mark <> 0 LIMIT {FOLDED_AT_ONCE}{self.skip_lock}"
            )
            rows = cursor.fetchall()
            if rows:
                gone = f"DELETE FROM {DELTA} WHERE mark = %s AND kind = %s AND name = %s"
                cursor.executemany(gone, [row[:3] for row in rows])
                sums = f"INSERT INTO {DELTA} (mark, kind, name, amount) VALUES (0, %s, %s, %s) {self.add_tail}"
                cursor.executemany(sums, [row[1:] for row in rows])
            cursor.execute(f"DELETE FROM {DELTA} WHERE mark = 0 AND amount = 0")


class PausedSources(NamedTuple):
    """Conditions that a claim reads in addition to the jobs."""

    queues: set[str]
    """Paused queues, and queues with a full or paused limiter: no job of theirs can be claimed."""
    wids: set[str]
    """Quiet or terminating workers: they get no job."""
    limited: set[tuple[str, str]]
    """Scope and name of limits on queues and tasks: their jobs need a permit."""


def read_paused_sources(connection: BaseDatabaseWrapper, wids: Collection[str], clock: Any) -> PausedSources:
    """Read pauses, limits and worker states in one statement."""
    muted = f" UNION ALL SELECT 'muted', wid FROM {WORKER} WHERE state <> 'running' AND wid IN ({marks(wids)})"
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT 'paused', name FROM {QUEUE} WHERE paused_at IS NOT NULL"
            f" UNION ALL SELECT 'paused', name FROM {LIMITER} WHERE scope = 'queue'"
            f" AND (in_use >= concurrency OR opens_at > %s OR is_paused)"
            f" UNION ALL SELECT scope, name FROM {LIMIT} WHERE scope IN ('queue', 'task'){muted if wids else ''}",
            [clock, *wids],
        )
        rows = cursor.fetchall()
    return PausedSources(
        {name for source, name in rows if source == "paused"},
        {name for source, name in rows if source == "muted"},
        {(source, name) for source, name in rows if source in ("queue", "task")},
    )
