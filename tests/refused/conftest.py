"""Databases that cannot store every value: narrow encodings, and a limit of 1 MB for one statement or value."""

import os
import sqlite3
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connection, connections
from django.db.backends.signals import connection_created

from tests import own_servers
from tests.server.conftest import connect, serve, server, transport  # noqa: F401  (fixtures)
from tests.settings import TAG
from tests.worker.conftest import work  # noqa: F401  (a fixture)

EMOJI = "\N{GRINNING FACE}"
LARGE = "x" * 2_000_000

GUILTY = {"utf8mb3": EMOJI, "latin1": EMOJI, "LATIN1": EMOJI, "SQL_ASCII": "\N{SNOWMAN}" * 100, "packet": LARGE}
"""A value that each database refuses. SQL_ASCII counts bytes, and refuses it in the names of jobs only."""

NARROW = {"mysql": ["utf8mb3", "latin1", "packet"], "postgresql": ["LATIN1", "SQL_ASCII"], "sqlite": ["packet"]}


@contextmanager
def created(kind, suffix=""):
    """Create a database of this kind; yield its settings."""
    name = f"test_faktory_{TAG}_{os.environ.get('PYTEST_XDIST_WORKER', '')}_{kind.lower()}{suffix}"
    if connection.vendor == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield {"NAME": str(Path(folder) / "narrow.sqlite3")}
    elif kind == "packet":
        import MySQLdb

        with server_with_small_packets() as address:
            with MySQLdb.connect(host="127.0.0.1", port=int(address["PORT"]), user="root") as session:
                session.query(f"CREATE DATABASE {name}")
            yield {"NAME": name, **address}
    else:
        how = (
            f"CHARACTER SET {kind}"
            if connection.vendor == "mysql"
            else f"ENCODING '{kind}' LOCALE 'C' TEMPLATE template0"
        )
        force = "" if connection.vendor == "mysql" else "WITH (FORCE)"
        execute(f"DROP DATABASE IF EXISTS {name} {force}", f"CREATE DATABASE {name} {how}")
        yield {"NAME": name}
        execute(f"DROP DATABASE {name} {force}")


def execute(*statements):
    with connection.cursor() as cursor:
        for sql in statements:
            cursor.execute(sql)


@contextmanager
def server_with_small_packets():
    """Start a MariaDB of our own: the limit is the server's, so it cannot be set for one database."""
    with tempfile.TemporaryDirectory(prefix="faktory-packet-") as folder:
        Path(folder).chmod(0o711)
        server = own_servers.MariaDB(Path(folder))
        server.settings = {**server.settings, "max-allowed-packet": "1M", "innodb-buffer-pool-size": "64M"}
        server.prepare()
        server.launch()
        try:
            server.wait()
            yield {"HOST": "127.0.0.1", "PORT": str(server.port), "USER": "root", "PASSWORD": ""}
        finally:
            server.stop()


def limit_values(connection, **_):
    if connection.vendor == "sqlite":
        connection.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)


@pytest.fixture(scope="module", params=NARROW[connection.vendor])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def migrated(kind, django_db_setup, django_db_blocker):
    """Put a database of this kind in the place of the default one, with all tables."""
    with django_db_blocker.unblock(), created(kind) as address, replaced_default(address):
        yield


@contextmanager
def replaced_default(address):
    usual = connections.settings["default"]
    replace_default({**usual, "OPTIONS": dict(usual["OPTIONS"]), **address})
    connection_created.connect(limit_values)
    try:
        call_command("migrate", run_syncdb=True, verbosity=0)
        yield
    finally:
        connection_created.disconnect(limit_values)
        replace_default(usual)


def replace_default(settings):
    connections["default"].close()
    del connections["default"]
    connections.settings["default"] = settings


@pytest.fixture
def narrow(migrated, transactional_db):
    """Use the narrow database, which is emptied after the test."""


@pytest.fixture
def guilty(kind):
    """Return a text that the database refuses as a result, an argument or a message."""
    if kind == "SQL_ASCII":
        pytest.skip("it stores any text; only names have a length, in bytes")
    return GUILTY[kind]
