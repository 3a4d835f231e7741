"""The plans that a session keeps for a stored function: each statement has one, whatever the table holds at first.

To read all of a small table, or all of its jobs of a key, is cheap; the plan is kept when the table has grown.
"""

import itertools
import json
import re
from collections import defaultdict

import pytest
from django.db import connection

from django_faktory.core.payloads import new_job
from django_faktory.models import Limit, Limiter
from django_faktory.store.dialects.base import insertion_order
from django_faktory.store.dialects.postgresql.calls import function
from django_faktory.store.dialects.postgresql.push import push_call
from django_faktory.store.dialects.values import FailureColumns
from tests.plans.recorder import Recorder
from tests.settings import VIA

psycopg = pytest.importorskip("psycopg", reason="psycopg 3 passes on the notices of auto_explain")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="about plans of PostgreSQL"),
    pytest.mark.skipif(VIA != "", reason="auto_explain is a setting of a session"),
]

PAGES = 400
"""The table has more than ten times as many."""

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
            WHERE id = ANY (ARRAY(
              SELECT id FROM django_faktory_job WHERE queue = 'default' ORDER BY id DESC LIMIT 5)) RETURNING jid"""
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
    return function("faktory_end_1"), [reports, 5, ["row-40"], None, False]


PARTS = [
    ["default", "default", "empty"],
    [-101, 0, -101],
    ["-infinity", "2020-01-01", "-infinity"],
    [0, 101, 101],
    None,
]


LATE = '[{"queue": "default", "xid": "3", "since": "2019-01-01"}]'


def claim(name="default", parts=PARTS, room=2):
    values = [[name, "empty"], [room, room], "w1", 3, 1, 60.0, None, 60.0, None, False]
    return function("faktory_claim_1"), [*values, *parts]


def hot(state="blocked"):
    """Return the jid of a job that holds a lock; two other jobs of its key have this state."""
    jid, key = held()[0], f"hot-{next(numbers)}"
    execute(
        f"""INSERT INTO django_faktory_joblock (lock_key, jid, attempt, wid, lease, acquired_at, expires_at, is_lapsed)
        VALUES ('{key}', '{jid}', 1, 'w1', '1 min', now(), now() + interval '1 min', FALSE)""",
        f"""UPDATE django_faktory_job SET lock_key = '{key}',
          lock_token = (SELECT id FROM django_faktory_joblock WHERE lock_key = '{key}') WHERE jid = '{jid}'""",
        f"""INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for,
          backtrace, enqueued_at, lock_key)
        SELECT '{key}-' || n, 't', 'hot', '{state}', 0, '', 25, 1800, 0, now(), '{key}'
        FROM generate_series(1, 2) AS n""",
    )
    return jid


def hand_off():
    """End the holder of a lock for which two other jobs wait."""
    values = [hot(), "w1", 1, None, ["hot"], "w1", 1, 60.0, None, 60.0, None]
    return function("faktory_hand_off_1"), values


def end_hot():
    reports = json.dumps([{"jid": hot(), "wid": "w1", "attempt": 1, "result": "1"}])
    return function("faktory_end_1"), [reports, 1, None, None, False]


def claim_hot(*, is_free):
    """Claim one of two jobs of a key."""
    hot("enqueued")
    if is_free:
        execute(f"UPDATE django_faktory_job SET lock_key = 'free-{next(numbers)}' WHERE queue = 'hot'")
    return claim("hot", [["hot"], [-101], ["-infinity"], [101], None], room=1)


def limited():
    """Store a limit of a task for which a job waits, and return the limiter's id."""
    limit, _ = Limit.objects.update_or_create(scope="task", name="t", defaults={"concurrency": 9})
    limiter, _ = Limiter.objects.update_or_create(
        limit=limit, scope="task", name="t", defaults={"concurrency": 9, "in_use": 3, "is_awaited": True}
    )
    execute(
        f"""INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for,
          backtrace, enqueued_at, limiter)
        VALUES ('limited-{next(numbers)}', 't', 'limited', 'blocked', 0, '', 25, 1800, 0, now(), {limiter.pk})"""
    )
    return limiter.pk


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
    "ended, with a lock": end_hot,
    "ended, with permits": lambda: end(result_ttl=60, permits=f"',{limited()},'"),
    "claimed, with permits": lambda: limited() and claim(),
    "claimed, with a lock": lambda: claim_hot(is_free=True),
    "claimed, without a lock": lambda: claim_hot(is_free=False),
    "claimed": lambda: Limit.objects.all().delete() and claim(),
    "prefetched": lambda: (
        function("faktory_prefetch_1"),
        [["default", "empty"], [2, 2], 1, 60.0, ["w1"], None, *PARTS],
    ),
    "bounds": lambda: (function("faktory_bounds_1"), [*PARTS[:3], LATE, True, ["default"]]),
    "handed off": hand_off,
    "failing": lambda: (function("faktory_failing_1"), [held()]),
    "saved": save,
    "waiting": lambda: (function("faktory_waiting_1"), [["default", "empty"], 5, ["w1"], None, *PARTS]),
    "finished": lambda: push_again(["row-10", "row-20", "row-30"], unique_for=60),
}


def execute(*statements):
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def grow(rows):
    execute(
        f"""INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for,
          backtrace, enqueued_at, finished_at, purge_at, lock_key)
        SELECT 'row-' || n, 't', 'default', CASE WHEN n % 10 = 0 THEN 'dead' ELSE 'enqueued' END, 0,
          repeat('x', 800), 25, 1800, 0, CASE WHEN n % 10 > 0 THEN now() END, CASE WHEN n % 10 = 0 THEN now() END,
          CASE WHEN n % 10 = 0 THEN now() END, CASE WHEN n % 2 = 0 THEN 'lock-' || n END
        FROM generate_series(1, {rows}) AS n""",
        f"""INSERT INTO django_faktory_joblock (lock_key, jid, attempt, wid, lease, acquired_at, expires_at, is_lapsed)
        SELECT 'taken-' || n, 'row-' || n, 1, 'w1', '1 min', now(), now() + interval '1 min', FALSE
        FROM generate_series(1, {rows}) AS n""",
    )


def shrink(rows, to):
    grow(rows)
    for table in GROWING:
        execute(f"DELETE FROM {table} WHERE id NOT IN (SELECT id FROM {table} ORDER BY id LIMIT {to})")


STATES = {
    "new": lambda: None,
    "vacuumed when empty": lambda: execute(*[f"VACUUM {table}" for table in GROWING]),
    **{f"{rows} rows": lambda rows=rows: grow(rows) for rows in (1, 5, 30, 300)},
    **{f"shrunk to {rows} rows": lambda rows=rows: shrink(3000, rows) for rows in (5, 30, 300)},
    "large": lambda: grow(60_000),
}
GROWING = ("django_faktory_job", "django_faktory_joblock")
TABLES = (*GROWING, "django_faktory_history", "django_faktory_limiter")


def record(recorder, state):
    """Run each function in a new session, with plans that the values do not change, and with others."""
    execute(*[f"TRUNCATE {table} CASCADE" for table in GROWING])
    STATES[state]()
    if "rows" in state or state == "large":
        execute(*[f"ANALYZE {table}" for table in GROWING])
    connection.close()
    if missing := recorder.start():
        pytest.skip(missing)
    for mode in ("force_generic_plan", "force_custom_plan"):
        execute(f"SET plan_cache_mode = {mode}")
        for make in CALLS.values():
            function, values = make()
            places = ", ".join(f"%s::{type_}" for type_ in function.types)
            with recorder.during(state), connection.cursor() as cursor:
                cursor.execute(f"SELECT * FROM {function.name}({places})", values)


@pytest.fixture
def recorder():
    recorder = Recorder()
    yield recorder
    execute(*[f"TRUNCATE {table} CASCADE" for table in GROWING])
    recorder.stop()


def limits_pages(lookup):
    """Return True if the condition has the first column of the index."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_get_indexdef(to_regclass(%s), 1, TRUE)", [lookup.index])
        [(column,)] = cursor.fetchall()
    return column and re.search(rf"\b{column}\b", lookup.condition)


def test_each_statement_has_one_plan_whatever_the_table_holds_when_a_session_makes_it(recorder):
    for state in STATES:
        record(recorder, state)
    plans = defaultdict(lambda: defaultdict(set))
    for statement in recorder.statements:
        plans[statement.sql][statement.lookups(*TABLES)].add(statement.where)
    assert len(plans) > 30
    assert [(sql, dict(found)) for sql, found in plans.items() if len(found) > 1] == []
    assert [(sql, scan) for sql, [scans, *_] in plans.items() for scan in scans if not limits_pages(scan)] == []


def test_a_call_for_a_few_jobs_reads_few_pages_of_a_large_table(recorder):
    record(recorder, "large")
    assert [str(statement) for statement in recorder.statements if statement.pages > PAGES] == []
