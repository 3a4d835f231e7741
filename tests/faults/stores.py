"""Where the jobs of a run are: the test's own database, or a PostgreSQL of its own that can be stopped and started.

A store says how its programs find it, and which jobs are left; it asks anew each time, since its server may be gone.
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

JOBS = "SELECT jid, state FROM django_faktory_job"


class TestDatabase:
    """The one that pytest-django has made."""

    __test__ = False

    def __init__(self):
        self.environment = {"FAKTORY_TEST_NAME": str(connection.settings_dict["NAME"])}
        connection.close()

    def rows(self):
        with connection.cursor() as cursor:
            cursor.execute(JOBS)
            return dict(cursor.fetchall())

    def is_sound(self):
        """SQLite's own look at its file; true elsewhere."""
        if connection.vendor != "sqlite":
            return True
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA integrity_check")
            return cursor.fetchall() == [("ok",)]


def programs_folder():
    """Where PostgreSQL's server programs are; None where there is no server on this machine."""
    on_path = shutil.which("pg_ctl")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    return Path(os.path.realpath(on_path)).parent if on_path else found[-1].parent if found else None


class Cluster:
    """A PostgreSQL server of one's own, sure of each commit as it comes from the box.

    It runs as `postgres` where the tests run as root, since it refuses to be root.
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
        """Empty but for the tables; what was there before is gone."""
        self.database = f"faktory_{secrets.token_hex(4)}"
        self.execute(f"CREATE DATABASE {self.database}", database="postgres")
        migrate = [sys.executable, "-m", "django", "migrate", "--verbosity", "0"]
        environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.commands.settings", **self.environment}
        subprocess.run(migrate, cwd=ROOT, env=environment, check=True)
        return self

    @property
    def environment(self):
        """For programs with the tests' settings."""
        return self.address("127.0.0.1", self.port)

    def address(self, host, port):
        """The same database, by another way."""
        at = {"PGHOST": host, "PGPORT": str(port), "PGUSER": "postgres", "PGPASSWORD": ""}
        return {**at, "FAKTORY_TEST_DB": "postgresql", "FAKTORY_TEST_NAME": self.database}

    def start(self, largest_file=resource.RLIM_INFINITY):
        """And wait until it answers. No file of it can be larger than so many bytes: as a disk that is full."""
        settings = ("listen_addresses=127.0.0.1", f"port={self.port}", "unix_socket_directories=")
        self._run(
            *("pg_ctl", "start", "-w", "-t", "60", "-D", self.folder / "data", "-l", self.folder / "log"),
            *("-o", " ".join(f"-c {setting}" for setting in settings)),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY)),
        )

    def follow(self, port):
        """Start as the standby of the server at this port, whose past is this one's too."""
        (self.folder / "data" / "standby.signal").touch()
        with (self.folder / "data" / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"primary_conninfo = 'host=127.0.0.1 port={port} user=postgres'\n")
        self.start()

    def stop(self, mode="fast"):
        """`immediate`: as if it had been killed."""
        with suppress(subprocess.CalledProcessError):
            self._run("pg_ctl", "stop", "-w", "-D", self.folder / "data", "-m", mode)

    def execute(self, statement, *values, database=None):
        """One statement, in a connection of its own; its rows, if it has some."""
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
