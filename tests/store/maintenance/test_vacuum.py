"""Storage parameters of the job table on PostgreSQL, and vacuum by the maintenance loop. Source: ADR 0009."""

import logging

import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction

from django_faktory.models import Job
from django_faktory.store.dialects.base import JOB
from django_faktory.store.maintenance import vacuum
from tests.bouncer import SHARED
from tests.factories import JobFactory
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"
on_postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="others clean up by themselves")


def parameters():
    with connection.cursor() as cursor:
        cursor.execute("SELECT reloptions FROM pg_class WHERE oid = 'django_faktory_job'::regclass")
        return set(cursor.fetchone()[0] or [])


def leave_dead_rows(count):
    Job.objects.bulk_create(JobFactory.many(count))
    Job.objects.all().delete()
    if connection.vendor == "postgresql":
        flush_statistics()


_OTHERS = """
SELECT COUNT(*) FILTER (WHERE state = 'idle'), COUNT(*) FILTER (WHERE state <> 'idle'), pg_stat_force_next_flush()
FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"""


def flush_statistics():
    """Flush the statistics of every session at once: otherwise they follow seconds later, or when the session ends.

    Behind any pooler, rows were written by another session than the one that reads the statistics, and the counts of
    earlier tests may not be flushed. Transactions that are open at the same time each have their own session.
    """
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(_OTHERS)
            idle, busy, _ = cursor.fetchone()
        # More connections than are available would wait for each other without end.
        others = [connection.copy() for _ in range(min(idle, SHARED - busy - 1))]
        try:
            for other in others:
                other.set_autocommit(False)
                with other.cursor() as cursor:
                    cursor.execute("SELECT pg_stat_force_next_flush()")
        finally:
            for other in others:
                other.rollback()
                other.close()


@pytest.fixture
def clean():
    """Start without dead rows in the statistics."""
    if connection.vendor == "postgresql":
        flush_statistics()
        vacuum.vacuum(using=USING)
        wait_until(lambda: vacuum.count_dead_rows(using=USING) == 0)


def vacuumer(*, min_rest_s=0, **options):
    """Return a vacuumer that does not pause after the vacuum of `clean`."""
    return vacuum.Vacuumer(USING, min_rest_s=min_rest_s, rest_factor=0, **options)


@on_postgresql
def test_the_job_table_has_storage_parameters_for_early_autovacuum():
    assert parameters() >= {
        "autovacuum_vacuum_scale_factor=0.01",
        "autovacuum_vacuum_threshold=10000",
        "autovacuum_vacuum_cost_delay=2",
        "autovacuum_vacuum_cost_limit=1000",
        "vacuum_index_cleanup=on",
    }


def test_the_migration_sets_and_resets_storage_parameters_on_postgresql_only(capsys):
    call_command("sqlmigrate", "django_faktory", "0001")
    forwards = capsys.readouterr().out
    call_command("sqlmigrate", "django_faktory", "0001", backwards=True)
    backwards = capsys.readouterr().out
    is_postgresql = connection.vendor == "postgresql"
    assert ("SET (autovacuum_vacuum_scale_factor = 0.01" in forwards) is is_postgresql
    assert ("RESET (autovacuum_vacuum_scale_factor, " in backwards) is is_postgresql


def test_a_few_dead_rows_start_no_vacuum(clean):
    leave_dead_rows(20)
    assert vacuumer().start_if_due() is False


@on_postgresql
def test_many_dead_rows_are_vacuumed_in_a_thread(clean):
    leave_dead_rows(60)
    wait_until(lambda: vacuum.count_dead_rows(using=USING) >= 60)
    tidier = vacuumer(min_dead_rows=50)
    assert tidier.start_if_due() is True
    tidier.join(30)
    wait_until(lambda: vacuum.count_dead_rows(using=USING) == 0)


@on_postgresql
def test_rows_visible_to_an_open_snapshot_are_not_vacuumed_repeatedly(clean):
    other = connections[USING].copy()
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT COUNT(*) FROM django_faktory_queue")
        leave_dead_rows(60)
        wait_until(lambda: vacuum.count_dead_rows(using=USING) >= 60)
        tidier = vacuumer(min_dead_rows=50)
        assert tidier.start_if_due() is True
        tidier.join(30)
        assert vacuum.count_dead_rows(using=USING) >= 60
        assert tidier.start_if_due() is False
    finally:
        other.close()


@on_postgresql
def test_all_nodes_pause_after_a_vacuum_by_any_node(clean):
    first, second, without_pause = (vacuumer(min_dead_rows=0, min_rest_s=rest_s) for rest_s in (1e9, 1e9, 0))
    first._vacuum()
    wait_until(lambda: vacuum.read_dead_rows(using=USING).vacuumed_s_ago < 30)
    assert [node.start_if_due() for node in (first, second, without_pause)] == [False, False, True]
    without_pause.join(30)


@on_postgresql
def test_the_pause_after_a_vacuum_grows_with_the_index_size():
    assert vacuum.DeadRows(vacuumed_s_ago=19, index_bytes=100_000_000).is_resting()
    assert not vacuum.DeadRows(vacuumed_s_ago=21, index_bytes=100_000_000).is_resting()
    assert not vacuum.DeadRows().is_resting(), "it was never vacuumed"


@on_postgresql
def test_a_vacuum_restores_the_cost_delay_of_its_session(clean):
    with connection.execute_wrapper(remember := Remembered()):
        vacuum.vacuum(using=USING)
    assert [sql.partition(" ")[0] for sql in remember.statements][-1] in ("RESET", "VACUUM")
    with connection.cursor() as cursor:
        cursor.execute("SHOW vacuum_cost_delay")
        assert cursor.fetchone() == ("0",)


class Remembered:
    """Record the statements of a session, in order."""

    def __init__(self):
        self.statements = []

    def __call__(self, execute, sql, params, many, context):
        self.statements.append(sql)
        return execute(sql, params, many, context)


@on_postgresql
def test_a_failed_vacuum_is_only_logged(caplog):
    def fail(execute, sql, params, many, context):
        return execute(sql.replace(JOB, "no_such_table"), params, many, context)

    # In this thread, whose connection the test can wrap.
    with connection.execute_wrapper(fail), caplog.at_level(logging.WARNING):
        vacuumer()._run()
    assert "step=vacuum" in caplog.text
    assert "no_such_table" in caplog.text
