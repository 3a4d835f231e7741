"""Empty the database between tests that commit.

Django's own way truncates every table and makes all permissions anew: 70 to 200 ms, most of what such a test took. Here
only tables that hold something are emptied, and what Django made with the tables stays.
"""

from django.core.management.color import no_style
from django.db import connections, transaction
from django.test import TransactionTestCase

STAYS = ("django_content_type", "auth_permission", "django_migrations")

MANY = 1000
"""Rows that are worth a TRUNCATE on PostgreSQL: it takes milliseconds for each index, and leaves no dead rows."""


def install():
    """Let each test that commits end so."""
    TransactionTestCase._fixture_teardown = _fixture_teardown


def _fixture_teardown(test):
    from django_faktory.store import shared  # models may be imported only when the apps are ready

    for alias in test._databases_names(include_mirrors=False):
        empty(connections[alias])
    shared.forget()


def empty(connection):
    """Its tables that hold something."""
    tables = _filled(connection)
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
    """The tables that hold something, by one statement."""
    found = connection.introspection.django_table_names(only_existing=False, include_views=False)
    quote = connection.ops.quote_name
    looks = [f"SELECT '{table}' WHERE EXISTS (SELECT 1 FROM {quote(table)})" for table in found if table not in STAYS]
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(looks))
        return [table for (table,) in cursor.fetchall()]
