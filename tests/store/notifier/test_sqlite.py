"""Hints on SQLite; each test has its own database file."""

import logging
import sqlite3
import threading
import time

import pytest

from django_faktory.store import notifier
from django_faktory.store.notifier.sqlite import EAGER_FOR_S, SqliteListener
from tests.settings import KIND

pytestmark = pytest.mark.skipif(KIND != "sqlite", reason="about SQLite")

LONG_S = 30


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "jobs.sqlite3"
    commit(found, "CREATE TABLE job (id)")
    return found


@pytest.fixture
def listener(path, database, closing_later):
    found = closing_later(notifier.listen(database("watched", NAME=str(path))))
    assert found.wait(LONG_S) is True  # commits before the first look
    return found


def commit(path, sql="INSERT INTO job VALUES (1)"):
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(sql)
    connection.close()


def test_a_database_file_is_watched(listener):
    assert isinstance(listener, SqliteListener)


def test_a_database_in_memory_is_polled(database, closing_later):
    listener = closing_later(notifier.listen(database("fleeting", NAME=":memory:")))
    assert isinstance(listener, notifier.PollingListener)


def test_a_commit_gives_exactly_one_hint(listener, path):
    commit(path)
    assert listener.wait(LONG_S) is True
    assert listener.wait(0.05) is False


def test_a_commit_wakes_a_waiting_listener(listener, path):
    heard = []
    waiting = threading.Thread(target=lambda: heard.append(listener.wait(LONG_S)))
    waiting.start()
    commit(path)
    waiting.join(20)
    assert heard == [True]


def test_a_listener_receives_all_commits_while_the_file_is_readable(listener):
    listener.wait(0.05)
    assert listener.receives_all


def test_a_listener_detects_a_commit_after_an_idle_period(listener, path):
    listener._changed_at = time.monotonic() - EAGER_FOR_S
    assert listener.wait(0.05) is False
    commit(path)
    assert listener.wait(LONG_S) is True


def test_a_rolled_back_change_is_no_hint(listener, path):
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO job VALUES (2)")
    connection.rollback()
    connection.close()
    assert listener.wait(0.02) is False


def test_closing_ends_a_wait_in_another_thread(listener):
    waiting = threading.Thread(target=listener.wait, args=[LONG_S])
    waiting.start()
    listener.close()
    waiting.join(20)
    assert not waiting.is_alive()
    assert listener.wait(LONG_S) is False


def test_a_missing_database_is_awaited_and_logged_once(tmp_path, database, closing_later, caplog):
    folder = tmp_path / "unmounted"
    listener = closing_later(notifier.listen(database("away", NAME=str(folder / "jobs.sqlite3"))))
    with caplog.at_level(logging.WARNING, "django_faktory"):
        assert listener.wait(0.03) is False
    assert len(caplog.records) == 1
    folder.mkdir()
    assert listener.wait(LONG_S) is True
