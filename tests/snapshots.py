"""Copies of a migrated database: migrations run once for each version of the models, not in each process.

The name of each copy contains a hash of everything it depends on.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import django
from django.apps import apps
from django.conf import settings

FOLDER = Path(__file__).resolve().parent.parent / ".demo" / "snapshots"
KEPT = 8
"""Number of copies kept of each kind of database, the newest ones; other branches may need theirs again."""


def install(connection):
    """Create this connection's test database from a copy."""
    creation, kind = connection.creation, KINDS.get(connection.vendor)
    if kind and kind.is_possible(connection):
        creation.create_test_db = partial(_create, creation, kind)


def _create(creation, kind, verbosity=1, **options):
    migrate = partial(type(creation).create_test_db, creation, verbosity=verbosity, **options)
    if options.get("keepdb") or options.get("serialize"):
        return migrate()
    snapshot = kind(creation.connection, _key(kind, creation.connection))
    if not snapshot.exists():
        with _alone():
            if not snapshot.exists():
                name = migrate()
                snapshot.save()
                return name
    return _load(creation, snapshot, verbosity)


def _load(creation, snapshot, verbosity):
    """Do the work of Django's `create_test_db`, without migrations."""
    connection, name = creation.connection, creation._get_test_db_name()
    snapshot.prepare()
    creation._create_test_db(verbosity, autoclobber=True, keepdb=False)
    connection.close()
    settings.DATABASES[connection.alias]["NAME"] = connection.settings_dict["NAME"] = name
    snapshot.load()
    connection.ensure_connection()
    return name


@contextmanager
def _alone():
    """Lock the folder, so that one process of this checkout migrates at a time; others wait for its copy."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(kind, connection):
    inputs = f"{_sources()} {kind.version(connection)} {connection.settings_dict['TEST'].get('CHARSET')}"
    return hashlib.sha256(inputs.encode()).hexdigest()[:16]


@cache
def _sources():
    """Return a hash of migrations, functions, triggers, and modules with models, fields, indexes and constraints."""
    modules, paths, labels = set(), set(), []
    for config in apps.get_app_configs():
        labels.append(config.label)
        paths.update(Path(config.path).glob("migrations/*.py"))
        paths.update(Path(config.path).glob("store/dialects/postgresql/functions/*"))
        paths.update(Path(config.path).glob("store/dialects/**/*.py"))  # triggers and partitions
    for model in apps.get_models(include_auto_created=True):
        options = model._meta
        parts = [*options.local_fields, *options.local_many_to_many, *options.indexes, *options.constraints]
        modules.update([model.__module__, *(type(part).__module__ for part in parts)])
    paths.update(Path(sys.modules[name].__file__) for name in modules)
    digest = hashlib.sha256(f"{django.__version__} {labels}".encode())
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Snapshot:
    """A stored copy of a migrated database; the key names its version."""

    def __init__(self, connection, key):
        self.connection, self._key = connection, key

    def prepare(self):
        """Prepare before the new database is created."""

    def load(self):
        """Fill the new database from the copy."""


class File(Snapshot):
    """A snapshot stored as a file, also for later runs."""

    suffix = ""

    def __init__(self, connection, key, *, folder=FOLDER):
        super().__init__(connection, key)
        self._folder = folder

    @property
    def path(self):
        return self._folder / f"{self.connection.vendor}-{self._key}{self.suffix}"

    def exists(self):
        return self.path.exists()

    def save(self):
        part = self.path.with_suffix(f".{os.getpid()}")
        part.unlink(missing_ok=True)
        self.write(part)
        part.replace(self.path)
        kept = self.path.parent.glob(f"{self.connection.vendor}-*")
        for path in sorted(kept, key=lambda one: one.stat().st_mtime, reverse=True)[KEPT:]:
            path.unlink(missing_ok=True)


class SQLite(File):
    suffix = ".sqlite3"

    @staticmethod
    def is_possible(connection):
        return not connection.is_in_memory_db()

    @staticmethod
    def version(connection):
        return connection.Database.sqlite_version

    def write(self, path):
        with self.connection.cursor() as cursor:
            cursor.execute("VACUUM INTO %s", [str(path)])

    def load(self):
        name = self.connection.settings_dict["NAME"]
        for suffix in ("-wal", "-shm"):  # left by a run that was killed: SQLite would apply them to the copy
            Path(name + suffix).unlink(missing_ok=True)
        shutil.copyfile(self.path, name)


class MariaDB(File):
    """Snapshot as JSON: the statements that create the tables, their rows, and the triggers."""

    suffix = ".json"

    @staticmethod
    def is_possible(connection):
        return True

    @staticmethod
    def version(connection):
        return _first(connection, "SELECT VERSION()")

    def write(self, path):
        created, rows = [], {}
        with self.connection.cursor() as cursor:
            for table in self.connection.introspection.table_names(cursor):
                quoted = self.connection.ops.quote_name(table)
                cursor.execute(f"SHOW CREATE TABLE {quoted}")
                created.append(cursor.fetchone()[1])
                cursor.execute(f"SELECT * FROM {quoted}")
                if found := cursor.fetchall():
                    rows[f"INSERT INTO {quoted} VALUES ({', '.join(['%s'] * len(found[0]))})"] = found
            cursor.execute("SHOW TRIGGERS")
            triggers = [f"SHOW CREATE TRIGGER {name}" for name, *_ in cursor.fetchall()]
            triggers = [(cursor.execute(statement), cursor.fetchone()[2])[1] for statement in triggers]
        path.write_text(json.dumps([created, rows, triggers], default=str))

    def load(self):
        created, rows, triggers = json.loads(self.path.read_text())
        with self.connection.constraint_checks_disabled(), self.connection.cursor() as cursor:
            for statement in created:
                cursor.execute(statement)
            for statement, found in rows.items():
                cursor.executemany(statement, found)
            for statement in triggers:
                cursor.execute(statement)


class PostgreSQL(Snapshot):
    """Snapshot as a template database on the run's server. pg_dump would write index conditions in another form."""

    @staticmethod
    def is_possible(connection):
        return "FAKTORY_TEST_OWN" in os.environ and not settings.VIA

    @staticmethod
    def version(connection):
        return ""

    @property
    def name(self):
        return f"faktory_template_{self._key}"

    def exists(self):
        return bool(_first(self.connection, "SELECT COUNT(*) FROM pg_database WHERE datname = %s", [self.name]))

    def save(self):
        source = self.connection.settings_dict["NAME"]
        self.connection.close()  # a database with sessions cannot be copied
        with self.connection._nodb_cursor() as cursor:
            cursor.execute(f'CREATE DATABASE "{self.name}" TEMPLATE "{source}"')
        self.connection.ensure_connection()

    def prepare(self):
        self.connection.settings_dict["TEST"]["TEMPLATE"] = self.name


def _first(connection, statement, values=None):
    with connection._nodb_cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchone()[0]


KINDS = {"sqlite": SQLite, "postgresql": PostgreSQL, "mysql": MariaDB}
