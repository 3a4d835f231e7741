"""The database that benchmarks make anew and empty, and what it and the machine are.

It is that of `benchmarks.settings`: PostgreSQL unless BENCH_DATABASE says otherwise, named BENCH_NAME.
"""

import contextlib
import os
import platform
import sqlite3
from pathlib import Path

import django

HERE = Path(__file__).parent


def prepare():
    """Make it, with its tables, and set Django up."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
    (HERE / "results").mkdir(exist_ok=True)
    from benchmarks.settings import DATABASES, KIND

    # Anew each time: its tables may be those of an older version.
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
    """What the figures hang on: processors, versions, how sure a commit is."""
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
    """Delete all rows, and leave the tables as they are after a vacuum."""
    from django.db import connection

    from django_faktory.models import Batch, Counter, Job, Queue, WorkerProcess

    for model in (Job, Batch, Counter, Queue, WorkerProcess):
        model.objects.all().delete()
    tidy = {"postgresql": "VACUUM ANALYZE", "sqlite": "VACUUM"}.get(connection.vendor)
    if tidy:
        with connection.cursor() as cursor:
            cursor.execute(tidy)
