"""Define `Dialect`, the interface to the hot operations of a database.

`insertion_order` and `holds` are rules that every dialect must follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from django.apps import apps
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from ...core.lifecycle import State
from ...core.loop_connection import LoopConnection
from ...core.payloads import Ack, Delivery, JobPayload, Reservation
from ...core.steps import StepRecord
from ..chunks import chunks
from .bounds import Bounds
from .job_columns import NewRow
from .partitions import Partitions
from .values import (
    TOTALS,
    AckResult,
    ClaimPlan,
    FailureColumns,
    HandoffResult,
    LockedRows,
    PushResult,
    RunningJob,
    Tally,
)
from .write_queue import NO_QUEUE

JOB, HISTORY = "django_faktory_job", "django_faktory_history"
STEP = "django_faktory_jobstep"
QUEUE = "django_faktory_queue"
WORKER = "django_faktory_workerprocess"
DELTA = "django_faktory_delta"
LOCK = "django_faktory_joblock"
LIMIT = "django_faktory_limit"
LIMITER = "django_faktory_limiter"
FOLD_FROM = 5
"""A fold runs if at least one of this many deltas is no sum: it writes all sums, or reads them."""

DELIVERY_LEASE_S = 60.0
"""Lease in seconds until a delivery is confirmed.

It equals the shortest reservation allowed (W9), so that the lease shortens no reservation.
"""

_NOTHING_HELD = dict.fromkeys(("run_at", "reserved_until", "unique_key", "lock_token", "permits", "limiter"))
"""Columns of an ended job: it waits for nothing, and holds nothing."""


class Sql(NamedTuple):
    """A value that the database computes."""

    text: str
    params: Sequence[Any]


OrderedJobs = Sequence[tuple[int, JobPayload]]
"""Jobs to insert, each with its place in the pushed set."""


def insertion_order(jobs: Sequence[JobPayload]) -> Sequence[int]:
    """Return the places of the jobs in insertion order: jobs without a unique key by jid, then the others by key.

    An insert waits for transactions that insert the same jid or key, so all inserts use this order (ADR 0024).
    """
    order: list[Any] = [job.jid for job in jobs]
    # Most sets have no unique key: comparing texts, not tuples, halves the time.
    if any(job.options for job in jobs) and any(keys := [unique_key_of(job) for job in jobs]):
        order = [*map(insertion_key, order, keys)]
    return sorted(range(len(jobs)), key=order.__getitem__)


def insertion_key(jid: str, unique_key: str | None) -> tuple[str, str]:
    """Return the sort key of `insertion_order`."""
    return (unique_key, "") if unique_key else ("", jid)


def unique_key_of(job: JobPayload) -> str | None:
    """Return the unique key that the job requests, or None."""
    return job.options.unique_key if job.options else None


# Created by the thousand, and free of reference cycles: the garbage collector need not track them (ADR 0002).
_SAVE = f"UPDATE {JOB} SET {', '.join(f'{column} = %s' for column in FailureColumns._fields[1:])} WHERE id = %s"


class Dialect(ABC):
    """Hot operations of one database.

    Each takes an open connection or cursor, and is one transaction or part of the caller's.
    """

    partitions: Partitions = Partitions()

    plain_lock = ""
    """SQL to append to a SELECT to lock its rows; empty if the database has no row locks."""
    skip_lock = ""
    """Like `plain_lock`, but skips rows that other transactions have locked."""

    lock_order = " ORDER BY id"
    """SQL with which a SELECT locks rows in the order of locks (ADR 0024)."""

    has_single_writer = False
    """Whether the database admits one write transaction at a time."""

    supports_lock_handoff = False
    """Whether `exchange` passes the lock of an ended job to the next job of its key that it claims (ADR 0015)."""

    claims_in_turn = False
    """Whether `exchange` uses `ClaimPlan.next_plans`."""

    supports_prefetch = False
    """Whether `exchange` uses `ClaimPlan.prefetch_slots`, so that deliveries need `confirm` (ADR 0026)."""

    stores_keyed = False
    """Whether `insert` accepts jobs with lock keys and unique keys."""

    one_statement = False
    """Whether claim, end and exchange are a single message each, so that no transaction needs to be opened around them.

    Other dialects end jobs by `store.jobs.endings` alone.
    """

    begin_snapshot: tuple[str, ...] = ()
    """Statements that begin a read-only transaction in which all reads see one snapshot."""

    @abstractmethod
    def now(self, cursor: CursorWrapper) -> datetime:
        """Return the database's time."""

    def time_of_write(self, cursor: CursorWrapper) -> datetime:
        """Return the time for jobs that this transaction is about to insert."""
        return self.now(cursor)

    @abstractmethod
    def age(self, moment: str) -> str:
        """Return SQL for the seconds since `moment` as a float; negative if it is in the future."""

    names_of_json: str
    """SQL: a SELECT of the strings in a JSON array, which is its only parameter."""

    @abstractmethod
    def insert(
        self, connection: BaseDatabaseWrapper, jobs: OrderedJobs, now: datetime | None, *, may_exist: bool = True
    ) -> PushResult:
        """Insert jobs with distinct jids, in the given order.

        A row with the same jid is replaced if it has finished, otherwise left unchanged. The jobs belong to no batch;
        they have lock keys and unique keys only if the dialect `stores_keyed`. Their places decide the order in which
        they are claimed. Pass `may_exist=False` if no stored job can have one of the jids.
        """

    def write_rows(self, cursor: CursorWrapper, rows: Sequence[tuple[Any, ...]], tail: str = "") -> None:
        """Insert rows of jobs with the first columns of `NewRow`. `tail` is what follows VALUES."""
        width = len(rows[0])
        # SQLite before 3.32 accepts only 999 parameters, and larger statements are not faster.
        at_once = (cursor.db.features.max_query_params or len(rows) * width) // width
        for portion in chunks(rows, at_once):
            # Not `executemany`: SQLite runs one statement per row, and takes twice as long.
            cursor.execute(insert_sql(len(portion), width, tail), [value for row in portion for value in row])

    def lock_stored(
        self,
        connection: BaseDatabaseWrapper,  # noqa: ARG002
        jobs: OrderedJobs,  # noqa: ARG002
        now: datetime | None,  # noqa: ARG002
    ) -> None:
        """Lock, by id, all rows that inserts of these jobs may change, before several `insert` in one transaction.

        A database without it retries when two sets overlap.
        """
        return

    @abstractmethod
    def claim(self, connection: BaseDatabaseWrapper, plan: ClaimPlan, now: datetime | None) -> list[Reservation]:
        """Reserve jobs in the plan's order, at most `count` per slot.

        If the plan names several wids, the jobs of a queue are distributed to them in the plan's order. Quiet workers
        and paused queues get nothing.
        """

    @abstractmethod
    def count_ready(
        self,
        connection: BaseDatabaseWrapper,
        queues: Sequence[str],
        max_count: int,
        wids: Collection[str],
        now: datetime | None,
        *,
        bounds: Bounds | None = None,
    ) -> tuple[dict[str, int], set[str]]:
        """Count the ready jobs of each queue that is not paused, up to `max_count`.

        `bounds`: where to begin to read the queues. Returns these counts, and the `wids` that are quiet or terminating.
        """

    def end(self, connection: BaseDatabaseWrapper, acks: Sequence[Ack], now: datetime | None) -> AckResult:
        """End the jobs whose holders sent these acks. Other acks are counted as late.

        If several acks name one jid, the ack of the holder counts. Members of batches are returned unchanged, and one
        ack of each is not counted. Only for dialects of `one_statement`.
        """
        raise NotImplementedError

    def exchange(
        self,
        connection: BaseDatabaseWrapper,
        jobs: OrderedJobs,
        acks: Sequence[Ack],
        plan: ClaimPlan,
        now: datetime | None,
    ) -> tuple[AckResult, list[Reservation]]:
        """Run `end`, `insert` and `claim` in this order, each only if there is work for it.

        A claimed job may already have its lock, for the plan's `lease_s`: then it has the token. Prefetched jobs are in
        the list too, marked `is_prefetched`. Only for dialects of `one_statement`.
        """
        raise NotImplementedError

    def end_last(
        self,
        connection: BaseDatabaseWrapper,  # noqa: ARG002
        ack: Ack,  # noqa: ARG002
        now: datetime | None,  # noqa: ARG002
    ) -> AckResult | None:
        """End a job as the last statement of the caller's transaction, and commit, in one message.

        The job belongs to no batch. Returns None, with nothing done, if this is impossible now. Raises ReservationLost
        if the ack is not the holder's, and database errors: then nothing is committed.
        """
        return None

    @abstractmethod
    def record_step(
        self, connection: BaseDatabaseWrapper, job: Reservation, step: StepRecord, now: datetime | None
    ) -> bool:
        """Record a step as the last statement of the caller's transaction, or return False if the job is not held.

        Commits in the same message if that is possible, and only in the outermost atomic block. Raises database errors:
        then nothing is committed.
        """

    def can_use_loop(self, connection: BaseDatabaseWrapper) -> bool:  # noqa: ARG002
        """Return whether `take_for_loop` can succeed with this driver and these settings. Needs no open connection."""
        return False

    def take_for_loop(self, connection: BaseDatabaseWrapper) -> LoopConnection | None:  # noqa: ARG002
        """Return this idle connection of the calling thread as one of an event loop (ADR 0005), or None."""
        return None

    def build_exchange(
        self,
        connection: BaseDatabaseWrapper,
        jobs: OrderedJobs,
        acks: Sequence[Ack],
        plan: ClaimPlan,
        now: datetime | None,
    ) -> tuple[list[Any], Callable[[Any], tuple[AckResult, list[Reservation]]]]:
        """Return the calls of `exchange`, and the function that reads their rows; for `LoopConnection.execute`."""
        raise NotImplementedError

    @abstractmethod
    def confirm(
        self, connection: BaseDatabaseWrapper, deliveries: Sequence[Delivery], now: datetime | None
    ) -> set[str]:
        """Confirm the delivery of prefetched jobs; return the jids to confirm again (`Broker.confirm`)."""

    @abstractmethod
    def extend(
        self,
        connection: BaseDatabaseWrapper,
        held_jobs: Sequence[tuple[str, str, int]],
        at_least_s: float,
        now: datetime | None,
    ) -> None:
        """Extend the reservations of these jobs (wid, jid, attempt) by `reserve_for`, at least by `at_least_s`.

        Only reservations that are half over are extended, so that short jobs cost no write. Locked rows are skipped.
        """

    def hand_off_lock(
        self,
        connection: BaseDatabaseWrapper,  # noqa: ARG002
        ack: Ack,  # noqa: ARG002
        plan: ClaimPlan,  # noqa: ARG002
        now: datetime | None,  # noqa: ARG002
    ) -> HandoffResult | None:
        """End a holder of a lock and claim the next job of its key with the lock, in one statement (ADR 0015).

        The next job is claimed for the only worker of the plan. Returns None if nothing was done.
        """
        return None

    def expects_lock_handoff(self, jid: str) -> bool:  # noqa: ARG002
        """Return whether `hand_off_lock` is likely to succeed for this job. False once it was tried for the job."""
        return False

    def write_queue(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return a context manager that queues this process' writing transactions if the database does not."""
        return NO_QUEUE

    has_lock_wait = False
    """Whether `lock_wait` has an effect."""

    def lock_wait(self, seconds: float | None, *, of_transaction: bool = False) -> str:
        """Return the statement that limits how long a session or transaction waits for a lock.

        None restores the default.
        """
        raise NotImplementedError

    def bounded_statements(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[object]:  # noqa: ARG002
        """Refuse statements that are longer than the server accepts, if they would cost the connection."""
        return NO_QUEUE

    def keeps_session(self, connection: BaseDatabaseWrapper) -> bool:  # noqa: ARG002
        """Return whether session settings persist on this connection and affect no other user of it."""
        return True

    def was_ended(self, connection: BaseDatabaseWrapper) -> bool:  # noqa: ARG002
        """Return whether the server has ended the session of this open, idle connection. Does not block."""
        return False

    def free_connections(self, cursor: CursorWrapper) -> dict[str, int]:  # noqa: ARG002
        """Return how many connections each limit of the server leaves to this account, by the name of the limit."""
        return {}

    def can_join(self, connection: BaseDatabaseWrapper) -> bool:  # noqa: ARG002
        """Return whether `exchange` is its own transaction, so that none needs to be opened around it."""
        return False

    @abstractmethod
    def await_claims(self, connection: BaseDatabaseWrapper) -> None:
        """Wait, outside any transaction, for running claims that may have read the limits before this call."""

    def reserve_keys(self, cursor: CursorWrapper, keys: Sequence[str]) -> None:  # noqa: B027
        """Call before lock rows of these sorted keys are inserted, if the claims of the dialect acquire locks too."""

    def find_ready(self, cursor: CursorWrapper, keys: Sequence[str]) -> Sequence[tuple[Any, ...]]:
        """Return id, key, queue and sort_priority of the ready jobs of these keys."""
        cursor.execute(
            f"SELECT id, lock_key, queue, sort_priority FROM {JOB}"
            f" WHERE lock_key IN ({marks(keys)}) AND state = 'enqueued'",
            [*keys],
        )
        rows: Sequence[tuple[Any, ...]] = cursor.fetchall()
        return rows

    def make_next_ready(self, connection: BaseDatabaseWrapper, keys: Sequence[str]) -> tuple[set[str], set[str]]:
        """Make the first blocked job of each key, queue and priority ready, unless one is ready already.

        Waits for no row: returns the queues of jobs that became ready, and the keys for which another transaction has
        locked a row.
        """
        queues: set[str] = set()
        skipped: set[str] = set()
        with connection.cursor() as cursor:
            for key in keys:
                # Locked rows are skipped: this transaction already has later rows of the order locked (ADR 0024).
                for queue, is_ready in _next_ready(cursor, key, self.skip_lock):
                    if is_ready:
                        queues.add(queue)
                    else:
                        skipped.add(key)
        return queues, skipped

    def lock_running(self, cursor: CursorWrapper, jids: Collection[str], pushed: Collection[str]) -> list[RunningJob]:
        """Lock the running jobs with `jids`, and return them. Lock the rows with the jids in `pushed` too."""
        # SQLite has no row locks, so there is no need to lock the rows that a push may replace.
        others = pushed if self.plain_lock else ()
        # Find rows by jid alone: with a plain comparison of the state, MariaDB may walk the index of working jobs, and
        # wait for locks on jobs of other transactions. LOWER hides the state from its optimizer.
        or_pushed = f" OR jid IN ({marks(others)})" if others else ""
        all_jids = list({*jids, *others})
        cursor.execute(
            f"SELECT {', '.join(RunningJob._fields)}, state FROM {JOB} WHERE jid IN ({marks(all_jids)})"
            f" AND (LOWER(state) = 'working'{or_pushed}){self.lock_order}{self.plain_lock}",
            [*all_jids, *others],
        )
        rows = cursor.fetchall()
        return [RunningJob._make(row[:-1]) for row in rows if row[-1] == "working" and row[1] in jids]

    def delete(self, cursor: CursorWrapper, ids: Sequence[int]) -> int:
        """Delete locked jobs, and return their number."""
        cursor.execute(f"DELETE FROM {JOB} WHERE id IN ({marks(ids)})", ids)
        return int(cursor.rowcount)

    def keep(
        self, cursor: CursorWrapper, ids: Sequence[int], state: State, ended_at: datetime, **values: object
    ) -> int:
        """Move locked jobs that end in this state to the history, with these values of columns; return their number.

        An end deletes the row in one table and inserts it into the other; nothing moves back (ADR 0048).
        """
        if not ids:
            return 0
        adapt = cursor.db.ops.adapt_datetimefield_value
        values = {**_NOTHING_HELD, "state": str(state), "finished_at": ended_at, **values}
        values.setdefault("day", self.day_of(ended_at))
        # By name: programs without models import the dialects too.
        fields = apps.get_model("django_faktory.Job")._meta.concrete_fields  # noqa: SLF001  (documented)
        parts = {str(field.column): Sql(str(field.column), []) for field in fields}
        for column, value in values.items():
            adapted = adapt(value) if isinstance(value, datetime) else value
            parts[column] = value if isinstance(value, Sql) else Sql("%s", [adapted])
        cursor.execute(
            f"INSERT INTO {HISTORY} ({', '.join(parts)}) SELECT {', '.join(sql for sql, _ in parts.values())}"
            f" FROM {JOB} WHERE id IN ({marks(ids)})",
            [*(param for _, params in parts.values() for param in params), *ids],
        )
        return self.delete(cursor, ids)

    def day_of(self, ended_at: datetime) -> object:
        """Return the day of a row of the history."""
        return ended_at.astimezone(UTC).date()

    @abstractmethod
    def after(self, moment: str, seconds: str) -> str:
        """Return SQL for the moment `seconds` after `moment`."""

    @abstractmethod
    def mark_succeeded(self, cursor: CursorWrapper, ended: Sequence[tuple[int, Ack, int]], now: datetime) -> None:
        """Move locked jobs to the history as succeeded, with their results. Each item is (id, ack, result_ttl)."""

    def lock_failed(
        self,
        connection: BaseDatabaseWrapper,  # noqa: ARG002
        jids: Collection[str],  # noqa: ARG002
        now: datetime | None,  # noqa: ARG002
    ) -> LockedRows | None:
        """Lock and read jobs reported as failed. None: the dialect has no faster way than the ORM."""
        return None

    def save(
        self,
        connection: BaseDatabaseWrapper,
        changed: Sequence[FailureColumns],
        day: datetime,
        tally: Tally,
        *,
        is_last: bool = False,  # noqa: ARG002
    ) -> None:
        """Write locked rows and add to the counters.

        If `is_last`, the transaction may be committed in the same message. Runs one statement per row: Django's
        `bulk_update` takes milliseconds to build its statement.
        """
        adapt = connection.ops.adapt_datetimefield_value
        with connection.cursor() as cursor:
            if changed:
                # Raw SQL bypasses the model's fields, so their conversion of times is done here.
                rows = [[adapt(value) if isinstance(value, datetime) else value for value in row] for row in changed]
                cursor.executemany(_SAVE, [(*values, row_id) for row_id, *values in rows])
            self.count(cursor, day, tally)

    own_mark: str
    """SQL: the mark of the rows in which this transaction, or this connection, counts. No other one writes them."""

    add_tail = f"ON CONFLICT (mark, kind, name) DO UPDATE SET amount = {DELTA}.amount + excluded.amount"
    """SQL that follows an INSERT of deltas, and adds to the rows that exist."""

    current_deltas = DELTA
    """SQL: a subquery or table with the deltas whose sums are the numbers of jobs (ADR 0047)."""

    def count(self, cursor: CursorWrapper, day: datetime, tally: Tally) -> None:
        """Add to that day's totals."""
        name = day.date().isoformat()
        counts = [(kind, name, amount) for kind, amount in zip(TOTALS, tally.amounts, strict=True) if amount]
        self.add_deltas(cursor, counts)

    def add_deltas(self, cursor: CursorWrapper, deltas: Sequence[tuple[str, str, int]]) -> None:
        """Add these amounts to the numbers of a kind and name, each once."""
        add = f"INSERT INTO {DELTA} (mark, kind, name, amount) VALUES ({self.own_mark}, %s, %s, %s) {self.add_tail}"
        if deltas:
            cursor.executemany(add, deltas)

    @abstractmethod
    def needs_fold(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether there are enough deltas for a fold: it may cost no more than they did."""

    @abstractmethod
    def fold(self, connection: BaseDatabaseWrapper) -> None:
        """Replace deltas by their sums, in the caller's transaction."""


def _next_ready(cursor: CursorWrapper, key: str, skip_lock: str) -> Iterator[tuple[str, bool]]:
    """Make the first blocked job of each queue and priority ready, unless one is ready already.

    Yields (queue, True), or (queue, False) if another transaction has locked the row. Each step is one index lookup.
    """
    # Before the first place: the lowest possible sort_priority is -100.
    queue, sort_priority = "", -101
    while True:
        cursor.execute(
            f"SELECT id, queue, sort_priority, limiter FROM {JOB} WHERE lock_key = %s AND state = 'blocked'"
            " AND (queue > %s OR (queue = %s AND sort_priority > %s))"
            " ORDER BY queue, sort_priority, enqueued_at, id LIMIT 1",
            [key, queue, queue, sort_priority],
        )
        row = cursor.fetchone()
        if row is None:
            return
        row_id, queue, sort_priority, limiter = row
        if limiter is not None:  # it waits for a permit, and the jobs of its key wait behind it (ADR 0016)
            continue
        cursor.execute(
            f"SELECT 1 FROM {JOB}"
            " WHERE lock_key = %s AND state = 'enqueued' AND queue = %s AND sort_priority = %s LIMIT 1",
            [key, queue, sort_priority],
        )
        if cursor.fetchone() is None:
            cursor.execute(f"SELECT id FROM {JOB} WHERE id = %s AND state = 'blocked'{skip_lock}", [row_id])
            if cursor.fetchone() is None:
                # The caller passes the key to `promote_waiters` after its commit: waiting here, with other rows locked,
                # could deadlock (ADR 0024).
                yield queue, False
                continue
            cursor.execute(f"UPDATE {JOB} SET state = 'enqueued' WHERE id = %s", [row_id])
            yield queue, True


@lru_cache(maxsize=16)
def insert_sql(count: int, width: int, tail: str) -> str:
    """Return an INSERT of jobs with the first columns of `NewRow`. Cached: full statements of a set have one text."""
    row = f"({marks(range(width))})"
    columns = ", ".join(NewRow.__struct_fields__[:width])
    return f"INSERT INTO {JOB} ({columns}) VALUES {', '.join([row] * count)} {tail}"


def marks(values: Collection[Any]) -> str:
    """Return a parameter placeholder for each value."""
    return ", ".join(["%s"] * len(values))


def holds(reported_wid: str, reported_attempt: int | None, wid: str, attempt: int) -> bool:
    """Return whether a report comes from the job's holder (W16).

    The wids must be equal unless one is empty, and the attempts must be equal unless the report has none.
    """
    # Connections may send no wid in HELLO, and a prefetched job has none yet: then there is nothing to compare.
    same_worker = not reported_wid or not wid or reported_wid == wid
    return same_worker and reported_attempt in (None, attempt)


def seconds_since(started_at: datetime | None, now: datetime) -> float:
    """Return the seconds from a stored time until now; 0.0 if there is none, or a clock was set back."""
    return max(0.0, (now - utc(started_at)).total_seconds()) if started_at else 0.0


def utc(moment: datetime) -> datetime:
    """Return a stored time with its zone: the drivers of SQLite and MariaDB return it without one."""
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
