"""The state in which a job leaves its thread's database connections, on a real database."""

import asyncio
import threading

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import DatabaseError, connection, connections, transaction
from django.db.backends.signals import connection_created
from django.test import override_settings

from django_faktory.brokers import get_broker
from django_faktory.core.payloads import Ack, Reservation, new_job
from django_faktory.worker.db_cleanup import in_transaction, reset_connections, set_up_own_connections
from django_faktory.worker.execution import prepare
from tests.project import tasks
from tests.project.models import Mark
from tests.settings import VIA

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]


def ran(task, *args):
    job = new_job(jid="0123456789", jobtype=task.jobtype, args=args, result_ttl=60)
    return prepare(Reservation(jid=job.jid, queue="default", text=job.text, wid="w1", attempt=1)).run(get_broker())


@pytest.fixture
def in_thread():
    """Call functions in sequence in one new thread, as a worker's thread would, and close its connections."""

    def call(*functions):
        def target():
            try:
                answers.extend(function() for function in functions)
            finally:
                connections.close_all()

        answers = []
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        return answers

    return call


def test_a_healthy_connection_is_reused_regardless_of_conn_max_age(in_thread):
    def identity():
        connection.ensure_connection()
        return connection.connection

    assert settings.DATABASES["default"].get("CONN_MAX_AGE", 0) == 0
    first, *_, last = in_thread(identity, lambda: ran(tasks.writes_mark, "a"), lambda: ran(tasks.noop), identity)
    assert first is last
    assert Mark.objects.count() == 1


def test_a_transaction_left_open_is_rolled_back_and_its_job_fails(in_thread):
    def is_clean():
        return not connection.in_atomic_block and Mark.objects.count() == 0

    report, clean = in_thread(lambda: ran(tasks.leaves_transaction_open, "never seen"), is_clean)
    assert report.errtype == "django.db.transaction.TransactionManagementError"
    assert "left a transaction open on 'default'; it was rolled back" in report.message
    assert clean
    assert not Mark.objects.exists()


def test_a_transaction_is_rolled_back_on_a_connection_that_replaces_a_removed_one(in_thread):
    """As if a job before had removed it: the list of this thread's connections is kept from job to job."""

    def remove():
        connection.close()
        del connections["default"]

    _, _, report, is_open = in_thread(
        lambda: ran(tasks.writes_mark, "kept"),
        remove,
        lambda: ran(tasks.leaves_transaction_open, "never seen"),
        lambda: connection.in_atomic_block,
    )
    assert report.errtype == "django.db.transaction.TransactionManagementError"
    assert not is_open
    assert [mark.text for mark in Mark.objects.all()] == ["kept"]


def test_a_failure_inside_an_open_transaction_keeps_its_error_type(in_thread):
    [report, clean] = in_thread(lambda: ran(tasks.opens_transaction_and_fails), lambda: not connection.in_atomic_block)
    assert report.errtype == "builtins.ValueError"
    assert clean


def autocommit():
    connection.ensure_connection()
    return connection.get_autocommit()


@pytest.mark.parametrize(("then", "rows"), [("commits", 1), ("rolls back", 0)])
def test_autocommit_is_restored_for_the_next_job(in_thread, then, rows):
    report, is_on = in_thread(lambda: ran(tasks.switches_autocommit_off, "manually", then), autocommit)
    assert isinstance(report, Ack)
    assert is_on
    assert Mark.objects.count() == rows


def test_a_task_that_disables_autocommit_and_does_not_commit_fails(in_thread):
    report, is_on, following = in_thread(
        lambda: ran(tasks.switches_autocommit_off, "never seen"), autocommit, lambda: ran(tasks.writes_mark, "next")
    )
    assert report.errtype == "django.db.transaction.TransactionManagementError"
    assert "left a transaction open on 'default'; it was rolled back" in report.message
    assert is_on
    assert isinstance(following, Ack)
    assert [mark.text for mark in Mark.objects.all()] == ["next"]


def test_a_failure_after_disabling_autocommit_keeps_its_error_type(in_thread):
    report, is_on = in_thread(lambda: ran(tasks.switches_autocommit_off, "never seen", "fails"), autocommit)
    assert report.errtype == "builtins.ValueError"
    assert is_on
    assert not Mark.objects.exists()


def test_a_connection_with_a_database_error_is_replaced(in_thread):
    def identity():
        connection.ensure_connection()
        return connection.connection

    first, report, last = in_thread(identity, lambda: ran(tasks.breaks_the_connection), identity)
    assert report.errtype.startswith("django.db.utils.")
    assert first is not last


def test_a_lost_connection_fails_one_job_and_the_next_succeeds(in_thread):
    def lose():
        connection.ensure_connection()
        connection.connection.close()

    answers = in_thread(lose, lambda: ran(tasks.writes_mark, "lost"), lambda: ran(tasks.writes_mark, "written"))
    assert answers[1].errtype in ("django.db.utils.InterfaceError", "django.db.utils.ProgrammingError",
                                  "django.db.utils.OperationalError")  # fmt: skip
    assert isinstance(answers[2], Ack)
    assert Mark.objects.get().text == "written"


def test_a_job_run_inside_the_callers_transaction_leaves_it_open():
    with transaction.atomic():
        ran(tasks.writes_mark, "with the caller's")
        ran(tasks.fails)
        assert in_transaction() == {"default"}
    assert Mark.objects.count() == 1


def test_a_job_without_queries_executes_no_sql(django_assert_num_queries):
    connection.ensure_connection()
    with django_assert_num_queries(0):
        ran(tasks.noop)
        ran(tasks.add, 1, 2)


def test_connection_health_checks_run_once_per_job():
    connection.ensure_connection()
    connection.health_check_done = True
    reset_connections()
    assert connection.health_check_done is False


def test_queries_logged_in_debug_mode_are_cleared_after_each_job():
    with override_settings(DEBUG=True):
        ran(tasks.writes_mark, "logged")
        assert not connection.queries_log


def sequential_scans_in(name):
    """Return the value of `enable_seqscan` on the connection of a thread with this name, after the set-up."""

    def read():
        with connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('enable_seqscan')")
            found.append(cursor.fetchone()[0])
        connection.close()

    found = []
    receivers = list(connection_created.receivers)
    set_up_own_connections()
    try:
        thread = threading.Thread(target=read, name=name)
        thread.start()
        thread.join(60)
    finally:
        connection_created.receivers = receivers
        connection_created.sender_receivers_cache.clear()
    [value] = found
    return value


@pytest.mark.parametrize(
    ("thread", "scans"),
    [("faktory-push-0", "off"), ("faktory-fetch", "off"), ("faktory-job-0", "on"), ("faktory-async", "on")],
)
def test_only_internal_threads_disable_sequential_scans(thread, scans):
    if connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL keeps plans of a small table")

    if VIA == "bouncer":
        scans = "on"
    assert sequential_scans_in(thread) == scans


def test_an_async_failure_resets_the_connections_of_its_orm_thread():
    job = new_job(jid="0123456789", jobtype=tasks.async_breaks_the_connection.jobtype, args=[], result_ttl=60)

    async def both():
        report = await prepare(Reservation(jid=job.jid, queue="default", text=job.text, wid="w1", attempt=1)).arun(
            get_broker()
        )
        return report, await tasks.sees_trouble()

    report, sees_trouble = asyncio.run(both())
    assert report.errtype.startswith("django.db.utils.")
    assert not sees_trouble


def test_errors_while_closing_a_broken_connection_are_ignored():
    """Check that errors are ignored: a driver may raise when it closes a lost connection, and so may its pool."""

    class Broken:
        def close(self):
            raise DatabaseError("gone")

        @property
        def _pool(self):
            raise DatabaseError("gone")

    connection.ensure_connection()
    real = connection.connection
    connection.connection, connection.errors_occurred = Broken(), True
    try:
        assert reset_connections() == []
    finally:
        connection.connection = real
        connection.close()


def test_only_the_async_task_that_disables_autocommit_without_a_commit_fails():
    def job_of(task, *args):
        job = new_job(jid="0123456789", jobtype=task.jobtype, args=args, result_ttl=60)
        return prepare(Reservation(jid=job.jid, queue="default", text=job.text, wid="w1", attempt=1))

    async def all_of_them():
        await sync_to_async(connections.close_all)()  # its thread may have one that an earlier test has ended
        reports = [await job_of(tasks.async_writes_mark, "before").arun(get_broker())]
        reports += [await job_of(tasks.async_switches_autocommit_off, "lost").arun(get_broker())]
        reports += [await job_of(tasks.async_switches_autocommit_off, "manually", "commits").arun(get_broker())]
        reports += [await job_of(tasks.async_writes_mark, "after").arun(get_broker())]
        await sync_to_async(connections.close_all)()
        return reports

    before, lost, by_hand, after = asyncio.run(all_of_them())
    assert [type(before), type(by_hand), type(after)] == [Ack] * 3
    assert "left a transaction open on 'default'; it was rolled back" in lost.message
    assert sorted(mark.text for mark in Mark.objects.all()) == ["after", "before", "manually"]
