"""Dialect for PostgreSQL 15 and later: one statement, one round trip and one commit for each set.

`PostgresqlDialect` chooses the statements of an operation and reads their rows; the SQL is in the other modules.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import date, datetime
from typing import Any

import msgspec
from django.db import DataError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from ....core.payloads import Ack, Delivery, Reservation
from ....errors import ReservationLost
from ..base import (
    LIMIT,
    AckResult,
    ClaimPlan,
    Dialect,
    Ended,
    EndedRun,
    FailureColumns,
    HandoffResult,
    LastAckResult,
    LockedRows,
    LoopSession,
    OrderedJobs,
    PushResult,
    Tally,
)
from ..idle_sessions import is_readable
from .failures import READ, lock_failed_calls, save_calls
from .jobs import (
    ADD_TO_COUNTERS,
    CLAIM,
    CLAIM_ALONE,
    COUNT_CLAIMABLE,
    MARK_SUCCEEDED,
    NOT_HELD,
    claim_calls,
    end_call,
    end_last_call,
)
from .limits import ACQUIRE_PERMITS, ACQUIRE_PERMITS_ALONE, END_WITH_PERMITS
from .lock_handoff import LockHandoff
from .locks import END_LOCKED, HAND_OFF_MARKED, NEXT, NEXT_OF_FREED, NEXT_OF_MARKED, READY, TAKE
from .pipeline import Rows
from .pooler import is_pooled
from .prefetch import confirm, extend, prefetch_call
from .prepared import Call, PreparedSession, can_join, execute, execute_and_commit, execute_on, keeps_session
from .push import lock_call, push_call, read_result
from .rows import prefetched_reservations, reservations, with_tokens

_json = msgspec.json.Encoder()

CLAIMED_WITHIN_S = 2.0
"""Limit in seconds of the wait for claims that may not have seen a new limit.

`limiters.sweep` counts the jobs of a claim that takes longer.
"""

# Poll interval. It also covers a claim that has taken its snapshot, but not yet its table lock.
_POLL_S = 0.01
_READERS_OF_LIMITS = """
SELECT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = %s::regclass AND granted AND pid <> pg_backend_pid()
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""

LOCKS_IN_USE_S = 10.0
"""Seconds for which exchanges include the statements for jobs with locks, after this process has seen such a job."""


# A negative limit means none; superusers have only that of the server.
_FREE_CONNECTIONS = """
WITH session AS (SELECT * FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid())
SELECT 'max_connections of the server', current_setting('max_connections')::int
    - current_setting('superuser_reserved_connections')::int
    - coalesce(current_setting('reserved_connections', TRUE), '0')::int - (SELECT count(*) FROM session)
UNION ALL
SELECT 'CONNECTION LIMIT of the role ' || rolname, rolconnlimit
    - (SELECT count(*) FROM session WHERE usesysid = pg_roles.oid)
FROM pg_roles WHERE rolname = session_user AND rolconnlimit >= 0 AND NOT rolsuper
UNION ALL
SELECT 'CONNECTION LIMIT of the database ' || datname, datconnlimit
    - (SELECT count(*) FROM session WHERE datid = pg_database.oid)
FROM pg_database JOIN pg_roles ON rolname = session_user
WHERE datname = current_database() AND datconnlimit >= 0 AND NOT rolsuper"""


class PostgresqlDialect(Dialect):
    """Dialect in which an operation, or a whole exchange, is one message to the server."""

    supports_lock_handoff = True
    claims_in_turn = True
    supports_prefetch = True
    stores_keyed = True
    one_statement = True
    plain_lock = " FOR UPDATE"
    skip_lock = " FOR UPDATE SKIP LOCKED"

    # With old statistics the planner may prefer a sequential scan, which makes a bounded count read the whole table.
    begin_snapshot = (
        "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
        "SELECT set_config('enable_seqscan', 'off', TRUE), set_config('jit', 'off', TRUE)",
    )
    # The planner expects 10 rows of an array, and 100 of the function. With 100 the estimated cost is above
    # `jit_above_cost`, and the compilation took 130 of 160 ms for 50 names.
    names_of_json = "SELECT unnest(ARRAY(SELECT json_array_elements_text(%s::json)))"

    def age(self, moment: str) -> str:
        return f"EXTRACT(EPOCH FROM STATEMENT_TIMESTAMP() - {moment})::float8"

    def now(self, cursor: CursorWrapper) -> datetime:
        # NOW() would be the start of the transaction, which may be a long one of the project.
        cursor.execute("SELECT STATEMENT_TIMESTAMP()")
        moment: datetime = cursor.fetchone()[0]
        return moment

    def insert(
        self, connection: BaseDatabaseWrapper, jobs: OrderedJobs, now: datetime | None, *, may_exist: bool = True
    ) -> PushResult:
        return read_result(execute_on(connection, [push_call(jobs, now, may_exist=may_exist)])[0])

    def lock_stored(self, connection: BaseDatabaseWrapper, jobs: OrderedJobs, now: datetime | None) -> None:
        execute_on(connection, [lock_call(jobs, now)])

    def claim(self, connection: BaseDatabaseWrapper, plan: ClaimPlan, now: datetime | None) -> list[Reservation]:
        """Reserve jobs, with one statement for each wid of the plan."""
        # CLAIM_ALONE turns off `synchronous_commit` for its whole transaction, which must not be the caller's.
        claim = CLAIM if connection.in_atomic_block else CLAIM_ALONE
        return reservations(execute_on(connection, claim_calls(claim, plan, now)))

    def exchange(
        self,
        connection: BaseDatabaseWrapper,
        jobs: OrderedJobs,
        acks: Sequence[Ack],
        plan: ClaimPlan,
        now: datetime | None,
    ) -> tuple[AckResult, list[Reservation]]:
        """End, insert and claim in one message.

        A lock that an ended job frees goes to a job that is claimed in the same transaction, with no commit in between.
        """
        calls, read = self.build_exchange(connection, jobs, acks, plan, now)
        return read(execute_on(connection, calls))

    def lend(self, connection: BaseDatabaseWrapper) -> LoopSession | None:
        return PreparedSession.of(connection)

    def build_exchange(
        self,
        connection: BaseDatabaseWrapper,
        jobs: OrderedJobs,
        acks: Sequence[Ack],
        plan: ClaimPlan,
        now: datetime | None,
    ) -> tuple[list[Call], Callable[[list[Rows]], tuple[AckResult, list[Reservation]]]]:
        """Return the statements of an exchange, and the function that reads their rows."""
        calls = self._end_calls(connection, acks, now, [job.jid for _, job in jobs]) if acks else []
        end_count = len(calls)
        # Ends before inserts: END has locked the rows that these jobs replace, in one order with its own (ADR 0030).
        calls += [push_call(jobs, now, may_exist=True)] if jobs else []
        # Acks and pushes must be on disk when they are answered; CLAIM_ALONE does not wait for the disk (ADR 0006).
        claims_from = len(calls)
        if plan.slots:
            calls += claim_calls(CLAIM if calls or connection.in_atomic_block else CLAIM_ALONE, plan, now)
        has_handoff = bool(plan.slots) and end_count > 0 and calls[end_count - 1][0] is NEXT_OF_FREED
        # Replaces the last statement of `_end_calls`: the marked lock rows must survive until HAND_OFF_MARKED.
        if has_handoff:
            calls[end_count - 1] = (NEXT_OF_MARKED, [True])
            calls.append((HAND_OFF_MARKED, [True, plan.lease_s, now]))
        # After the claims: the buffer gets jobs behind those of the requests in the order of the queue (ADR 0022).
        if plan.prefetch_slots:
            calls.append(prefetch_call(plan, now))

        def read(results: list[Rows]) -> tuple[AckResult, list[Reservation]]:
            # Rows are popped in reverse order of the statements above.
            prefetched = prefetched_reservations(results.pop()) if plan.prefetch_slots else []
            next_holders = results.pop() if has_handoff else []
            if next_holders:
                # Another job of its key is likely to follow such a job: try `hand_off_lock` at its end (ADR 0020).
                self._lock_handoff.remember(jid for jid, _, _ in next_holders)
            ending = self._build_ack_result(results[:end_count], next_holders) if acks else AckResult({}, set())
            if jobs and results[end_count]:
                ending = ending._replace(blocked={*ending.blocked, *read_result(results[end_count]).blocked})
            claimed = reservations(results[claims_from:]) if plan.slots else []
            return ending, (with_tokens(claimed, next_holders) if next_holders else claimed) + prefetched

        return calls, read

    def confirm(
        self, connection: BaseDatabaseWrapper, deliveries: Sequence[Delivery], now: datetime | None
    ) -> set[str]:
        return confirm(connection, deliveries, now)

    def extend(
        self,
        connection: BaseDatabaseWrapper,
        held_jobs: Sequence[tuple[str, str, int]],
        at_least_s: float,
        now: datetime | None,
    ) -> None:
        extend(connection, held_jobs, at_least_s, now)

    def hand_off_lock(
        self, connection: BaseDatabaseWrapper, ack: Ack, plan: ClaimPlan, now: datetime | None
    ) -> HandoffResult | None:
        # Whatever the statement does, this process has jobs with locks: the slow path must expect them.
        self._locks_seen_at = time.monotonic()
        return self._lock_handoff.run(connection, ack, plan, now)

    def expects_lock_handoff(self, jid: str) -> bool:
        """Return whether this job received its lock from an ended job, and `hand_off_lock` was not tried for it."""
        return self._lock_handoff.expects(jid)

    has_lock_wait = True

    def lock_wait(self, seconds: float | None, *, of_transaction: bool = False) -> str:
        """Return the SET statement for `lock_timeout`, at least 1 ms: 0 would mean no limit."""
        value = "DEFAULT" if seconds is None else max(1, round(seconds * 1000))
        return f"SET {'LOCAL' if of_transaction else 'SESSION'} lock_timeout TO {value}"

    def keeps_session(self, connection: BaseDatabaseWrapper) -> bool:
        """Return False behind a pooler, with Django's own connection pool, and inside a transaction."""
        # Django's pool (5.1 and later) gives the session to other threads after each request.
        is_shared = bool(getattr(connection, "pool", None)) or not connection.autocommit
        return not is_shared and keeps_session(connection)

    def free_connections(self, cursor: CursorWrapper) -> dict[str, int]:
        """Count the sessions of others. Behind a pooler, whose limits SQL does not show, return no limit."""
        if is_pooled(cursor.connection):
            return {}
        cursor.execute(_FREE_CONNECTIONS)
        free: dict[str, int] = dict(cursor.fetchall())
        return free

    def was_ended(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether the session was ended, for example by `pg_terminate_backend` or a restart.

        Data at an idle connection may also be a notification or a changed setting, so the driver reads and classifies
        it. One read is not enough: the server sends a last message, and then the end of file, which alone is the end.
        """
        session = connection.connection
        if session.closed:
            return True
        try:
            while is_readable(session.fileno()):
                if hasattr(session, "pgconn"):  # psycopg 3
                    session.pgconn.consume_input()
                    session.pgconn.is_busy()  # parses what was read
                    if session.pgconn.status != 0:  # ConnStatus.OK
                        return True
                else:
                    session.poll()
                    if session.closed:
                        return True
        except Exception:  # noqa: BLE001 - of the driver, not of Django
            return True
        return False

    def can_join(self, connection: BaseDatabaseWrapper) -> bool:
        return can_join(connection)

    def count_ready(
        self,
        connection: BaseDatabaseWrapper,
        queues: Sequence[str],
        max_count: int,
        wids: Collection[str],
        now: datetime | None,
    ) -> tuple[dict[str, int], set[str]]:
        with connection.cursor() as cursor:
            [rows] = execute(cursor, [(COUNT_CLAIMABLE, [list(queues), max_count, list(wids), now])])
        return {name: count for name, count, is_wid in rows if not is_wid}, {wid for wid, _, is_wid in rows if is_wid}

    def end(
        self, connection: BaseDatabaseWrapper, acks: Sequence[Ack], now: datetime | None, pushed: Sequence[str] = ()
    ) -> AckResult:
        return self._build_ack_result(execute_on(connection, self._end_calls(connection, acks, now, pushed)))

    def end_last(self, connection: BaseDatabaseWrapper, ack: Ack, now: datetime | None) -> LastAckResult | None:
        """End a job and commit in one message.

        A job that its worker no longer holds makes the statement fail on purpose, so that the COMMIT behind it has no
        effect.
        """
        # Django finds no open transaction at its own commit, and does nothing (ADR 0007).
        try:
            results = execute_and_commit(connection, [end_last_call(connection, ack, now)])
        except DataError as error:
            # A failed cast raises DataError; the text distinguishes it from other invalid data.
            if NOT_HELD in str(error):
                raise ReservationLost from error
            raise
        if not results:
            return None
        [[(_, ended_at, permits)]] = results
        return LastAckResult(ended_at, permits)

    _lock_handoff = LockHandoff()
    # Threads write these without a mutex: each writes the present time, so the order does not matter.
    _locks_seen_at = float("-inf")
    _permits_seen_at = float("-inf")

    def _end_calls(
        self, connection: BaseDatabaseWrapper, acks: Sequence[Ack], now: datetime | None, pushed: Sequence[str]
    ) -> list[Call]:
        """Return the statements that end jobs.

        Statements for holders of locks and permits are included while such jobs have been seen here in the last
        LOCKS_IN_USE_S.
        """
        [_, values] = call = end_call(connection, acks, now, pushed)
        recently = time.monotonic() - LOCKS_IN_USE_S
        # The statements below mark lock rows for each other, which works within one transaction only.
        if not can_join(connection):
            return [call]
        calls = [call]
        # Locks before limiters, and jobs that wait for a lock last: the order of locks (ADR 0024).
        is_locking = self._locks_seen_at > recently
        if is_locking:
            calls.append((END_LOCKED, values[:3]))
        if self._permits_seen_at > recently:
            calls.append((END_WITH_PERMITS, values[:3]))
        if is_locking:
            calls.append((NEXT_OF_FREED, [True]))
        return calls

    def _build_ack_result(self, results: Sequence[Rows], next_holders: Sequence[tuple[Any, ...]] = ()) -> AckResult:
        """Build the result of `_end_calls`.

        A job that already received its lock in this transaction (`next_holders`) needs no notification of its queue.
        """
        end_rows, *other_results = results
        ended: Ended = {}
        remaining: set[str] = set()
        for jid, wid, attempt, queue, jobtype, ended_at, started_at, needs_more in end_rows:
            if needs_more:
                remaining.add(jid)
            else:
                ended[jid] = EndedRun(wid, attempt, queue, jobtype, (ended_at - started_at).total_seconds())
        # Some of these jobs probably hold locks: from now on, end such jobs in the same message.
        if remaining:
            self._locks_seen_at = time.monotonic()
        if not other_results:
            return AckResult(ended, remaining)
        readied = Counter[str]()
        skipped: set[str] = set()
        for rows in other_results:  # two columns: readied queues and skipped keys; else ends of holders
            if rows and len(rows[0]) == 2:
                readied = Counter(queue for queue, key in rows if key is None)
                # A Counter, because a queue may have become ready twice, and only one of these jobs been claimed.
                readied -= Counter(queue for _, _, queue in next_holders)
                skipped = {key for _, key in rows if key is not None}
            else:
                ended |= {jid: _to_ended_run(row) for jid, *row in rows}
        remaining -= ended.keys()
        return AckResult(ended, remaining, set(readied), skipped)

    def acquire_permits(
        self, connection: BaseDatabaseWrapper, claimed: Sequence[Reservation], now: datetime | None
    ) -> dict[str, str | None]:
        records = [
            {"jid": job.jid, "wid": job.wid, "attempt": job.attempt, "jobtype": job.jobtype, "queue": job.queue,
             "key": job.limit_key}
            for job in claimed
        ]  # fmt: skip
        with connection.cursor() as cursor:
            # As for CLAIM_ALONE: `synchronous_commit` must not be turned off for the caller's transaction.
            statement = ACQUIRE_PERMITS if connection.in_atomic_block else ACQUIRE_PERMITS_ALONE
            [rows] = execute(cursor, [(statement, [str(_json.encode(records), "utf-8"), now])])
        acquired: dict[str, str | None] = dict(rows)
        # A limiter without `concurrency` only counts starts: its jobs hold nothing that their end must release.
        if not acquired or any(acquired.values()):
            self._permits_seen_at = time.monotonic()
        return acquired

    def await_claims(self, connection: BaseDatabaseWrapper) -> None:
        """Wait until the transactions that hold a lock on the table of limits have ended, at most CLAIMED_WITHIN_S.

        Each claim reads that table, and so holds an ACCESS SHARE lock on it until it ends.
        """
        deadline = time.monotonic() + CLAIMED_WITHIN_S
        claims: set[str] | None = None
        while claims is None or (claims and time.monotonic() < deadline):
            # Sleep first: a claim may have its snapshot, but not its table lock yet.
            time.sleep(_POLL_S)
            with connection.cursor() as cursor:
                cursor.execute(_READERS_OF_LIMITS, [LIMIT])
                readers = {transaction for (transaction,) in cursor.fetchall()}
            # Only claims of the first poll count: later ones already read the new limit.
            claims = readers if claims is None else claims & readers

    def acquire_locks(
        self, connection: BaseDatabaseWrapper, claimed: Sequence[Reservation], lease_s: float, now: datetime | None
    ) -> dict[str, int]:
        self._locks_seen_at = time.monotonic()
        records = [{"key": job.lock_key, "jid": job.jid, "wid": job.wid, "attempt": job.attempt} for job in claimed]
        with connection.cursor() as cursor:
            [rows] = execute(cursor, [(TAKE, [str(_json.encode(records), "utf-8"), lease_s, now])])
        return dict(rows)

    def find_ready(self, cursor: CursorWrapper, keys: Sequence[str]) -> Rows:
        """Return the ready jobs of these keys, at most 1,000 of each."""
        [rows] = execute(cursor, [(READY, [list(keys)])])
        return rows

    def make_next_ready(self, connection: BaseDatabaseWrapper, keys: Sequence[str]) -> tuple[set[str], set[str]]:
        if not keys:
            return set(), set()
        with connection.cursor() as cursor:
            [rows] = execute(cursor, [(NEXT, [list(keys)])])
        return {queue for queue, key in rows if key is None}, {key for _, key in rows if key is not None}

    def mark_succeeded(self, cursor: CursorWrapper, ended: Sequence[tuple[int, Ack, int]], now: datetime) -> None:
        if ended:
            ids, results = [row_id for row_id, _, _ in ended], [ack.result for _, ack, _ in ended]
            execute(cursor, [(MARK_SUCCEEDED, [ids, results, now])])

    def lock_failed(self, connection: BaseDatabaseWrapper, jids: Collection[str], now: datetime | None) -> LockedRows:
        rows, [(clock,)] = execute_on(connection, lock_failed_calls(jids, now))
        return LockedRows(READ, rows, clock)

    def save(
        self,
        connection: BaseDatabaseWrapper,
        changed: Sequence[FailureColumns],
        day: datetime,
        tally: Tally,
        *,
        is_last: bool = False,
    ) -> None:
        """Write failed jobs and add to the counters in one message, with the COMMIT if `is_last`."""
        calls = save_calls(connection, changed, day, tally)
        # `execute_and_commit` does nothing on a connection's first uses or behind a pooler: then Django commits.
        if calls and not (is_last and execute_and_commit(connection, calls)):
            execute_on(connection, calls)

    def count_in(self, cursor: CursorWrapper, day: date, slot: int, tally: Tally) -> None:
        execute(cursor, [(ADD_TO_COUNTERS, [day, slot, tally.processed, tally.failed, tally.late])])


def _to_ended_run(row: Sequence[Any]) -> EndedRun:
    wid, attempt, queue, jobtype, now, started_at = row
    return EndedRun(wid, attempt, queue, jobtype, (now - started_at).total_seconds())


POSTGRESQL = PostgresqlDialect()
