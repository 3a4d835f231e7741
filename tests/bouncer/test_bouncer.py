"""Run through a PgBouncer that changes sessions between transactions; the package adapts, and logs that once."""

import logging

import pytest
from django.db import connection, transaction

from django_faktory.brokers.orm import OrmBroker
from django_faktory.errors import UnknownBatch
from django_faktory.models import Job
from django_faktory.store import notifier, transactions
from django_faktory.store.dialects.postgresql.pooler import is_pooled
from django_faktory.store.jobs import pushes
from django_faktory.store.notifier import publisher
from django_faktory.store.notifier.postgresql import PostgresListener
from django_faktory.store.store import Store
from tests.factories import payload
from tests.project.tasks import noop
from tests.server.raw import RawClient, push
from tests.settings import KIND, VIA
from tests.waiting import wait_until
from tests.worker.test_db_cleanup import sequential_scans_in

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(KIND != "postgresql", reason="about PostgreSQL"),
    pytest.mark.skipif(VIA != "", reason="has a PgBouncer of its own"),
]
LONG_S = 30
NO_NOTIFY = "NOTIFY does not come through"


def asked(sql):
    """Execute one statement as a transaction in each of PgBouncer's sessions; return all rows."""
    found = {}
    for _ in range(100):
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT pg_backend_pid(), ARRAY({sql})::text[]")
            session, rows = cursor.fetchone()
        found[session] = rows
    assert len(found) > 1, "PgBouncer uses several sessions"
    return sorted(row for rows in found.values() for row in rows)


def have_many_sessions():
    """Make PgBouncer open several sessions, by keeping several transactions open at the same time."""
    wrappers = [connection.copy() for _ in range(4)]
    for wrapper in wrappers:
        wrapper.set_autocommit(False)
        with wrapper.cursor() as cursor:
            cursor.execute("SELECT 1")
    for wrapper in wrappers:
        wrapper.rollback()
        wrapper.close()


def test_a_node_behind_pgbouncer_works_and_logs_once_that_it_polls(bouncer, runfaktory, address):
    node = runfaktory("127.0.0.1:0", "--processes", "2", "--concurrency", "3", environment=bouncer().environment)
    client = RawClient.identified(address(node))
    node.wait_for_log("worker started", times=2)
    node.wait_for_log(NO_NOTIFY)
    for number in range(100):
        assert client.ask(push(jid=f"pushed-{number}", jobtype="tests.project.tasks.noop")) == b"+OK"
    client.close()
    noop.enqueue_many([()] * 100)
    wait_until(lambda: not Job.objects.exclude(state="succeeded").exists(), LONG_S, what="all are done")
    assert node.text.count(NO_NOTIFY) == 1
    assert "connect to PostgreSQL directly" in node.text
    for trouble in ("Traceback", "database unavailable", "prepared statements are lost", "maintenance step failed"):
        assert trouble not in node.text


def test_statements_behind_pgbouncer_are_not_prepared(behind, caplog):
    caplog.set_level(logging.INFO, "django_faktory")
    behind()
    have_many_sessions()
    for _ in range(5):
        pushes.push(Store(), [payload()])
    for _ in range(5):
        with transaction.atomic():
            pushes.push(Store(), [payload()])
    assert Job.objects.count() == 10
    assert asked("SELECT name FROM pg_prepared_statements") == []
    assert caplog.text.count("going on without prepared statements") == 1


def test_a_lock_timeout_applies_only_to_its_transaction(behind):
    """The session may serve another client immediately afterwards, so its own setting must stay 0."""
    behind()
    have_many_sessions()
    broker = OrmBroker("default")
    with broker.limited_lock_wait(0.05):
        for _ in range(5):
            pushes.push(Store(), [payload()])
            with pytest.raises(UnknownBatch):
                broker.commit_batch("b-unknown")
        inside = transactions.run("default", lambda _: asked_once("SHOW lock_timeout"), atomic=False)
    assert inside == "50ms"
    assert set(asked("SELECT current_setting('lock_timeout')")) == {"0"}


def test_internal_threads_change_no_setting_of_a_shared_session(behind):
    behind()
    have_many_sessions()
    assert sequential_scans_in("faktory-push-0") == "on"
    assert set(asked("SELECT current_setting('enable_seqscan')")) == {"on"}


def asked_once(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0]


def test_a_listener_leaves_no_channel_in_shared_sessions(behind, closing_later, caplog):
    behind()
    have_many_sessions()
    listener = closing_later(PostgresListener("default", test_timeout_s=0.3))
    wait_until(lambda: not listener._thread.is_alive())
    assert not listener.receives_all
    assert listener.poll_s(1.0) == 1.0
    assert caplog.text.count(NO_NOTIFY) == 1
    assert asked("SELECT pg_listening_channels()") == []


def hears_what_is_announced(listener):
    while listener.wait(0.05):
        pass
    publisher._announced_at.clear()
    notifier.announce("default", ["mail"])
    return listener.wait(LONG_S)


def test_notifications_sent_through_pgbouncer_reach_a_direct_listener(behind, closing_later):
    listener = closing_later(notifier.listen("default"))
    wait_until(lambda: listener.receives_all)
    behind()
    assert hears_what_is_announced(listener)


def test_in_session_mode_notifications_are_received(behind, closing_later, caplog):
    behind("session")
    listener = closing_later(notifier.listen("default"))
    wait_until(lambda: listener.receives_all)
    assert hears_what_is_announced(listener)
    assert NO_NOTIFY not in caplog.text


@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_pgbouncer_is_detected_and_a_direct_connection_is_not_mistaken(behind, mode):
    connection.ensure_connection()
    assert not is_pooled(connection.connection)
    behind(mode)
    connection.ensure_connection()
    assert is_pooled(connection.connection)
