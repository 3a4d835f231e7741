"""Stores for a run: the test's own database, or a separate PostgreSQL server that can be stopped and started.

A store has the environment that leads programs to it, and reads the remaining jobs. A `Cluster` opens a new connection
for each query, because its server may have been stopped.
"""

import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import psycopg
from django.db import connection

from tests.programs import ROOT

JOBS = "SELECT jid, state FROM django_faktory_history UNION ALL SELECT jid, state FROM django_faktory_job"


class TestDatabase:
    """The database that pytest-django has created."""

    __test__ = False

    def __init__(self):
        self.environment = {"FAKTORY_TEST_NAME": str(connection.settings_dict["NAME"])}
        connection.close()

    def rows(self):
        with connection.cursor() as cursor:
            cursor.execute(JOBS)
            return dict(cursor.fetchall())

    def is_sound(self):
        """Run SQLite's integrity check on its file; True on other databases."""
        if connection.vendor != "sqlite":
            return True
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA integrity_check")
            return cursor.fetchall() == [("ok",)]


def programs_folder():
    """Return the folder of PostgreSQL's server programs; None if this machine has none."""
    on_path = shutil.which("pg_ctl")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    return Path(os.path.realpath(on_path)).parent if on_path else found[-1].parent if found else None


class Cluster:
    """A separate PostgreSQL server, as durable as its defaults make it.

    It runs as `postgres` if the tests run as root, since PostgreSQL refuses to run as root.
    """

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="faktory-pg-"))
        self.port = _free_port()
        self._programs = programs_folder()
        self._as = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
        if self._as:
            shutil.chown(self.folder, **self._as)
        self._make()
        self.start()
        self.database = ""

    def _make(self):
        self._run("initdb", "-D", self.folder / "data", "-U", "postgres", "-A", "trust", "--no-sync")

    def new_database(self):
        """Switch to a new database that contains only empty tables."""
        self.database = f"faktory_{secrets.token_hex(4)}"
        self.execute(f"CREATE DATABASE {self.database}", database="postgres")
        migrate = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0"]
        environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.runtime.processes.settings", **self.environment}
        subprocess.run(migrate, cwd=ROOT, env=environment, check=True)
        return self

    @property
    def environment(self):
        """The environment for programs with the tests' settings."""
        return self.address("127.0.0.1", self.port)

    def address(self, host, port):
        """Return the environment that leads to the same database through another host and port."""
        at = {"PGHOST": host, "PGPORT": str(port), "PGUSER": "postgres", "PGPASSWORD": ""}
        return {**at, "FAKTORY_TEST_DB": "postgresql", "FAKTORY_TEST_NAME": self.database}

    def start(self, largest_file=resource.RLIM_INFINITY):
        """Start the server and wait until it answers; `largest_file` limits its files in bytes, like a full disk."""
        settings = ("listen_addresses=127.0.0.1", f"port={self.port}", "unix_socket_directories=")
        self._run(
            *("pg_ctl", "start", "-w", "-t", "60", "-D", self.folder / "data", "-l", self.folder / "log"),
            *("-o", " ".join(f"-c {setting}" for setting in settings)),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY)),
        )

    def follow(self, port):
        """Start as the standby of the server at this port, with which it shares its history."""
        (self.folder / "data" / "standby.signal").touch()
        with (self.folder / "data" / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"primary_conninfo = 'host=127.0.0.1 port={port} user=postgres'\n")
        self.start()

    def stop(self, mode="fast"):
        """Stop the server; with `immediate`, as if it had been killed."""
        with suppress(subprocess.CalledProcessError):
            self._run("pg_ctl", "stop", "-w", "-D", self.folder / "data", "-m", mode)

    def execute(self, statement, *values, database=None):
        """Execute one statement on a new connection; return its rows, if any."""
        at = {"host": "127.0.0.1", "port": self.port, "user": "postgres", "dbname": database or self.database}
        with psycopg.connect(**at, autocommit=True, connect_timeout=5) as session:
            cursor = session.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def rows(self):
        return dict(self.execute(JOBS))

    def is_sound(self):
        return True

    def clean_up(self):
        self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program, *arguments, **options):
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        command = [self._programs / program, *arguments]
        subprocess.run(command, check=True, cwd=self.folder, **quiet, **self._as, **options)


def _free_port():
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
