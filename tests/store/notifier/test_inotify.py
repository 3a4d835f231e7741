"""Inotify reports writes to a file on Linux; elsewhere SQLite's hints come from polling."""

import select
import sqlite3
import sys
import threading
from pathlib import Path

import pytest

from django_faktory.store.notifier import sqlite
from django_faktory.store.notifier.inotify import FileWatch
from tests.settings import KIND

LONG_S = 30
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="about Linux")
on_sqlite = pytest.mark.skipif(KIND != "sqlite", reason="about SQLite")


@pytest.fixture
def file(tmp_path):
    found = tmp_path / "file"
    found.write_text("")
    return found


def is_readable(watch):
    ready, _, _ = select.select([watch], [], [], 0)
    return bool(ready)


@on_linux
def test_a_write_makes_the_watch_readable_until_it_is_cleared(file, closing_later):
    watch = closing_later(FileWatch([str(file), f"{file}-missing"]))
    assert not is_readable(watch)
    file.write_text("news")
    assert is_readable(watch)
    assert watch.clear()
    assert not is_readable(watch)
    assert not watch.clear()


@on_linux
def test_a_closed_or_failed_watch_leaves_no_descriptor_open(file):
    before = len(list(Path("/proc/self/fd").iterdir()))
    FileWatch([str(file)]).close()
    with pytest.raises(OSError, match="no file to watch"):
        FileWatch([f"{file}-missing"])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_watch_is_refused_on_systems_other_than_linux(file, monkeypatch):
    monkeypatch.setattr(sys, "platform", "plan9")
    with pytest.raises(OSError, match="only Linux"):
        FileWatch([str(file)])


@on_sqlite
@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
@pytest.mark.parametrize("has_file_watch", [True, False])
def test_a_commit_is_detected_with_and_without_a_file_watch(
    has_file_watch, mode, tmp_path, database, closing_later, monkeypatch
):
    if not has_file_watch:  # then the listener polls
        monkeypatch.setattr(sqlite, "FileWatch", refuse)
    path = tmp_path / "jobs.sqlite3"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute("CREATE TABLE job (id)")
    # No regular look within the test: only the file watch can report the commit.
    listener = closing_later(sqlite.SqliteListener(database("watched", NAME=str(path)), look_every_s=LONG_S))
    assert listener.wait(LONG_S) is True
    heard = []
    waiting = threading.Thread(target=lambda: heard.append(listener.wait(LONG_S)))
    waiting.start()
    connection.execute("INSERT INTO job VALUES (1)")
    waiting.join(LONG_S / 2)
    connection.close()
    assert heard == [True]


def refuse(_):
    raise OSError("not here")
