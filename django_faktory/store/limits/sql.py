"""Statements of limiters (ADR 0016): lock and write their rows, give permits, block and unblock jobs, a set at a time.

Used by `limiters` inside its transactions. The SQL is the same for all databases; only the clause that locks rows
differs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from django.db.backends.utils import CursorWrapper

from ...core.limits import Allowance, LimiterState, parse_permits
from ..dialects.base import JOB, LIMITER, Dialect, marks, utc

HEAD = 500
"""Jobs at the head of a queue that are examined together when a limiter is full."""

_LIMITER = (
    "g.id, g.scope, g.name, g.concurrency, g.rate, g.per, g.burst, g.is_paused, g.in_use, g.tokens, g.filled_at,"
    " g.opens_at, g.is_awaited"
)
_WRITTEN = ("in_use", "tokens", "filled_at", "opens_at", "is_awaited")
# The order of claims, so that the jobs of a limiter become ready in the order in which they would have started.
_IN_ORDER = "ORDER BY sort_priority, enqueued_at, id"


def lock_by_name(cursor: CursorWrapper, dialect: Dialect, names: Collection[tuple[str, str]]) -> list[LimiterState]:
    """Return the limiters of these scopes and names, locked in the order of their ids (ADR 0024)."""
    ordered = sorted(names)
    pairs = ", ".join(["(%s, %s)"] * len(ordered))
    return _lock(cursor, dialect, f"(g.scope, g.name) IN ({pairs})", [value for pair in ordered for value in pair])


def lock_by_id(cursor: CursorWrapper, dialect: Dialect, ids: Collection[int]) -> list[LimiterState]:
    """Return the limiters with these ids, locked in the order of their ids."""
    return _lock(cursor, dialect, f"g.id IN ({marks(ids)})", sorted(ids)) if ids else []


def _lock(cursor: CursorWrapper, dialect: Dialect, condition: str, values: Sequence[Any]) -> list[LimiterState]:
    cursor.execute(f"SELECT {_LIMITER} FROM {LIMITER} AS g WHERE {condition} ORDER BY g.id{dialect.plain_lock}", values)
    return [_build_state(row) for row in cursor.fetchall()]


def _build_state(row: Sequence[Any]) -> LimiterState:
    id_, scope, name, concurrency, rate, per, burst, is_paused, in_use, tokens, filled_at, opens_at, is_awaited = row
    return LimiterState(
        id=id_,
        scope=scope,
        name=name,
        allows=Allowance(concurrency=concurrency, rate=rate, per=per, burst=burst),
        # SQLite and MariaDB return booleans as integers, and times without a zone.
        is_paused=bool(is_paused),
        in_use=in_use,
        tokens=float(tokens),
        filled_at=utc(filled_at),
        opens_at=None if opens_at is None else utc(opens_at),
        is_awaited=bool(is_awaited),
    )


def save(cursor: CursorWrapper, limiters: Sequence[LimiterState]) -> None:
    """Write the counts of limiters in one statement."""
    if not limiters:
        return
    adapt = cursor.db.ops.adapt_datetimefield_value
    rows = [
        (limiter.in_use, limiter.tokens, adapt(limiter.filled_at), adapt(limiter.opens_at), limiter.is_awaited)
        for limiter in limiters
    ]
    # The usual case: a plain UPDATE, without CASE.
    if len(limiters) == 1:
        changes = ", ".join(f"{column} = %s" for column in _WRITTEN)
        cursor.execute(f"UPDATE {LIMITER} SET {changes} WHERE id = %s", [*rows[0], limiters[0].id])
        return
    # One statement for all: each further round trip would keep the limiters locked for longer.
    cases = " ".join(["WHEN %s THEN %s"] * len(limiters))
    changes = ", ".join(f"{column} = CASE id {cases} ELSE {column} END" for column in _WRITTEN)
    values = [
        value
        for place in range(len(_WRITTEN))
        for limiter, row in zip(limiters, rows, strict=True)
        for value in (limiter.id, row[place])
    ]
    cursor.execute(
        f"UPDATE {LIMITER} SET {changes} WHERE id IN ({marks(limiters)})",
        [*values, *(limiter.id for limiter in limiters)],
    )


def lock_claimed(cursor: CursorWrapper, dialect: Dialect, jids: Collection[str]) -> dict[str, tuple[int, str, int]]:
    """Return id, wid and attempt of these jobs that were claimed and have no permits yet; their rows are locked.

    Rows are found by jid alone: with the state in the condition, PostgreSQL might walk over every job that was working
    in the last minute (ADR 0043).
    """
    cursor.execute(
        f"SELECT jid, id, wid, attempt, state, permits FROM {JOB} WHERE jid IN ({marks(jids)})"
        f" ORDER BY id{dialect.plain_lock}",
        sorted(jids),
    )
    return {
        jid: (row_id, wid, attempt)
        for jid, row_id, wid, attempt, state, permits in cursor.fetchall()
        if state == "working" and permits == ""
    }


def record_permits(cursor: CursorWrapper, permits: Mapping[int, str | None]) -> None:
    """Record the permits of these jobs, so that they may be delivered."""
    # A `unique_until_start` key is released when the job has everything it needs, its lock included.
    starts = "unique_until_start AND (lock_key IS NULL OR lock_token IS NOT NULL)"
    _set_each(cursor, "permits", permits, f"unique_key = CASE WHEN {starts} THEN NULL ELSE unique_key END")


def undo_claims(cursor: CursorWrapper, limiter_ids: Mapping[int, int | None]) -> None:
    """Undo the claims of these rows: block each at its limiter, or enqueue it again if the limiter is None."""
    # The claim counted an attempt; the job never ran, so the count is corrected too.
    undo_columns = (
        "attempt = attempt - 1, wid = '', started_at = NULL, reserved_until = NULL, permits = NULL, lock_token = NULL"
    )
    to_block = {row_id: limiter_id for row_id, limiter_id in limiter_ids.items() if limiter_id is not None}
    _set_each(cursor, "limiter", to_block, f"state = 'blocked', {undo_columns}")
    to_enqueue = [row_id for row_id, limiter_id in limiter_ids.items() if limiter_id is None]
    if to_enqueue:
        cursor.execute(
            f"UPDATE {JOB} SET state = 'enqueued', is_returned = TRUE, {undo_columns}"
            f" WHERE id IN ({_list_ids(to_enqueue)})"
        )


def _set_each(cursor: CursorWrapper, column: str, values: Mapping[int, Any], other_columns: str) -> None:
    """Set a column of each job to its own value, and other columns to the same for all, in one statement."""
    if not values:
        return
    distinct = set(values.values())
    if len(distinct) == 1:
        value, params = "%s", [distinct.pop()]
    else:
        value = f"CASE id {' '.join(f'WHEN {int(row_id)} THEN %s' for row_id in values)} ELSE {column} END"
        params = list(values.values())
    cursor.execute(f"UPDATE {JOB} SET {column} = {value}, {other_columns} WHERE id IN ({_list_ids(values)})", params)


def _list_ids(ids: Iterable[int]) -> str:
    """Return the ids of rows as SQL text.

    psycopg takes 4 to 5 µs of Python for each parameter that it writes into the statement: 2.2 ms for 500 ids.
    """
    return ", ".join(str(int(row_id)) for row_id in ids)


def block_head(
    cursor: CursorWrapper, dialect: Dialect, queue: str, *, tasks: Mapping[str, int], keys: Mapping[str, int]
) -> None:
    """Block jobs at the head of a queue if their limiters are full.

    `tasks` and `keys` map jobtypes and limit keys to the ids of full limiters. Jobs that their limiter has just
    unblocked are skipped, and so are rows that another transaction is claiming.
    """
    cursor.execute(
        f"SELECT id, jobtype, limit_key, limiter FROM {JOB}"
        f" WHERE state = 'enqueued' AND queue = %s {_IN_ORDER} LIMIT %s",
        [queue, HEAD],
    )
    to_block = {
        row_id: full_limiter
        for row_id, jobtype, key, limiter in cursor.fetchall()
        if (full_limiter := tasks.get(jobtype) or keys.get(key or "")) is not None and full_limiter != limiter
    }
    if to_block:
        cursor.execute(
            f"SELECT id FROM {JOB} WHERE id IN ({_list_ids(to_block)}) AND state = 'enqueued'{dialect.skip_lock}"
        )
        # Only rows to be blocked are locked, and not waited for: another transaction may be claiming them.
        to_block = {row_id: to_block[row_id] for (row_id,) in cursor.fetchall()}
        _set_each(cursor, "limiter", to_block, "state = 'blocked'")


def unblock_first(
    cursor: CursorWrapper, dialect: Dialect, limiter_id: int, room: int
) -> tuple[dict[str, int], bool, bool]:
    """Make the first `room` jobs blocked at a limiter ready, in each queue.

    Returns how many became ready by queue, whether more are blocked, and whether a row was skipped that another
    transaction has locked.
    """
    counts: dict[str, int] = {}
    has_more = has_skipped = False
    for queue in _iterate_queues(cursor, limiter_id):
        cursor.execute(
            f"SELECT id, state FROM {JOB} WHERE limiter = %s AND queue = %s {_IN_ORDER} LIMIT %s{dialect.skip_lock}",
            [limiter_id, queue, room + 1],  # one more, to see whether jobs remain blocked
        )
        rows = cursor.fetchall()
        # Jobs that were unblocked earlier and are not claimed yet still count: each takes one of the free permits.
        ids = [row_id for row_id, state in rows[:room] if state == "blocked"]
        if len(rows) > room:
            has_more = True
        elif dialect.skip_lock and _has_blocked(cursor, limiter_id, queue, ids):
            has_more = has_skipped = True
        if ids:
            cursor.execute(f"UPDATE {JOB} SET state = 'enqueued', is_returned = TRUE WHERE id IN ({_list_ids(ids)})")
            counts[queue] = len(ids)
    return counts, has_more, has_skipped


def _has_blocked(cursor: CursorWrapper, limiter_id: int, queue: str, excluded: Sequence[int]) -> bool:
    excluding = f" AND id NOT IN ({_list_ids(excluded)})" if excluded else ""
    cursor.execute(
        f"SELECT 1 FROM {JOB} WHERE limiter = %s AND queue = %s AND state = 'blocked'{excluding} LIMIT 1",
        [limiter_id, queue],
    )
    return cursor.fetchone() is not None


def _iterate_queues(cursor: CursorWrapper, limiter_id: int) -> Iterator[str]:
    """Yield the queues of the jobs at a limiter; each step is one index lookup."""
    queue = ""
    while True:
        cursor.execute(
            f"SELECT queue FROM {JOB} WHERE limiter = %s AND queue > %s ORDER BY queue LIMIT 1", [limiter_id, queue]
        )
        row = cursor.fetchone()
        if row is None:
            return
        queue = row[0]
        yield queue


def find_referenced_limiters(cursor: CursorWrapper) -> Iterator[int]:
    """Yield the ids of the limiters that jobs refer to; each step is one index lookup."""
    # SELECT DISTINCT would read the whole index; there are few limiters, and any number of jobs at each.
    limiter_id = 0
    while True:
        cursor.execute(f"SELECT limiter FROM {JOB} WHERE limiter > %s ORDER BY limiter LIMIT 1", [limiter_id])
        row = cursor.fetchone()
        if row is None:
            return
        limiter_id = row[0]
        yield limiter_id


def is_referenced(cursor: CursorWrapper, limiter_id: int) -> bool:
    """Return whether jobs refer to this limiter."""
    cursor.execute(f"SELECT 1 FROM {JOB} WHERE limiter = %s LIMIT 1", [limiter_id])
    return cursor.fetchone() is not None


def unblock_portion(cursor: CursorWrapper, dialect: Dialect, limiter_id: int, limit: int) -> tuple[int, set[str]]:
    """Unblock jobs of a deleted limiter, at most `limit`; return their number and their queues."""
    cursor.execute(f"SELECT id, queue FROM {JOB} WHERE limiter = %s LIMIT %s{dialect.skip_lock}", [limiter_id, limit])
    rows = cursor.fetchall()
    if rows:
        ids = [row_id for row_id, _ in rows]
        cursor.execute(
            f"UPDATE {JOB} SET state = 'enqueued', is_returned = TRUE, limiter = NULL WHERE id IN ({_list_ids(ids)})"
            " AND state IN ('blocked', 'enqueued')"
        )
    return len(rows), {queue for _, queue in rows}


def count_holders(cursor: CursorWrapper, limiter_id: int) -> int:
    """Return how many running jobs hold a permit of this limiter."""
    # Commas on both sides let LIKE match an id only as a whole.
    cursor.execute(f"SELECT COUNT(*) FROM {JOB} WHERE state = 'working' AND permits LIKE %s", [f"%,{limiter_id},%"])
    count: int = cursor.fetchone()[0]
    return count


RunningJobs = tuple[str, str, str | None, str | None, int]
"""Queue, jobtype, limit key and permits of running jobs, and their number."""


def count_running_jobs(cursor: CursorWrapper) -> list[RunningJobs]:
    """Count the running jobs that need no further permit, by queue, jobtype, limit key and permits."""
    cursor.execute(
        # Empty `permits` mark a claimed job that has yet to acquire them; NULL marks one that no limit concerned.
        f"SELECT queue, jobtype, limit_key, permits, COUNT(*) FROM {JOB}"
        " WHERE state = 'working' AND (permits IS NULL OR permits <> '') GROUP BY queue, jobtype, limit_key, permits"
    )
    rows: list[RunningJobs] = cursor.fetchall()
    return rows


_COLUMN_OF_SCOPE = {"queue": "queue", "task": "jobtype", "key": "limit_key"}


def lock_without_permit(
    cursor: CursorWrapper, dialect: Dialect, limiter_id: int, after: int, limit: int
) -> list[tuple[int, str | None]]:
    """Return id and permits of running jobs that this limiter applies to and that hold none of its permits.

    Their rows are locked by id, before the limiter's. Jobs that are about to acquire their permits are included: the
    lock waits for such a transaction to end.
    """
    cursor.execute(f"SELECT scope, name FROM {LIMITER} WHERE id = %s", [limiter_id])
    row = cursor.fetchone()
    if row is None:
        return []
    scope, name = row
    cursor.execute(
        f"SELECT id, permits FROM {JOB} WHERE state = 'working' AND {_COLUMN_OF_SCOPE[scope]} = %s AND id > %s"
        f" AND (permits IS NULL OR permits NOT LIKE %s) ORDER BY id LIMIT %s{dialect.plain_lock}",
        [name, after, f"%,{limiter_id},%", limit],
    )
    rows: list[tuple[int, str | None]] = cursor.fetchall()
    return rows


def give_permits(cursor: CursorWrapper, limiter_id: int, rows: Sequence[tuple[int, str | None]]) -> int:
    """Give permits of a limiter to these locked jobs; return the number given.

    Jobs that have yet to acquire their permits are skipped. Ids of deleted limiters are dropped from `permits`: a job
    holds permits of at most three limiters, which fit into the column.
    """
    permits_by_id = {row_id: parse_permits(permits) for row_id, permits in rows if permits != ""}
    if not permits_by_id:
        return 0
    permit_ids = sorted({permit_id for permits in permits_by_id.values() for permit_id in permits})
    valid_ids = {limiter_id}
    if permit_ids:
        cursor.execute(f"SELECT id FROM {LIMITER} WHERE id IN ({marks(permit_ids)})", permit_ids)
        valid_ids |= {row_id for (row_id,) in cursor.fetchall()}
    texts = {
        row_id: f",{','.join(str(permit_id) for permit_id in (*permits, limiter_id) if permit_id in valid_ids)},"
        for row_id, permits in permits_by_id.items()
    }
    _set_each(cursor, "permits", texts, "limiter = NULL")
    return len(texts)
