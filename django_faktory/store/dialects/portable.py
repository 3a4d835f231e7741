"""The way of SQLite and MariaDB: lock and read rows, decide here, write the set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from ...lifecycle import State
from ...payloads import Ack, JobPayload, Reservation
from .base import COUNTER, JOB, QUEUE, WORKER, Dialect, Ending, Held, Plan, Tally, counter_slot, holds, marks

COLUMNS = 13
"""What is written of a new job; the rest are defaults."""


class PortableDialect(Dialect):
    """See the module."""

    lock = ""
    upsert_tail = ""
    count_tail = ""

    _columns = (
        "jid, jobtype, queue, state, weight, payload, retry, reserve_for, backtrace, result_ttl, run_at, enqueued_at,"
        " created_at"
    )
    _replaced = (
        "jobtype", "queue", "weight", "payload", "retry", "reserve_for", "backtrace", "result_ttl", "run_at",
        "enqueued_at", "created_at", "failures", "losses", "errtype", "failure", "history", "result", "wid",
        "started_at", "reserved_until", "finished_at", "purge_at", "expires_at", "unique_key", "unique_expires_at",
        "unique_until_start", "lock_key", "lock_token", "bid", "callback_of", "has_run", "counts_failed", "about",
        "state",
    )  # fmt: skip

    def insert(self, connection: BaseDatabaseWrapper, jobs: Sequence[JobPayload], now: datetime | None) -> None:
        """See Dialect."""
        with connection.cursor() as cursor:
            clock = now or self.now(cursor)
            adapt = connection.ops.adapt_datetimefield_value
            adapted = adapt(clock)
            rows = [self._row(adapt, job, clock, adapted) for job in jobs]
            self._write(cursor, rows)

    def _write(self, cursor: CursorWrapper, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert the rows; MariaDB's driver makes one statement of it."""
        cursor.executemany(self._insert(1), rows)

    def _insert(self, count: int) -> str:
        row = f"({marks(range(COLUMNS))})"
        return f"INSERT INTO {JOB} ({self._columns}) VALUES {', '.join([row] * count)} {self.upsert_tail}"

    def _row(
        self, adapt: Callable[[datetime | None], Any], job: JobPayload, now: datetime, adapted: Any
    ) -> tuple[Any, ...]:
        waits = job.at is not None and job.at > now
        return (
            job.jid, job.jobtype, job.queue, State.SCHEDULED if waits else State.ENQUEUED, -job.priority, job.text,
            job.retry, job.reserve_for, job.backtrace, job.result_ttl,
            adapt(job.at) if waits else None, None if waits else adapted, adapted,
        )  # fmt: skip

    def claim(self, connection: BaseDatabaseWrapper, plan: Plan, now: datetime | None) -> list[Reservation]:
        """See Dialect."""
        with connection.cursor() as cursor:
            paused, muted = withheld(connection, {slot.wid for slot in plan.slots if slot.wid})
            clock = now or self.now(cursor)
            adapted = connection.ops.adapt_datetimefield_value(clock)
            found: list[Reservation] = []
            taken: list[tuple[Any, ...]] = []
            for slot in plan.slots:
                room = min(slot.count, plan.limit - len(found))
                if room > 0 and slot.queue not in paused and slot.wid not in muted:
                    rows = self._lock_first(cursor, slot.queue, room, [row[0] for row in taken], adapted)
                    taken += rows
                    found += [self._reserved(row, slot.wid, clock) for row in rows]
            for wid in {reservation.wid for reservation in found}:
                ids = [row[0] for row, held in zip(taken, found, strict=True) if held.wid == wid]
                self._mark_working(connection, cursor, ids, wid, clock)
        return found

    def _lock_first(
        self, cursor: CursorWrapper, queue: str, room: int, taken: list[int], clock: Any
    ) -> list[tuple[Any, ...]]:
        # Rows this transaction has locked are not skipped by its own SKIP LOCKED: leave them out by hand.
        but = f" AND id NOT IN ({marks(taken)})" if taken else ""
        cursor.execute(
            "SELECT id, jid, queue, payload, attempt, created_at, enqueued_at, failure, history, reserve_for,"
            f" result_ttl, jobtype, lock_key FROM {JOB} WHERE state = 'enqueued' AND queue = %s"
            f" AND (expires_at IS NULL OR expires_at > %s){but}"
            f" ORDER BY weight, enqueued_at, id LIMIT %s{self.lock}",
            [queue, clock, *taken, room],
        )
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows

    def _reserved(self, row: tuple[Any, ...], wid: str, now: datetime) -> Reservation:
        (_, jid, queue, payload, attempt, created_at, enqueued_at, failure, history, reserve_for, result_ttl,
         jobtype,
         lock_key) = row  # fmt: skip
        return Reservation(
            jid=jid,
            queue=queue,
            jobtype=jobtype,
            text=payload,
            wid=wid,
            attempt=attempt + 1,
            created_at=utc(created_at),
            enqueued_at=utc(enqueued_at),
            started_at=now,
            failure=failure,
            history=history,
            reserve_for=reserve_for,
            result_ttl=result_ttl,
            lock_key=lock_key,
        )

    def _mark_working(
        self, connection: BaseDatabaseWrapper, cursor: CursorWrapper, ids: list[int], wid: str, now: datetime
    ) -> None:
        adapt = connection.ops.adapt_datetimefield_value
        cursor.execute(
            f"UPDATE {JOB} SET state = 'working', wid = %s, attempt = attempt + 1, started_at = %s, run_at = NULL,"
            " unique_key = CASE WHEN unique_until_start AND lock_key IS NULL THEN NULL ELSE unique_key END,"
            f" reserved_until = {self.after('%s', 'reserve_for')} WHERE id IN ({marks(ids)})",
            [wid, adapt(now), adapt(now), *ids],
        )

    def waiting(
        self,
        connection: BaseDatabaseWrapper,
        queues: Sequence[str],
        most: int,
        wids: Collection[str],
        now: datetime | None,
    ) -> tuple[dict[str, int], set[str]]:
        """See Dialect."""
        paused, muted = withheld(connection, wids)
        running = [queue for queue in queues if queue not in paused]
        if not running:
            return {}, muted
        with connection.cursor() as cursor:
            clock = connection.ops.adapt_datetimefield_value(now or self.now(cursor))
            cursor.execute(
                " UNION ALL ".join([self._waiting] * len(running)),
                [value for queue in running for value in (queue, queue, clock, most)],
            )
            return dict(cursor.fetchall()), muted

    _waiting = (
        f"SELECT %s AS name, (SELECT COUNT(*) FROM (SELECT 1 FROM {JOB} WHERE state = 'enqueued' AND queue = %s"
        " AND (expires_at IS NULL OR expires_at > %s) LIMIT %s) AS ready) AS waiting"
    )

    def end(self, connection: BaseDatabaseWrapper, acks: Sequence[Ack], now: datetime | None) -> Ending:
        """See Dialect."""
        jids = {ack.jid for ack in acks}
        with connection.cursor() as cursor:
            clock = now or self.now(cursor)
            cursor.execute(
                "SELECT id, jid, wid, attempt, result_ttl,"
                " bid IS NOT NULL OR callback_of IS NOT NULL OR lock_token IS NOT NULL"
                ", queue, jobtype, started_at"
                f" FROM {JOB} WHERE state = 'working' AND jid IN ({marks(jids)}){self.plain_lock}",
                [*jids],
            )
            found = cursor.fetchall()
            left = {row[1] for row in found if row[5]}
            rows = {
                jid: (row_id, ttl, Held(wid, attempt, queue, jobtype, seconds_since(started_at, clock)))
                for row_id, jid, wid, attempt, ttl, is_apart, queue, jobtype, started_at in found
                if not is_apart
            }
            held: dict[str, tuple[int, Ack, int | None]] = {}
            for ack in acks:
                row_id, ttl, holder = rows.get(ack.jid, (0, None, None))
                if holder and ack.jid not in held and holds(ack.wid, ack.attempt, holder.wid, holder.attempt):
                    held[ack.jid] = row_id, ack, ttl
            self._delete(cursor, [row_id for row_id, _, ttl in held.values() if ttl is None])
            self.keep(cursor, [(row_id, ack, ttl) for row_id, ack, ttl in held.values() if ttl is not None], clock)
            self.count(cursor, clock, Tally(processed=len(held), late=len(acks) - len(held) - len(left)))
        return Ending({jid: rows[jid][2] for jid in held}, left)

    def _delete(self, cursor: CursorWrapper, ids: list[int]) -> None:
        if ids:
            cursor.execute(f"DELETE FROM {JOB} WHERE id IN ({marks(ids)})", ids)

    def keep(self, cursor: CursorWrapper, held: Sequence[tuple[int, Ack, int]], now: datetime) -> None:
        """See Dialect."""
        if not held:
            return
        adapt = cursor.db.ops.adapt_datetimefield_value
        cases = " ".join(["WHEN %s THEN %s"] * len(held))
        pairs = [value for row_id, ack, _ in held for value in (row_id, ack.result)]
        cursor.execute(
            f"UPDATE {JOB} SET state = 'succeeded', result = CASE id {cases} END, finished_at = %s,"
            f" reserved_until = NULL, unique_key = NULL, lock_token = NULL,"
            f" purge_at = {self.after('%s', 'result_ttl')}"
            f" WHERE id IN ({marks(held)})",
            [*pairs, adapt(now), adapt(now), *(row_id for row_id, _, _ in held)],
        )

    def count(self, cursor: CursorWrapper, day: datetime, tally: Tally) -> None:
        """See Dialect."""
        if tally != Tally():
            cursor.execute(
                f"INSERT INTO {COUNTER} (day, slot, processed, failed, late) VALUES (%s, %s, %s, %s, %s)"
                f" {self.count_tail}",
                [day.date(), counter_slot(), tally.processed, tally.failed, tally.late],
            )

    plain_lock = ""

    @abstractmethod
    def after(self, moment: str, seconds: str) -> str:
        """SQL: the moment that many seconds after `moment`."""


def withheld(connection: BaseDatabaseWrapper, wids: Collection[str]) -> tuple[set[str], set[str]]:
    """The queues that are paused, and those of `wids` that are quiet or terminating: neither gets a job."""
    muted = f" UNION ALL SELECT 'worker', wid FROM {WORKER} WHERE state <> 'running' AND wid IN ({marks(wids)})"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT 'queue', name FROM {QUEUE} WHERE paused_at IS NOT NULL{muted if wids else ''}", [*wids])
        rows = cursor.fetchall()
    return {name for kind, name in rows if kind == "queue"}, {name for kind, name in rows if kind == "worker"}


def seconds_since(naive: datetime | None, now: datetime) -> float:
    """From a stored time till now; 0.0 where there is none, or clocks were set."""
    return max(0.0, (now - utc(naive)).total_seconds()) if naive else 0.0


def utc(naive: datetime) -> datetime:
    """Mark a stored time for what it is: both drivers give it without its zone."""
    return naive.replace(tzinfo=UTC)
