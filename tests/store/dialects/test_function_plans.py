"""The plans that a session keeps for a stored function: a call must not read a table from end to end once it has grown.

A session plans the statements of a function at their first uses. The table may be empty then, so that each plan reads
all of it at no cost, and hold many rows later. Pages are counted, not milliseconds, so that the load does not matter.
"""

import itertools
import json

import pytest
from django.db import connection

from django_faktory.core.payloads import new_job
from django_faktory.store.dialects.base import insertion_order
from django_faktory.store.dialects.postgresql.calls import function
from django_faktory.store.dialects.postgresql.push import push_call
from django_faktory.store.dialects.values import FailureColumns
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="about plans of PostgreSQL"),
]

ROWS = 60_000
PAGES = 600
"""A call for a few jobs reads fewer pages; the table has more than ten times as many."""

numbers = itertools.count()


def push(size=5, **custom):
    jobs = [new_job(jid=f"jid-{next(numbers)}", jobtype="t", args=[next(numbers)], custom=custom) for _ in range(size)]
    return push_call([(place, jobs[place]) for place in insertion_order(jobs)], None, may_exist=True)


def push_again(jids, **custom):
    jobs = [new_job(jid=jid, jobtype="t", args=[1], custom=custom) for jid in sorted(jids)]
    return push_call([*enumerate(jobs)], None, may_exist=True)


def held():
    """Make some jobs those of a worker that has not confirmed them, and return their jids."""
    with connection.cursor() as cursor:
        cursor.execute(
            """UPDATE django_faktory_job SET state = 'working', wid = 'w1', attempt = 1, claim = -1, started_at = now(),
              reserved_until = now(), finished_at = NULL, purge_at = NULL, lock_key = NULL
            WHERE id = ANY (ARRAY(SELECT id FROM django_faktory_job ORDER BY id DESC LIMIT 5)) RETURNING jid"""
        )
        return [jid for (jid,) in cursor.fetchall()]


def confirm():
    jids = held()
    return function("faktory_confirm_1"), [jids, [1] * len(jids), ["w1"] * len(jids), [0.0] * len(jids), None]


def extend():
    jids = held()
    return function("faktory_extend_1"), [jids, [1] * len(jids), ["w1"] * len(jids), 60.0, None]


def end(**columns):
    """End jobs whose rows have these columns."""
    reports = json.dumps([{"jid": jid, "wid": "w1", "attempt": 1, "result": "1"} for jid in held()])
    for column, value in columns.items():
        execute(f"UPDATE django_faktory_job SET {column} = {value} WHERE state = 'working'")
    return function("faktory_end_1"), [reports, 5, ["row-40"], 1, None, False]


PARTS = [
    ["default", "default", "empty"],
    [-101, 0, -101],
    ["-infinity", "2020-01-01", "-infinity"],
    [0, 101, 101],
    None,
]


LATE = '[{"queue": "default", "xid": "3", "since": "2019-01-01"}]'


def claim(name="default"):
    values = [[name, "empty"], [2, 2], "w1", 3, 1, 60.0, None, 60.0, None, False]
    return function("faktory_claim_1"), [*values, *PARTS]


def hand_off():
    """End the holder of a lock for which two other jobs wait."""
    jid = held()[0]
    number = next(numbers)
    execute(
        f"""INSERT INTO django_faktory_joblock (lock_key, jid, attempt, wid, lease, acquired_at, expires_at, is_lapsed)
        VALUES ('hot-{number}', '{jid}', 1, 'w1', '1 min', now(), now() + interval '1 min', FALSE)""",
        f"""UPDATE django_faktory_job SET lock_key = 'hot-{number}',
          lock_token = (SELECT id FROM django_faktory_joblock WHERE lock_key = 'hot-{number}') WHERE jid = '{jid}'""",
        f"""INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for,
          backtrace, enqueued_at, lock_key)
        SELECT 'hot-{number}-' || n, 't', 'hot', 'blocked', 0, '', 25, 1800, 0, now(), 'hot-{number}'
        FROM generate_series(1, 2) AS n""",
    )
    values = [jid, "w1", 1, None, ["hot"], "w1", 1, 1, 60.0, None, 60.0, None]
    return function("faktory_hand_off_1"), values


def save():
    """Write what is stored already."""
    columns = ", ".join(f"array_agg({name})" for name in FailureColumns._fields)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {columns} FROM django_faktory_job WHERE jid = ANY (%s)", [held()])
        return function("faktory_save_1"), cursor.fetchone()


CALLS = {
    "plain": push,
    "alone, unique": lambda: push(1, unique_for=60),
    "unique": lambda: push(unique_for=60),
    "alone, refused": lambda: push_again([f"other-{next(numbers)}"], unique_for=60),
    "locked": lambda: push(lock="mine"),
    "stored already": lambda: push_again(["row-1", "row-2", "row-3"]),
    "confirmed": confirm,
    "extended": extend,
    "ended": end,
    "ended, kept": lambda: end(result_ttl=60),
    "ended, with permits": lambda: end(result_ttl=60, permits="',1,'"),
    "claimed": claim,
    "prefetched": lambda: (
        function("faktory_prefetch_1"),
        [["default", "empty"], [2, 2], 1, 60.0, ["w1"], None, *PARTS],
    ),
    "bounds": lambda: (function("faktory_bounds_1"), [*PARTS[:3], LATE, True]),
    "handed off": hand_off,
    "failing": lambda: (function("faktory_failing_1"), [held()]),
    "saved": save,
    "waiting": lambda: (function("faktory_waiting_1"), [["default", "empty"], 5, ["w1"], None, *PARTS]),
    "finished": lambda: push_again(["row-10", "row-20", "row-30"], unique_for=60),
}


def pages(call):
    """Run a call, and return how many pages its statements read."""
    function, values = call
    places = ", ".join(f"%s::{type_}" for type_ in function.types)
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM {function.name}({places})", values)
        [[[found]]] = cursor.fetchall()
    return found["Plan"]["Shared Hit Blocks"] + found["Plan"]["Shared Read Blocks"]


def execute(*statements):
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def grow(rows=ROWS):
    execute(
        f"""INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for,
          backtrace, enqueued_at, finished_at, purge_at, lock_key)
        SELECT 'row-' || n, 't', 'default', CASE WHEN n % 10 = 0 THEN 'dead' ELSE 'enqueued' END, 0,
          repeat('x', 800), 25, 1800, 0, CASE WHEN n % 10 > 0 THEN now() END, CASE WHEN n % 10 = 0 THEN now() END,
          CASE WHEN n % 10 = 0 THEN now() END, CASE WHEN n % 2 = 0 THEN 'lock-' || n END
        FROM generate_series(1, {rows}) AS n"""
    )


@pytest.fixture(autouse=True)
def without_autovacuum():
    execute("ALTER TABLE django_faktory_job SET (autovacuum_enabled = off)")
    yield
    execute("ALTER TABLE django_faktory_job RESET (autovacuum_enabled)", "TRUNCATE django_faktory_job CASCADE")
    connection.close()


@pytest.mark.parametrize("is_analyzed", [False, True], ids=["not analyzed", "analyzed"])
@pytest.mark.parametrize("start", ["never vacuumed", "vacuumed when empty", "analyzed when small"])
def test_a_call_reads_few_pages_when_the_table_grows_and_is_emptied_under_the_session(is_analyzed, start):
    connection.close()  # a session without plans
    if start == "vacuumed when empty":
        execute("TRUNCATE django_faktory_job CASCADE", "VACUUM ANALYZE django_faktory_job")
    if start == "analyzed when small":
        grow(100)
        execute("ANALYZE django_faktory_job")
    for _ in range(7):  # the fifth use decides about the plan that is kept
        for make in CALLS.values():
            pages(make())
        if start != "analyzed when small":
            execute("DELETE FROM django_faktory_job")
    execute("DELETE FROM django_faktory_job")
    grow()
    for step in ("grown", "emptied", "grown again"):
        if step == "emptied":
            execute("DELETE FROM django_faktory_job")
        if step == "grown again":
            execute("DELETE FROM django_faktory_job", "VACUUM django_faktory_job")
            grow()
        if is_analyzed:
            execute("ANALYZE django_faktory_job")
        for name, make in CALLS.items():
            # The first call may plan again, and then reads up to 100 pages at each end of an index whose rows are
            # deleted; index entries are read again while a transaction anywhere may still see their rows. A plan that
            # reads the table does so at each call.
            wait_until(lambda make=make: pages(make()) <= PAGES, 20, what=f"{name}, {step}: at most {PAGES} pages")
