"""Create and empty the benchmarks' database, and describe it and the machine.

It is the database of `benchmarks.settings`: PostgreSQL unless BENCH_DATABASE selects another, with the name BENCH_NAME.
"""

import contextlib
import os
import platform
import sqlite3
from pathlib import Path

import django

HERE = Path(__file__).parent


def prepare():
    """Create the database with its tables, and set up Django."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
    (HERE / "results").mkdir(exist_ok=True)
    from benchmarks.settings import DATABASES, KIND

    # Always created again, because existing tables may be those of an older version.
    {"postgresql": _new_on_postgresql, "mariadb": _new_on_mariadb, "sqlite": _new_on_sqlite}[KIND](DATABASES["default"])
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def _new_on_postgresql(at):
    import psycopg

    address = {"host": at["HOST"], "port": at["PORT"], "user": at["USER"], "password": at["PASSWORD"]}
    with psycopg.connect(**address, dbname="postgres", autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{at["NAME"]}" WITH (FORCE)')
        connection.execute(f'CREATE DATABASE "{at["NAME"]}"')


def _new_on_mariadb(at):
    import MySQLdb

    connection = MySQLdb.connect(host=at["HOST"], port=int(at["PORT"]), user=at["USER"], password=at["PASSWORD"])
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS `{at['NAME']}`")
        cursor.execute(f"CREATE DATABASE `{at['NAME']}` CHARACTER SET utf8mb4")


def _new_on_sqlite(at):
    for file in (HERE / "results").glob(f"{Path(at['NAME']).name}*"):
        file.unlink()


SETTINGS = {
    "postgresql": (
        "SHOW {}",
        ("server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers"),
    ),
    "mysql": ("SELECT @@{}", ("version", "innodb_flush_log_at_trx_commit", "sync_binlog", "innodb_buffer_pool_size")),
    "sqlite": ("PRAGMA {}", ("journal_mode", "synchronous")),
}


def machine():
    """Return what the figures depend on: processors, versions, and settings that decide how durable a commit is."""
    from django.db import connection

    model = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")][:1]
    found = {
        "cpus": os.cpu_count(),
        "cpu": model[0] if model else platform.processor(),
        "python": platform.python_version(),
        "django": django.get_version(),
    }
    if connection.vendor == "sqlite":
        found["sqlite"] = sqlite3.sqlite_version
    question, names = SETTINGS[connection.vendor]
    with connection.cursor() as cursor:
        for name in names:
            cursor.execute(question.format(name))
            found[name] = cursor.fetchone()[0]
    return found


def empty():
    """Delete all rows, and vacuum the tables where the database has VACUUM."""
    from django.apps import apps
    from django.db import connection

    tables = [model._meta.db_table for model in apps.get_app_config("django_faktory").get_models()]
    tables.sort(key="django_faktory_delta".__eq__)  # last: triggers write to it
    if connection.vendor == "postgresql":  # a DELETE of millions of rows takes minutes
        statements = [f"TRUNCATE {', '.join(tables)}", "VACUUM ANALYZE"]
    else:
        statements = [f"DELETE FROM {table}" for table in tables] + ["VACUUM"] * (connection.vendor == "sqlite")
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
