"""The plans that a session keeps for a stored function: a call must not read a table from end to end once it has grown.

A session plans the statements of a function at their first uses. The table may be empty then, so that each plan reads
all of it at no cost, and hold many rows later. Pages are counted, not milliseconds, so that the load does not matter.
"""

import itertools

import pytest
from django.db import connection

from django_faktory.core.payloads import new_job
from django_faktory.store.dialects.base import insertion_order
from django_faktory.store.dialects.postgresql.calls import function
from django_faktory.store.dialects.postgresql.push import push_call
from django_faktory.store.dialects.values import FailureColumns

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
              reserved_until = now(), finished_at = NULL, purge_at = NULL
            WHERE id = ANY (ARRAY(SELECT id FROM django_faktory_job ORDER BY id DESC LIMIT 5)) RETURNING jid"""
        )
        return [jid for (jid,) in cursor.fetchall()]


def confirm():
    jids = held()
    return function("faktory_confirm_1"), [jids, [1] * len(jids), ["w1"] * len(jids), [0.0] * len(jids), None]


def extend():
    jids = held()
    return function("faktory_extend_1"), [jids, [1] * len(jids), ["w1"] * len(jids), 60.0, None]


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
    "failing": lambda: (function("faktory_failing_1"), [held()]),
    "saved": save,
    "waiting": lambda: (function("faktory_waiting_1"), [["default", "empty"], 5, ["w1"], None]),
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


def grow():
    execute(
        f"""INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for,
          backtrace, enqueued_at, finished_at, purge_at, lock_key)
        SELECT 'row-' || n, 't', 'default', CASE WHEN n % 10 = 0 THEN 'succeeded' ELSE 'enqueued' END, 0,
          repeat('x', 800), 25, 1800, 0, CASE WHEN n % 10 > 0 THEN now() END, CASE WHEN n % 10 = 0 THEN now() END,
          CASE WHEN n % 10 = 0 THEN now() END, CASE WHEN n % 2 = 0 THEN 'lock-' || n END
        FROM generate_series(1, {ROWS}) AS n"""
    )


@pytest.fixture(autouse=True)
def without_autovacuum():
    execute("ALTER TABLE django_faktory_job SET (autovacuum_enabled = off)")
    yield
    execute("ALTER TABLE django_faktory_job RESET (autovacuum_enabled)", "TRUNCATE django_faktory_job CASCADE")
    connection.close()


@pytest.mark.parametrize("is_analyzed", [False, True], ids=["not analyzed", "analyzed"])
@pytest.mark.parametrize("is_vacuumed", [False, True], ids=["never vacuumed", "vacuumed when empty"])
def test_a_call_reads_few_pages_when_the_table_grows_and_is_emptied_under_the_session(is_analyzed, is_vacuumed):
    connection.close()  # a session without plans
    if is_vacuumed:
        execute("TRUNCATE django_faktory_job CASCADE", "VACUUM ANALYZE django_faktory_job")
    for _ in range(7):  # the fifth use decides about the plan that is kept
        for make in CALLS.values():
            pages(make())
        execute("DELETE FROM django_faktory_job")
    read = {}
    grow()
    for step in ("grown", "emptied", "grown again"):
        if step == "emptied":
            execute("DELETE FROM django_faktory_job")
        if step == "grown again":
            execute("DELETE FROM django_faktory_job", "VACUUM django_faktory_job")
            grow()
        if is_analyzed:
            execute("ANALYZE django_faktory_job")
        # Of two calls the cheaper one: the first may plan again, and the planner reads up to 100 pages to find each end
        # of an index whose rows are deleted. A plan that reads the table does so in both.
        read |= {(step, name): min(pages(make()), pages(make())) for name, make in CALLS.items()}
    assert {place: count for place, count in read.items() if count > PAGES} == {}
