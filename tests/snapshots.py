"""Copies of a migrated database: migrations run once for each version of the models, not in each process.

The copies are kept under .demo. The name of each contains a hash of all that it depends on.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import django
from django.apps import apps
from django.conf import settings

FOLDER = Path(__file__).resolve().parent.parent / ".demo" / "snapshots"
KEPT = 8
"""Copies of one kind of database, by age; other branches may want theirs again."""


def install(connection):
    """Create this connection's test database from a copy."""
    creation, kind = connection.creation, KINDS.get(connection.vendor)
    if kind and kind.is_possible(connection):
        creation.create_test_db = partial(_create, creation, kind)


def _create(creation, kind, verbosity=1, **options):
    migrate = partial(type(creation).create_test_db, creation, verbosity=verbosity, **options)
    if options.get("keepdb") or options.get("serialize"):
        return migrate()
    path = FOLDER / f"{creation.connection.vendor}-{_key(kind, creation.connection)}{kind.suffix}"
    if not path.exists():
        with _alone():
            if not path.exists():
                name = migrate()
                _save(kind, creation.connection, path)
                return name
    return _load(creation, kind, path, verbosity)


def _load(creation, kind, path, verbosity):
    """Do as Django's `create_test_db`, without migrations."""
    connection, name = creation.connection, creation._get_test_db_name()
    creation._create_test_db(verbosity, autoclobber=True, keepdb=False)
    connection.close()
    settings.DATABASES[connection.alias]["NAME"] = connection.settings_dict["NAME"] = name
    kind.load(connection, path)
    connection.ensure_connection()
    return name


def _save(kind, connection, path):
    part = path.with_suffix(f".{os.getpid()}")
    part.unlink(missing_ok=True)
    kind.save(connection, part)
    part.replace(path)
    older = sorted(path.parent.glob(f"{connection.vendor}-*"), key=lambda one: one.stat().st_mtime, reverse=True)
    for one in older[KEPT:]:
        one.unlink(missing_ok=True)


@contextmanager
def _alone():
    """Only one process of this checkout migrates; the others wait for its copy."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(kind, connection):
    told = f"{_sources()} {kind.version(connection)} {connection.settings_dict['TEST'].get('CHARSET')}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]


@cache
def _sources():
    """A hash of the migrations, and of the modules that define the models, their fields, indexes and constraints."""
    modules, paths, labels = set(), set(), []
    for config in apps.get_app_configs():
        labels.append(config.label)
        paths.update(Path(config.path).glob("migrations/*.py"))
    for model in apps.get_models(include_auto_created=True):
        options = model._meta
        parts = [*options.local_fields, *options.local_many_to_many, *options.indexes, *options.constraints]
        modules.update([model.__module__, *(type(part).__module__ for part in parts)])
    paths.update(Path(sys.modules[name].__file__) for name in modules)
    digest = hashlib.sha256(f"{django.__version__} {labels}".encode())
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class SQLite:
    """The file."""

    suffix = ".sqlite3"

    @staticmethod
    def is_possible(connection):
        return not connection.is_in_memory_db()

    @staticmethod
    def version(connection):
        return connection.Database.sqlite_version

    @staticmethod
    def save(connection, path):
        with connection.cursor() as cursor:
            cursor.execute("VACUUM INTO %s", [str(path)])

    @staticmethod
    def load(connection, path):
        shutil.copyfile(path, connection.settings_dict["NAME"])


class PostgreSQL:
    """What pg_dump prints."""

    suffix = ".sql"

    @staticmethod
    def is_possible(connection):
        return not getattr(settings, "VIA", "") and bool(shutil.which("pg_dump"))

    @staticmethod
    def version(connection):
        return _first(connection, "SHOW server_version")

    @staticmethod
    def save(connection, path):
        at = connection.settings_dict
        command = [
            "pg_dump",
            f"--host={at['HOST']}",
            f"--port={at['PORT']}",
            f"--username={at['USER']}",
            "--no-password",
        ]
        command += ["--no-owner", "--no-privileges", "--inserts", f"--file={path}", at["NAME"]]
        subprocess.run(command, check=True, env={**os.environ, "PGPASSWORD": at["PASSWORD"]})
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line for line in lines if not line.startswith("\\")))  # commands of psql

    @staticmethod
    def load(connection, path):
        with connection.cursor() as cursor:
            cursor.execute(path.read_text())
        connection.close()  # the dump changes settings of the session


class MariaDB:
    """The statements that create the tables, and their rows, as JSON."""

    suffix = ".json"

    @staticmethod
    def is_possible(connection):
        return True

    @staticmethod
    def version(connection):
        return _first(connection, "SELECT VERSION()")

    @staticmethod
    def save(connection, path):
        created, rows = [], {}
        with connection.cursor() as cursor:
            for table in connection.introspection.table_names(cursor):
                quoted = connection.ops.quote_name(table)
                cursor.execute(f"SHOW CREATE TABLE {quoted}")
                created.append(cursor.fetchone()[1])
                cursor.execute(f"SELECT * FROM {quoted}")
                if found := cursor.fetchall():
                    rows[f"INSERT INTO {quoted} VALUES ({', '.join(['%s'] * len(found[0]))})"] = found
        path.write_text(json.dumps([created, rows], default=str))

    @staticmethod
    def load(connection, path):
        created, rows = json.loads(path.read_text())
        with connection.constraint_checks_disabled(), connection.cursor() as cursor:
            for statement in created:
                cursor.execute(statement)
            for statement, found in rows.items():
                cursor.executemany(statement, found)


def _first(connection, statement):
    with connection._nodb_cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]


KINDS = {"sqlite": SQLite, "postgresql": PostgreSQL, "mysql": MariaDB}
