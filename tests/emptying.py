"""Empty the database between tests that commit.

Django truncates every table and recreates all permissions: 70 to 200 ms, most of the time of such a test. This module
empties only tables that have rows, and keeps the rows that Django created with the tables.
"""

from django.core.management.color import no_style
from django.db import connections, transaction
from django.test import TransactionTestCase

STAYS = ("django_content_type", "auth_permission", "django_migrations")

COUNTS_OTHERS = "django_faktory_delta"
"""Emptied last: triggers write to it when rows of other tables are deleted."""

MANY = 1000
"""Rows from which a TRUNCATE pays off on PostgreSQL: it takes milliseconds for each index, but leaves no dead rows."""


def install():
    """Empty the database with this module after each test that commits, and keep the connections."""
    TransactionTestCase._fixture_teardown = _fixture_teardown
    TransactionTestCase._should_reload_connections = _should_reload_connections


def _fixture_teardown(test):
    from django_faktory.store import shared_reads  # models can be imported only when the apps are ready

    for alias in test._databases_names(include_mirrors=False):
        empty(connections[alias])
    shared_reads.forget()


def _should_reload_connections(test):
    """Close only connections that had an error; Django closes all of them.

    A session of PostgreSQL takes 10 ms of CPU time until it has run its first statements. A test that changes settings
    of its session closes the connection itself.
    """
    from django_faktory.store.dialects.postgresql.prepared import Command  # only when the apps are ready

    # A test that lost prepared statements, on purpose or with a failed statement, must not switch them off for others.
    are_lost, Command.works = not Command.works, True
    for connection in connections.all(initialized_only=True):
        if connection.errors_occurred or not connection.autocommit or are_lost:
            connection.close()
    return False


def empty(connection):
    """Empty the tables that have rows."""
    tables = sorted(_filled(connection), key=COUNTS_OTHERS.__eq__)
    if tables and connection.vendor == "postgresql":
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            tables = [table for table in tables if _delete(cursor, connection.ops.quote_name(table)) > MANY]
    if tables:
        statements = connection.ops.sql_flush(no_style(), tables, reset_sequences=False, allow_cascade=True)
        connection.ops.execute_sql_flush(statements)


def _delete(cursor, table):
    cursor.execute(f"DELETE FROM {table}")
    return cursor.rowcount


def _filled(connection):
    """Return the tables that have rows, found with one statement."""
    found = connection.introspection.django_table_names(only_existing=False, include_views=False)
    quote = connection.ops.quote_name
    looks = [f"SELECT '{table}' WHERE EXISTS (SELECT 1 FROM {quote(table)})" for table in found if table not in STAYS]
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(looks))
        return [table for (table,) in cursor.fetchall()]
