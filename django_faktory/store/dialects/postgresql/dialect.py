"""Dialect for PostgreSQL 15 and later: one statement, one round trip and one commit for each set.

`PostgresqlDialect` chooses the calls of an operation and reads their rows; the rules are in `functions/*.sql`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime

from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from ....core.payloads import Ack, Delivery, Reservation
from ....core.steps import StepRecord
from ....errors import ReservationLost
from ...database_errors import error_code
from ..base import JOB, LIMIT, Dialect, OrderedJobs, Sql
from ..bounds import Bounds
from ..cursor_hooks import has_own_cursor
from ..idle_sessions import was_ended
from ..values import AckResult, ClaimPlan, FailureColumns, HandoffResult, LockedRows, PushResult, Tally
from . import deltas
from .calls import call, function
from .failures import READ, lock_failed_calls, save_calls
from .jobs import NOT_HELD, claim_calls, end_call, read_ends
from .lock_handoff import LockHandoff
from .loop_connection import PostgresqlLoopConnection
from .partitions import PostgresqlPartitions
from .pipeline import Rows, has_psycopg3
from .pooler import is_pooled
from .prepared import Call, can_join, execute_and_commit, execute_on, keeps_session
from .push import lock_call, push_call, read_result
from .reservations import confirm, extend

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

# The state is compared with a sub-select: with a literal, the planner chooses the partial index of that state, and
# walks over all ready jobs to find those of one key. LIMIT bounds the work for a key with many ready jobs.
FIND_READY = f"""
SELECT ready.id, ready.lock_key, ready.queue, ready.sort_priority FROM unnest(%s::text[]) AS keys (key)
CROSS JOIN LATERAL (
  SELECT id, lock_key, queue, sort_priority FROM {JOB}
  WHERE lock_key = keys.key COLLATE "C" AND state = (SELECT 'enqueued')
  ORDER BY queue, sort_priority, enqueued_at, id LIMIT 1000) AS ready"""

_RESERVE_KEYS = "SELECT pg_advisory_xact_lock(hashtextextended(key, 0)) FROM unnest(%s::text[]) AS key"

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

    partitions = PostgresqlPartitions()
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

    def time_of_write(self, cursor: CursorWrapper) -> datetime:
        # The function runs first: claims must see that the transaction is open from this time on (ADR 0046).
        cursor.execute("SELECT CLOCK_TIMESTAMP() FROM pg_current_xact_id()")
        moment: datetime = cursor.fetchone()[0]
        return moment

    def insert(
        self, connection: BaseDatabaseWrapper, jobs: OrderedJobs, now: datetime | None, *, may_exist: bool = True
    ) -> PushResult:
        return read_result(execute_on(connection, [push_call(jobs, now, may_exist=may_exist)])[0])

    def lock_stored(self, connection: BaseDatabaseWrapper, jobs: OrderedJobs, now: datetime | None) -> None:
        execute_on(connection, [lock_call(jobs, now)])

    def claim(self, connection: BaseDatabaseWrapper, plan: ClaimPlan, now: datetime | None) -> list[Reservation]:
        """Reserve jobs, with one call for each wid of the plan, in one message."""
        is_own = _is_own(connection)
        calls, read = claim_calls(plan, now, is_lazy=is_own, is_own=is_own)
        return read(execute_on(connection, calls))

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

    def can_use_loop(self, connection: BaseDatabaseWrapper) -> bool:
        return has_psycopg3() and not has_own_cursor(connection)

    def take_for_loop(self, connection: BaseDatabaseWrapper) -> PostgresqlLoopConnection | None:
        return PostgresqlLoopConnection.take(connection)

    def build_exchange(
        self,
        connection: BaseDatabaseWrapper,
        jobs: OrderedJobs,
        acks: Sequence[Ack],
        plan: ClaimPlan,
        now: datetime | None,
    ) -> tuple[list[Call], Callable[[list[Rows]], tuple[AckResult, list[Reservation]]]]:
        """Return the calls of an exchange, and the function that reads their rows."""
        # Ends before inserts: they have locked the rows that these jobs replace, in one order with theirs (ADR 0024).
        calls = [end_call(acks, now, [job.jid for _, job in jobs] if jobs else ())] if acks else []
        calls += [push_call(jobs, now, may_exist=True)] if jobs else []
        # Acks and pushes must be on disk when they are answered (ADR 0043).
        claims_from = len(calls)
        read_claims = None
        if plan.slots or plan.prefetch_slots:
            is_own = _is_own(connection)
            claims, read_claims = claim_calls(plan, now, is_lazy=is_own and not calls, is_own=is_own)
            calls += claims

        def read(results: list[Rows]) -> tuple[AckResult, list[Reservation]]:
            claimed = read_claims(results[claims_from:]) if read_claims else []
            ending = read_ends(results[0], claimed) if acks else AckResult({}, set())
            if ending.handed:
                # Another job of its key is likely to follow such a job: try `hand_off_lock` at its end.
                self._lock_handoff.remember(ending.handed)
            if jobs and results[claims_from - 1]:
                ending = ending._replace(blocked={*ending.blocked, *read_result(results[claims_from - 1]).blocked})
            return ending, claimed

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
        return self._lock_handoff.run(connection, ack, plan, now)

    def expects_lock_handoff(self, jid: str) -> bool:
        """Return whether this job received its lock from an ended job, and `hand_off_lock` was not tried for it."""
        return self._lock_handoff.expects(jid)

    _lock_handoff = LockHandoff()

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
        return was_ended(connection.connection)

    def can_join(self, connection: BaseDatabaseWrapper) -> bool:
        return can_join(connection)

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
        bounds = bounds if bounds and now is None else Bounds()
        look = bounds.look(queues)
        rows = call(connection, "faktory_waiting_1", [list(queues), max_count, list(wids), now, *look.values])
        bounds.conclude(look, (), ())
        return {name: count for name, count, is_wid in rows if not is_wid}, {wid for wid, _, is_wid in rows if is_wid}

    def end(
        self, connection: BaseDatabaseWrapper, acks: Sequence[Ack], now: datetime | None, pushed: Sequence[str] = ()
    ) -> AckResult:
        [rows] = execute_on(connection, [end_call(acks, now, pushed)])
        return read_ends(rows, ())

    def end_last(self, connection: BaseDatabaseWrapper, ack: Ack, now: datetime | None) -> AckResult | None:
        """End a job and commit in one message.

        A job that its worker no longer holds makes the function fail, so that the COMMIT behind it has no effect.
        """
        # Django finds no open transaction at its own commit, and does nothing (ADR 0007).
        try:
            results = execute_and_commit(connection, [end_call([ack], now, is_last=True)])
        except DatabaseError as error:
            if error_code(error) == NOT_HELD:
                raise ReservationLost from error
            raise
        return read_ends(results[0], ()) if results else None

    def record_step(
        self, connection: BaseDatabaseWrapper, job: Reservation, step: StepRecord, now: datetime | None
    ) -> bool:
        values = [
            job.jid, job.wid, job.attempt, step.name, step.key, step.result, step.reached, step.done, step.total,
            step.is_finished, step.until, step.ran_s, now,
        ]  # fmt: skip
        calls: list[Call] = [(function("faktory_step_1"), values)]
        try:
            if not execute_and_commit(connection, calls):
                execute_on(connection, calls)
        except DatabaseError as error:
            if error_code(error) == NOT_HELD:
                return False
            raise
        return True

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

    def reserve_keys(self, cursor: CursorWrapper, keys: Sequence[str]) -> None:
        """Wait for claims that insert lock rows of these keys; later ones leave them alone (`faktory_acquire_1`)."""
        cursor.execute(_RESERVE_KEYS, [[*keys]])

    def find_ready(self, cursor: CursorWrapper, keys: Sequence[str]) -> Rows:
        """Return the ready jobs of these keys, at most 1,000 of each."""
        cursor.execute(FIND_READY, [list(keys)])
        rows: Rows = cursor.fetchall()
        return rows

    def make_next_ready(self, connection: BaseDatabaseWrapper, keys: Sequence[str]) -> tuple[set[str], set[str]]:
        if not keys:
            return set(), set()
        rows = call(connection, "faktory_ready_next_1", [list(keys)])
        return {name for kind, name, _ in rows if kind == "ready"}, {name for kind, name, _ in rows if kind == "key"}

    def mark_succeeded(self, cursor: CursorWrapper, ended: Sequence[tuple[int, Ack, int]], now: datetime) -> None:
        if ended:
            ids, results = [row_id for row_id, _, _ in ended], [ack.result for _, ack, _ in ended]
            cursor.execute("SELECT faktory_keep_1(%s::bigint[], %s::text[], %s)", [ids, results, now])

    def day_of(self, ended_at: datetime) -> object:
        return Sql("(SELECT day FROM faktory_day_1(%s) AS today (day))", [ended_at])

    def after(self, moment: str, seconds: str) -> str:
        return f"({moment} + make_interval(secs => {seconds}))"

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
        calls = save_calls(changed, day, tally)
        # `execute_and_commit` does nothing if a cursor is needed: then Django commits.
        if calls and not (is_last and execute_and_commit(connection, calls)):
            execute_on(connection, calls)

    def count(self, cursor: CursorWrapper, day: datetime, tally: Tally) -> None:
        execute_on(cursor.db, save_calls((), day, tally))

    own_mark = "pg_current_xact_id()"
    add_tail = ""
    current_deltas = deltas.CURRENT

    def needs_fold(self, connection: BaseDatabaseWrapper) -> bool:
        return deltas.is_due(connection)

    def fold(self, connection: BaseDatabaseWrapper) -> None:
        deltas.fold(connection)


def _is_own(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a message on this connection is a transaction of its own."""
    return connection.autocommit and not connection.in_atomic_block


POSTGRESQL = PostgresqlDialect()
