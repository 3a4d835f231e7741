"""Hints on PostgreSQL: NOTIFY and LISTEN, poolers, broken connections."""

import logging
import threading

import pytest
from django.db import connection, connections, transaction

from django_faktory.store import notifier
from django_faktory.store.dialects import dialect_of
from django_faktory.store.notifier import postgresql, publisher
from tests.bouncer import needs_session
from tests.store.notifier.conftest import needs_notifications
from tests.store.notifier.pooler import Pooler
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    needs_notifications,
    needs_session("LISTEN needs a session; tests/bouncer covers poolers"),
]

LONG_S = 30


@pytest.fixture(autouse=True)
def nothing_announced():
    publisher._announced_at.clear()


@pytest.fixture
def heard(client):
    """Return a function that returns the payloads since its last call, as another client receives them."""
    return lambda: [one.payload for one in client.notifies(timeout=0.1)]


@pytest.fixture
def pooler():
    found = Pooler((connection.settings_dict["HOST"], int(connection.settings_dict["PORT"])))
    yield found
    found.close()


@pytest.fixture
def behind(pooler, database):
    """Return the alias of the same database behind the pooler."""
    return database("pooled", HOST="127.0.0.1", PORT=str(pooler.port))


@pytest.fixture
def listen(closing_later):
    """Return a function that starts a listener: connected, tested, with its first hint consumed."""

    def start(alias="default", queues=None, **times):
        made = postgresql.PostgresListener(alias, queues, **times) if times else notifier.listen(alias, queues)
        listener = closing_later(made)
        assert listener.wait(LONG_S) is True
        drain(listener)
        return listener

    return start


def drain(listener):
    while listener.wait(0.05):
        pass


def announce(*queues):
    """Announce from a process without earlier announcements."""
    publisher._announced_at.clear()
    notifier.announce("default", queues)


class TestAnnouncing:
    def test_an_announcement_names_each_queue(self, heard):
        notifier.announce("default", {"mail", "default"})
        assert sorted(heard()) == ["default", "mail"]

    def test_a_burst_of_announcements_is_one_hint(self, heard):
        announced = [
            publisher._select_to_announce("default", ["mail"], now=100 + number / 10_000) for number in range(100)
        ]
        assert [news for news in announced if news] == [["mail"]]

    def test_a_queue_is_announced_again_after_the_debounce_time(self):
        assert publisher._select_to_announce("default", ["mail"], now=100.0) == ["mail"]
        assert publisher._select_to_announce("default", ["mail", "other"], now=100.005) == ["other"]
        assert publisher._select_to_announce("default", ["mail"], now=100.011) == ["mail"]

    def test_the_memory_of_announced_queues_is_bounded(self):
        for number in range(publisher.MAX_REMEMBERED * 2):
            publisher._select_to_announce("default", [f"queue-{number}"], now=100.0)
        assert len(publisher._announced_at) <= publisher.MAX_REMEMBERED + 1

    def test_nothing_is_announced_inside_a_transaction(self, heard):
        with transaction.atomic():
            notifier.announce("default", ["mail"])
        assert heard() == []

    def test_nothing_is_announced_with_autocommit_off(self, heard):
        transaction.set_autocommit(False)
        notifier.announce("default", ["mail"])
        transaction.rollback()
        transaction.set_autocommit(True)
        assert heard() == []

    def test_many_queues_are_announced_as_any_queue(self, heard):
        notifier.announce("default", [f"queue-{number}" for number in range(postgresql.MAX_NAMED + 1)])
        assert heard() == [postgresql.ANY_QUEUE]

    def test_announcing_survives_a_broken_connection(self, heard):
        connection.ensure_connection()
        connection.connection.close()
        notifier.announce("default", ["mail"])
        announce("mail")
        assert heard() == ["mail"]


class TestListening:
    def test_a_listener_receives_an_earlier_announcement(self, listen):
        listener = listen()
        announce("mail")
        assert listener.wait(LONG_S) is True

    def test_an_announcement_wakes_a_waiting_listener(self, listen):
        listener, heard = listen(), []
        waiting = threading.Thread(target=lambda: heard.append(listener.wait(LONG_S)))
        waiting.start()
        announce("mail")
        waiting.join(20)
        assert heard == [True]

    def test_a_wait_without_an_announcement_returns_false(self, listen):
        assert listen().wait(0.05) is False

    def test_a_listener_ignores_announcements_of_other_queues(self, listen):
        listener = listen(queues=["mail"])
        announce("other")
        assert listener.wait(0.1) is False
        announce("other", "mail")
        assert listener.wait(LONG_S) is True

    def test_a_hint_for_any_queue_wakes_every_listener(self, listen):
        listener = listen(queues=["mail"])
        announce(*(f"queue-{number}" for number in range(postgresql.MAX_NAMED + 1)))
        assert listener.wait(LONG_S) is True

    def test_self_tests_of_other_listeners_are_not_hints(self, listen):
        listener = listen()
        listen()
        assert listener.wait(0.1) is False

    def test_a_listener_can_be_closed_by_several_threads_at_once(self, listen):
        listener = listen()
        closers = [threading.Thread(target=listener.close) for _ in range(4)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(20)
        assert not listener._thread.is_alive()
        assert listener.wait(LONG_S) is False

    def test_closing_ends_a_wait_in_another_thread(self, listen):
        listener = listen()
        waiting = threading.Thread(target=listener.wait, args=[LONG_S])
        waiting.start()
        listener.close()
        waiting.join(20)
        assert not waiting.is_alive()


class TestTrouble:
    def test_a_lost_connection_is_restored_and_logged_once(self, listen, behind, pooler, caplog):
        caplog.set_level(logging.INFO, "django_faktory")
        listener = listen(behind)
        wait_until(lambda: listener.receives_all)
        pooler.is_open = False
        pooler.cut()
        wait_until(lambda: caplog.records)
        assert listener.wait(LONG_S) is True  # look now, and poll often from now on
        assert not listener.receives_all
        drain(listener)
        assert listener.wait(0.8) is False  # two attempts, one log line
        pooler.is_open = True
        assert listener.wait(LONG_S) is True  # hints of the outage were lost, so look now
        drain(listener)
        announce("mail")
        assert listener.wait(LONG_S) is True
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]

    def test_a_limit_of_idle_sessions_does_not_end_the_listener(self, listen, database, caplog):
        """`idle_session_timeout` of a role would cost a reconnect and two log lines each time."""
        caplog.set_level(logging.INFO, "django_faktory")
        alias = database("impatient", OPTIONS={"options": "-c idle_session_timeout=500"})
        listener = listen(alias)
        for _ in range(2):  # sessions of the role that began later have ended
            other = connections[alias].copy()
            other.connection = other.get_new_connection(other.get_connection_params())
            wait_until(lambda ended=other: dialect_of(ended).was_ended(ended), what="the end of an idle session")
            other.close()
        announce("mail")
        assert listener.wait(LONG_S) is True
        assert caplog.records == []

    def test_a_listener_waits_for_a_database_unavailable_at_start(self, behind, pooler, closing_later):
        pooler.is_open = False
        listener = closing_later(notifier.listen(behind))
        assert listener.wait(0.05) is False
        pooler.is_open = True
        assert listener.wait(LONG_S) is True

    def test_a_listener_polls_behind_a_pooler_that_drops_notifications(self, listen, behind, pooler, caplog):
        caplog.set_level(logging.INFO, "django_faktory")
        pooler.swallows = True
        listener = listen(behind, test_timeout_s=0.2)
        wait_until(lambda: not listener._thread.is_alive())
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "pooler" in caplog.text
        assert not listener.receives_all
        announce("mail")
        assert listener.wait(0.05) is False
        listener.close()

    def test_a_connection_that_stops_delivering_hints_is_replaced(self, listen, behind, pooler):
        """A connection to a former primary stays open, while announcements go to the new one."""
        listener = listen(behind, test_timeout_s=1.0, test_every_s=0.2)
        wait_until(lambda: listener.receives_all)
        pooler.swallows = True
        wait_until(lambda: not listener.receives_all)
        pooler.swallows = False
        wait_until(lambda: listener.receives_all)
        drain(listener)
        announce("mail")
        assert listener.wait(LONG_S) is True

    def test_a_pooler_that_forwards_notifications_is_supported(self, listen, behind):
        listener = listen(behind, test_timeout_s=0.5)
        assert listener.wait(0.7) is False
        announce("mail")
        assert listener.wait(LONG_S) is True
