"""Run verbs concurrently, each in its own thread as on a separate node, and count the database's deadlocks."""

import threading
from contextlib import suppress

from django.db import connection, connections

from django_faktory.errors import FaktoryError


def count_deadlocks():
    """Return how many deadlocks PostgreSQL has resolved in this database; 0 on a database that does not count."""
    if connection.vendor != "postgresql":
        return 0
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        return cursor.fetchone()[0]


def run_concurrently(verbs, *, rounds, prepare=None):
    """Run each (name, verb) in its own thread. All start each round together, after one of them has run `prepare`."""
    barrier = threading.Barrier(len(verbs), timeout=60, action=prepare)
    errors = []

    def body(name, verb):
        try:
            for _ in range(rounds):
                barrier.wait()
                with suppress(FaktoryError):  # a batch is over, or a job runs: answers like any other
                    verb()
        except (Exception, threading.BrokenBarrierError) as error:  # noqa: BLE001  (raised in the test)
            errors.append((name, error))
            barrier.abort()
        finally:
            connections.close_all()

    title = " | ".join(dict.fromkeys(name for name, _ in verbs))
    threads = [threading.Thread(target=body, args=one, name=f"{one[0]} of {title}") for one in verbs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors, errors
