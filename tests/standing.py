"""Stop processes with SIGSTOP, including all their threads, outside of transactions."""

import os
import signal
from pathlib import Path

from django.db import OperationalError, connection, transaction

from django_faktory.models import Job, JobLock, Limit, Limiter, WorkerProcess
from tests.waiting import wait_until


def suspend_process(pid, *, transactions=0):
    """Stop the process between two of its transactions: within one it would keep the database or a row locked.

    `transactions` is the number of those that its task has open.
    """
    while True:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: _has_stopped(pid))
        if not _holds_locks() and _count_open_transactions() <= transactions:
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


OPEN_TRANSACTIONS = {
    "postgresql": "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND state LIKE 'idle in transaction%%' AND pid <> pg_backend_pid()",
    "mysql": "SELECT COUNT(*) FROM information_schema.innodb_trx JOIN information_schema.processlist"
    " ON id = trx_mysql_thread_id WHERE db = DATABASE() AND id <> CONNECTION_ID()",
}


def _count_open_transactions():
    """Count the sessions that wait inside a transaction: they may hold rows that no other session sees yet."""
    if connection.vendor not in OPEN_TRANSACTIONS:
        return 0
    with connection.cursor() as cursor:
        cursor.execute(OPEN_TRANSACTIONS[connection.vendor], [])
        return cursor.fetchone()[0]


def _set_busy_timeout(seconds):
    """Set how long SQLite, which locks no rows, waits for another writer."""
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")
