"""Test which errors of an atomic task's transaction are the task's, and which are the worker's."""

import select

import pytest
from django.db import DatabaseError, connection, connections

from django_faktory.brokers.orm import OrmBroker
from django_faktory.errors import CannotBegin, ConnectionLost, Discard
from tests.bouncer import needs_session
from tests.project.models import Mark
from tests.sessions import end_idle
from tests.settings import KIND
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(KIND == "sqlite", reason="SQLite has no sessions"),
]


def raise_own():
    raise ValueError("of the task")


@pytest.mark.parametrize("error", [Mark.objects.count, raise_own, lambda: None], ids=["query", "own", "commit"])
def test_a_session_that_ends_in_an_atomic_task_is_trouble_of_the_worker(error):
    with pytest.raises(ConnectionLost), OrmBroker("default").atomic():  # noqa: PT012  (the commit may raise)
        Mark.objects.create(text="rolled back")
        end_idle(connection)
        error()
    assert not Mark.objects.exists()


def test_a_task_that_decides_about_its_job_is_obeyed_although_its_session_ended():
    with pytest.raises(Discard), OrmBroker("default").atomic():  # noqa: PT012  (the session must end first)
        Mark.objects.create(text="rolled back")
        end_idle(connection)
        raise Discard("not needed")


@pytest.mark.parametrize("error", [connection.close, lambda: connection.cursor().execute("SELECT nonsense")])
def test_an_error_of_the_task_stays_its_own(error):
    with pytest.raises((DatabaseError, ValueError)), OrmBroker("default").atomic():  # noqa: PT012  (both may raise)
        Mark.objects.create(text="rolled back")
        error()
        raise_own()


@pytest.mark.skipif(KIND != "postgresql", reason="a limit of PostgreSQL's sessions")
def test_a_transaction_that_stays_idle_for_too_long_is_an_error_of_the_task():
    def stay_idle():
        with OrmBroker("default").atomic():
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 1")
            wait_until(lambda: select.select([connection.connection.fileno()], [], [], 0)[0])
            Mark.objects.count()

    for _ in range(10):
        with pytest.raises((DatabaseError, ConnectionLost)) as caught:
            stay_idle()
        # A statement whose sending meets the reset gets only the end of the connection: then try again.
        if not caught.errisinstance(ConnectionLost):
            return
    pytest.fail("the reason of the server never reached the task")


@needs_session("the idle session is ended")
def test_a_transaction_begins_on_a_new_session_if_the_idle_one_has_ended():
    connection.ensure_connection()
    end_idle(connection)
    with OrmBroker("default").atomic():
        Mark.objects.create(text="stored")
    assert Mark.objects.count() == 1


@needs_session("the pooler accepts any user")
def test_whatever_prevents_the_transaction_is_trouble_of_the_worker(monkeypatch):
    connection.close()
    monkeypatch.setitem(connections["default"].settings_dict, "PASSWORD", "wrong")
    monkeypatch.setitem(connections["default"].settings_dict, "USER", "nosuch")
    with pytest.raises(CannotBegin, match="database unavailable"), OrmBroker("default").atomic():
        pytest.fail("the task must not begin")
