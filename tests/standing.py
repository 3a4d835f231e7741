"""Stop processes with SIGSTOP, including all their threads, outside of transactions."""

import os
import signal
from pathlib import Path

from django.db import OperationalError, connection, transaction

from django_faktory.models import Job, JobLock, Limit, Limiter, WorkerProcess
from tests.waiting import wait_until


def suspend_process(pid):
    """Stop the process between two of its transactions: within one it would keep the database or a row locked."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: _has_stopped(pid))
        if not _holds_locks() and not _has_open_transaction():
            return
        os.kill(pid, signal.SIGCONT)


def _has_stopped(pid):
    """Return True if every thread has stopped: they stop one after the other, shortly after the signal."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def _holds_locks():
    _set_busy_timeout(0.5)
    try:
        with transaction.atomic():
            for model in (Job, JobLock, WorkerProcess, Limit, Limiter):
                list(model.objects.select_for_update(nowait=True))
    except OperationalError:
        return True
    finally:
        _set_busy_timeout(connection.settings_dict["OPTIONS"].get("timeout", 5))
    return False


def _has_open_transaction():
    """Return True if a session waits inside a transaction: it may hold rows that no other session sees yet."""
    if connection.vendor != "postgresql":
        return False
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT COUNT(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND state LIKE 'idle in transaction%%' AND pid <> pg_backend_pid()",
            [],
        )
        return bool(cursor.fetchone()[0])


def _set_busy_timeout(seconds):
    """Set how long SQLite, which locks no rows, waits for another writer."""
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")
