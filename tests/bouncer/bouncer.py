"""Start a separate PgBouncer for the tests' PostgreSQL, on its own port and in its own folder.

It gives each transaction a different session if possible, so that code that relies on one session fails at once.
Uses no Django.
"""

import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path

import psycopg

from tests import services
from tests.bouncer import SESSIONS
from tests.programs import WITH_US
from tests.waiting import wait_until

SETTINGS = """\
[databases]
* = host={host} port={port} {access}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
max_client_conn = 1000
default_pool_size = {sessions}
server_round_robin = 1
server_idle_timeout = 5
ignore_startup_parameters = extra_float_digits
stats_period = 3600
"""


class Bouncer:
    """A running PgBouncer; the constructor returns when it answers."""

    def __init__(self, mode="transaction"):
        self.folder = Path(tempfile.mkdtemp(prefix="faktory-bouncer-"))
        self.port = _free_port()
        at = {**_server(), "access": f"user={_user()}"}
        if password := os.environ.get("PGPASSWORD"):
            at["access"] += " password='{}'".format(password.replace("'", "''"))
        settings = self.folder / "pgbouncer.ini"
        settings.write_text(SETTINGS.format(**at, mode=mode, sessions=SESSIONS, own_port=self.port))
        # PgBouncer refuses to run as root.
        user = {"user": "nobody"} if os.geteuid() == 0 else {}
        if user:
            shutil.chown(self.folder, "nobody")
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*WITH_US, services.pgbouncer_path(), settings], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, **user,
            )  # fmt: skip
        try:
            wait_until(self._answers, what="PgBouncer answers")
        except AssertionError:
            print(self.log())  # noqa: T201  (why it does not)
            self.clean_up()
            raise

    @property
    def environment(self):
        """The environment for programs with the tests' settings."""
        return {"PGHOST": "127.0.0.1", "PGPORT": str(self.port), "FAKTORY_TEST_VIA": "bouncer"}

    def log(self):
        return (self.folder / "log").read_text(errors="replace")

    def clean_up(self):
        self._process.kill()
        self._process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self):
        assert self._process.poll() is None, "it has ended"
        try:
            with psycopg.connect(host="127.0.0.1", port=self.port, user="any", dbname="postgres", connect_timeout=3):
                return True
        except psycopg.OperationalError:
            return False


def sessions_left():
    """Return how many connections PostgreSQL still accepts, without those reserved for superusers."""
    settled = "current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int"
    taken = "(SELECT COUNT(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid())"
    access = {"user": _user(), "password": os.environ.get("PGPASSWORD", ""), "dbname": "postgres"}
    with psycopg.connect(**_server(), **access, connect_timeout=services.TIMEOUT_S) as connection:
        [left] = connection.execute(f"SELECT {settled} - {taken}").fetchone()
    return left


def _server():
    return {"host": os.environ.get("PGHOST", "127.0.0.1"), "port": os.environ.get("PGPORT", "5432")}


def _user():
    return os.environ.get("PGUSER", "postgres")


def _free_port():
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
