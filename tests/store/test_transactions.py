"""Collisions are retried, an unavailable database raises BrokerUnavailable, a caller's transaction is left alone."""

import asyncio
import select

import pytest
from django.db import InterfaceError, OperationalError, connection, transaction

from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job
from django_faktory.store import transactions
from django_faktory.store.database_errors import first_line
from django_faktory.store.dialects import dialect_of
from django_faktory.store.dialects.postgresql import pipeline
from django_faktory.store.jobs import pushes
from django_faktory.store.store import Store
from django_faktory.store.transactions import ATTEMPTS, DEADLOCK_ATTEMPTS, after_commit, run
from tests.bouncer import needs_session
from tests.factories import JobFactory, payload
from tests.sessions import end_idle
from tests.store.jobs.test_claims import in_threads

pytestmark = pytest.mark.django_db(transaction=True)


def collision():
    """Return a lock timeout, as this database's driver reports it."""
    return server_error("55P03", 1205)


def deadlock():
    """Return a deadlock error, as this database's driver reports it."""
    return server_error("40P01", 1213)


def server_error(sqlstate, number):
    if connection.vendor == "mysql":
        return OperationalError(number, "message")
    error = OperationalError("message")
    error.__cause__ = Exception()
    error.__cause__.sqlstate = sqlstate
    if connection.vendor == "sqlite":
        error.__cause__.sqlstate, error.__cause__.sqlite_errorname = None, "SQLITE_BUSY_SNAPSHOT"
    return error


def failing(times, error):
    """Return a verb that raises `error` this many times, then returns how often it was called."""
    calls = []

    def verb(_):
        calls.append(1)
        if len(calls) <= times:
            raise error
        return len(calls)

    return verb


def end_own_session(at):
    with at.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


@pytest.mark.parametrize("atomic", [True, False])
def test_a_collision_is_retried(atomic):
    assert run("default", failing(2, collision()), atomic=atomic) == 3


def test_repeated_collisions_raise_broker_unavailable_after_the_last_attempt():
    with pytest.raises(BrokerUnavailable, match="database unavailable: "):
        run("default", failing(ATTEMPTS, collision()))
    assert run("default", failing(ATTEMPTS - 1, collision())) == ATTEMPTS


@pytest.mark.skipif(connection.vendor == "sqlite", reason="one writer at a time")
def test_a_deadlock_is_retried_more_often_because_its_victim_waited_for_nothing():
    assert run("default", failing(DEADLOCK_ATTEMPTS - 1, deadlock()), max_pause_s=0) == DEADLOCK_ATTEMPTS
    with pytest.raises(BrokerUnavailable, match="database unavailable: "):
        run("default", failing(DEADLOCK_ATTEMPTS, deadlock()), max_pause_s=0)


@pytest.mark.parametrize(
    "error", [OperationalError("server closed the connection\nunexpectedly"), InterfaceError("gone")]
)
def test_an_unavailable_database_is_reported_in_one_line_without_a_retry(error):
    verb = failing(1, error)
    with pytest.raises(BrokerUnavailable) as raised:
        run("default", verb)
    assert str(raised.value) == f"database unavailable: {first_line(error)}"
    assert "\n" not in str(raised.value)
    assert verb(None) == 2


def test_an_error_of_the_verb_is_raised_unchanged():
    with pytest.raises(ZeroDivisionError):
        run("default", lambda _: 1 / 0)


def test_a_verb_joins_the_transaction_of_its_caller_and_passes_errors_on():
    error = collision()
    with pytest.raises(OperationalError), transaction.atomic():
        run("default", failing(1, error))
    with transaction.atomic():
        pushes.push(Store(), [payload()])
        transaction.set_rollback(True)
    assert not Job.objects.exists()


def test_writes_of_a_failed_verb_are_rolled_back():
    def verb(_):
        JobFactory()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run("default", verb)
    assert not Job.objects.exists()


def test_a_session_whose_snapshot_was_interrupted_is_not_used_again(monkeypatch):
    """A worker's thread may be interrupted after any statement."""
    execute = transactions._execute

    def interrupt(connection, sql):
        execute(connection, sql)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transactions, "_execute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run("default", lambda _: None, atomic=False, snapshot=True)
    assert connection.connection is None


def test_a_function_that_fails_after_the_commit_is_logged_and_the_next_one_runs(caplog):
    seen = []
    with transaction.atomic():
        after_commit("default", int, "no number")
        after_commit("default", seen.append, "next")
        assert seen == []
    assert seen == ["next"]
    assert "no number" in caplog.text


def test_a_connection_that_is_lost_after_the_commit_costs_one_log_line(caplog):
    if connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL ends a session by SQL")
    with transaction.atomic():
        JobFactory()
        after_commit("default", run, "default", end_own_session)
    [record] = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert record.getMessage().startswith("a step after a commit failed")
    assert Job.objects.count() == 1


def test_a_lost_connection_is_reported_and_the_next_verb_reconnects():
    if connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL ends a session by SQL")
    with pytest.raises(BrokerUnavailable):
        run("default", end_own_session)
    pushes.push(Store(), [payload()])
    assert Job.objects.count() == 1


@needs_session("a pooler hides the session of a connection")
@pytest.mark.parametrize("atomic", [True, False])
def test_a_session_ended_while_idle_is_replaced_before_use(atomic):
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no sessions")
    end_idle(connection)
    run("default", lambda _: JobFactory(), atomic=atomic)
    assert Job.objects.count() == 1


@needs_session("a pooler hides the session of a connection")
def test_the_event_loop_does_not_send_on_a_session_that_has_ended():
    if connection.vendor != "postgresql" or not pipeline.has_psycopg3():
        pytest.skip("about psycopg 3")
    own = connection.copy()
    own.ensure_connection()
    loop = asyncio.new_event_loop()
    taken = dialect_of(own).take_for_loop(own)
    taken.start(loop)
    assert taken.is_usable()
    end_idle(own)
    assert not taken.is_usable()
    assert own.connection is None
    loop.close()


@needs_session("LISTEN belongs to a session")
def test_a_session_with_notifications_to_read_is_not_replaced():
    if connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL sends messages to an idle session")
    with connection.cursor() as cursor:
        cursor.execute("LISTEN faktory_test")
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("NOTIFY faktory_test")
    finally:
        other.close()
    raw = connection.connection
    assert select.select([raw.fileno()], [], [], 10)[0], "the notification has arrived"
    run("default", lambda _: JobFactory())
    assert connection.connection is raw


@pytest.fixture
def refusals():
    """Clear the count of refused writes before and after the test."""
    transactions._refusals.clear()
    transactions._refusals_at_connect.clear()
    yield
    transactions._refusals.clear()


TAKE_NO_WRITES = {
    "postgresql": "SET default_transaction_read_only = on",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
    "sqlite": "PRAGMA query_only = on",
}


@needs_session("SET applies to a session, which the next client of a pooler would get")
@pytest.mark.parametrize("atomic", [True, False])
def test_a_read_only_database_is_reported_and_the_next_verb_reconnects(atomic, refusals):
    """A primary has become a standby; the next connection may find the new primary."""
    with connection.cursor() as cursor:
        cursor.execute(TAKE_NO_WRITES[connection.vendor])
    with pytest.raises(BrokerUnavailable, match=r"(?i)database unavailable: .*read.?only"):
        run("default", lambda _: JobFactory(), atomic=atomic)
    run("default", lambda _: JobFactory(), atomic=atomic)
    assert Job.objects.count() == 1


@needs_session("SET and the session's id apply to one session")
def test_a_refused_write_makes_other_threads_reconnect_once(refusals):
    """A look at waiting jobs is not a write: on the old primary's connection it would read stale data indefinitely."""
    if connection.vendor == "sqlite":
        pytest.skip("one file, no failover")

    def session(at):
        with at.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()" if at.vendor == "postgresql" else "SELECT CONNECTION_ID()")
            return cursor.fetchone()[0]

    def become_read_only(at):
        with at.cursor() as cursor:
            cursor.execute(TAKE_NO_WRITES[at.vendor])

    def write_in_vain():
        try:
            run("default", become_read_only, atomic=False)
            with pytest.raises(BrokerUnavailable):
                run("default", lambda _: JobFactory())
        finally:
            connection.close()

    before = run("default", session)
    assert run("default", session) == before
    in_threads(1, lambda _: write_in_vain())
    after = run("default", session)
    assert after != before
    assert run("default", session) == after, "once"
