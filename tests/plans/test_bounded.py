"""Repeated operations of nodes read a bounded part of the table of jobs, for any table size and any statistics.

All statements of maintenance, BEAT, INFO, /metrics and the admin's overview are recorded as PostgreSQL runs them.
`make soak` runs the tests on 2,000,000 jobs.
"""

import os

import pytest
from django.db import connection
from django.test import override_settings

from django_faktory.admin.overview import data
from django_faktory.core.lifecycle import State
from django_faktory.core.locket import locket
from django_faktory.core.mutation import Mutation
from django_faktory.core.payloads import Beat
from django_faktory.operations import statistics
from django_faktory.runtime.maintenance import Maintenance
from django_faktory.store import queues, scan, shared_reads, workers
from django_faktory.store.jobs import bulk
from django_faktory.store.statistics import bounded_counts, counts
from django_faktory.store.store import Store
from tests.plans import table
from tests.plans.recorder import Recorder
from tests.settings import KIND, VIA
from tests.waiting import wait_until

psycopg = pytest.importorskip("psycopg", reason="psycopg 3 passes on the notices of auto_explain")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(KIND != "postgresql", reason="the plans are PostgreSQL's"),
    pytest.mark.skipif(VIA != "", reason="auto_explain is a setting of a session"),
    pytest.mark.django_db(transaction=True),
]

USING = "default"
JOBS = int(os.environ.get("FAKTORY_PLANS_JOBS", "100000"))
FULL = 2_000_000
JOB = "django_faktory_job"

PAGES = 700 + 1300 * JOBS // FULL
"""Pages that a statement may read: 2,000 for the full table."""

PAGES_PER_ROW = 40
"""Pages for each row that a step locks or changes, about 500 at once.

The row's position is looked up in the table and in up to eight indexes, each three or four pages deep.
"""


UNBOUNDED = {"dead rows", "recount"}
"""Steps that are not recorded: VACUUM has no plan, and the daily recount reads all live jobs."""


def entry_points():
    """Yield the name and function of each operation that nodes run by the clock or on request.

    Reads come first, because changes to thousands of rows leave pages that a count must visit until they are vacuumed.
    """
    yield "BEAT", lambda: workers.beat(Store(USING), [Beat(wid=f"wid{n}", rss_kb=1) for n in range(10)])
    shared_reads.forget()
    yield "INFO", lambda: counts.snapshot(Store(USING))
    yield "latency", lambda: queues.latency(Store(USING), [f"queue{n}" for n in range(20)])
    yield "metrics", lambda: statistics.read(using=USING)
    yield "overview", lambda: data.read(using=USING)
    upkeep = Maintenance(USING)
    upkeep._listens_since = float("-inf")
    yield "look", upkeep._enqueue_due
    upkeep._check_all_at = 0
    yield "look around", upkeep._enqueue_due
    yield from ((step.name, step.work) for step in upkeep._steps if step.name not in UNBOUNDED)


@pytest.fixture
def recorder():
    recorder = Recorder()
    if missing := recorder.start():
        pytest.skip(missing)
    yield recorder
    recorder.stop()


def recorded(recorder, only=()):
    recorder.statements.clear()
    with override_settings(FAKTORY={"LOCKET": locket()}):
        for name, work in entry_points():
            if not only or name in only:
                with recorder.during(name):
                    work()
    return list(recorder.statements)


def run(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql)


def vacuum(options=""):
    """Vacuum the table, as autovacuum does after many changes; counts rely on that.

    Repeat it until no other transaction prevents pages from becoming all-visible.
    """

    def is_done():
        run(f"VACUUM {f'({options})' if options else ''} {JOB}")
        with connection.cursor() as cursor:
            cursor.execute("SELECT relallvisible >= relpages * 0.99 FROM pg_class WHERE oid = %s::regclass", [JOB])
            return cursor.fetchone()[0]

    wait_until(is_done, timeout_s=60)  # other sessions, whose snapshots it waits for, are slow on a busy machine


def too_much(statements):
    def is_within(one):
        return one.pages <= PAGES + PAGES_PER_ROW * one.changed and not one.reads_whole(JOB)

    return [str(one) for one in statements if not is_within(one)]


def test_repeated_statements_read_a_bounded_part_of_a_large_table(recorder):
    run("SET synchronous_commit = off")
    table.fill(1, 1000, total=JOBS)
    run("ANALYZE")  # while the table is small: the planner may keep these statistics for hours
    table.fill(1001, JOBS, total=JOBS)
    table.fill_around()

    grown = recorded(recorder, only={"look", "look around", "reservations", "expired jobs", "purge", "BEAT"})
    assert too_much(grown) == []

    # Pages that are not vacuumed yet are visited for each counted row: a few thousand at most.
    counted = recorded(recorder, only={"overview"})
    assert [str(one) for one in counted if one.reads_whole(JOB)] == []

    vacuum()  # column statistics stay those of the small table
    vacuumed = recorded(recorder)
    found = too_much(vacuumed)
    assert found == [], "\n".join(found)

    vacuum("ANALYZE")
    known = recorded(recorder)
    assert too_much(known) == []

    assert {one.where for one in vacuumed} >= {"look", "expired jobs", "purge", "blocked jobs", "jobs without keys"}
    assert min(len(grown), len(vacuumed), len(known)) > 15


def test_a_count_that_ends_early_follows_the_index_of_its_set(recorder):
    """Without the order of the index the planner reads the table, in which the jobs of a set may come last."""
    table.fill(1, 2000, total=2000)
    run("ANALYZE")
    with recorder.during("count"):
        bounded_counts.counts([scan.in_index_order(State.ENQUEUED, using=USING)], max_count=10, using=USING)
    [counted] = recorder.statements
    assert not counted.reads_whole(JOB), str(counted)


COMMANDS = {
    "MUTATE clear dead": lambda: bulk.mutate(Store(USING), Mutation(command="clear", target="dead")),
    "MUTATE kill scheduled": lambda: bulk.mutate(
        Store(USING), Mutation(command="kill", target="scheduled", jobtype="shop.tasks.task3")
    ),
    "QUEUE REMOVE": lambda: bulk.remove_queues(Store(USING), ["queue0"]),
    "FLUSH": lambda: bulk.flush(Store(USING)),
}


def test_bulk_commands_read_job_ids_in_portions(recorder):
    table.fill(1, JOBS // 2, total=JOBS // 2)
    table.fill_around()
    vacuum("ANALYZE")
    for name, command in COMMANDS.items():
        with recorder.during(name):
            steps = list(command())
        assert len(steps) > 1, name
    assert {one.where for one in recorder.statements} == set(COMMANDS)
    # A filter reads each row of a portion: its entry in the index of ids, several pages deep, and its page.
    most = 4 * scan.PORTION + PAGES
    large = [str(one) for one in recorder.statements if one.pages > most or one.rows > scan.PORTION]
    assert large == [], "\n".join(large)


def test_the_recorder_detects_a_full_table_scan(recorder):
    table.fill(1, 2000, total=2000)
    with recorder.during("test"), connection.cursor() as cursor:
        cursor.execute(f"SELECT COUNT(*) FROM {JOB} WHERE payload = ''")
    [statement] = recorder.statements
    assert statement.reads_whole(JOB)
    assert statement.pages > 10
    assert len(too_much([statement])) == 1


def test_the_recorder_counts_rows_that_a_statement_changes(recorder):
    table.fill(1, 2000, total=2000)
    with recorder.during("test"), connection.cursor() as cursor:
        cursor.execute(f"UPDATE {JOB} SET sort_priority = 1 WHERE id IN (SELECT id FROM {JOB} ORDER BY id LIMIT 7)")
    # The other statement is that of the trigger that counts jobs by state and queue: it finds no change.
    assert sorted(statement.changed for statement in recorder.statements) == [0, 7]
