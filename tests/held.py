"""Other sessions that stay open on PostgreSQL, and what index entries of ended jobs cost beside them."""

from contextlib import contextmanager

from django.db import connection, transaction


@contextmanager
def session():
    """Open another session, in a transaction."""
    other = connection.copy()
    other.set_autocommit(False)
    try:
        yield other
    finally:
        other.close()


@contextmanager
def held_snapshot():
    """Keep a snapshot open, so that PostgreSQL keeps all rows and index entries."""
    with session() as reader, reader.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT COUNT(*) FROM django_faktory_job")
        yield


def entries_read(index, work):
    """Return how many entries of an index `work()` reads, in a transaction."""
    count = f"SELECT pg_stat_get_xact_tuples_returned('{index}'::regclass)"
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(count)
        [before] = cursor.fetchone()
        work()
        cursor.execute(count)
        return cursor.fetchone()[0] - before
