"""Run the harness's commands in a system's environment: one command per line as JSON, and one answer per line.

python -m benchmarks.peers.agent        (started by `asking.Agent`, with the environment that it sets)
"""

import importlib.metadata
import json
import os
import platform
import re
import sys
import time
import traceback

import django

from benchmarks.peers.arithmetic import median
from benchmarks.peers.systems import SYSTEMS

CALLS = 25  # per round of `enqueue_turns`
POSTGRESQL = ("server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_connections")


class Agent:
    """Implements the commands: each public method is one."""

    def __init__(self, system):
        self.system = system

    def prepare(self):
        """Create an empty database with its tables; return the versions in use."""
        from django.core.management import call_command
        from django.db import connection

        if connection.vendor == "postgresql":
            administer("DROP DATABASE IF EXISTS {} WITH (FORCE)", "CREATE DATABASE {}")
        django.setup()
        call_command("migrate", verbosity=0, run_syncdb=True)
        return self.versions()

    def remove(self):
        from django.db import connection

        connection.close()
        if connection.vendor == "postgresql":
            administer("DROP DATABASE IF EXISTS {} WITH (FORCE)")

    def versions(self):
        """Return the versions of the system's own packages, and of the packages that it depends on."""
        named = [re.split(r"[\[<>=]", name)[0] for name in self.system.requirements if not name.startswith(("-", "."))]
        if self.system.ours:
            named.append("django-faktory")
        stands_on = ["psycopg"] + (["redis"] if self.system.store == "Redis" else [])
        found = {name: importlib.metadata.version(name) for name in dict.fromkeys([*named, "django", *stands_on])}
        return found | {"python": platform.python_version()}

    def database(self):
        """Return the database's settings without which a figure cannot be interpreted."""
        from django.db import connection

        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                return {name: shown(cursor, f"SHOW {name}") for name in POSTGRESQL}
            return {name: shown(cursor, f"PRAGMA {name}") for name in ("journal_mode", "synchronous")}

    def redis_version(self):
        return self.system.redis().info("server")["redis_version"]

    def empty(self):
        """Delete all jobs and rows of earlier measures; on PostgreSQL, without leaving dead rows."""
        from django.db import connection

        self.system.empty()
        tables = [name for name in connection.introspection.table_names() if name != "django_migrations"]
        quoted = [connection.ops.quote_name(name) for name in tables]
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute(f"TRUNCATE {', '.join(quoted)} CASCADE")
                return
            cursor.execute("PRAGMA foreign_keys = OFF")
            for name in quoted:
                cursor.execute(f"DELETE FROM {name}")
            cursor.execute("PRAGMA foreign_keys = ON")

    def settle(self):
        """Update the planner's statistics as in a database that has run for a while, and flush pending writes."""
        from django.db import connection

        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("VACUUM ANALYZE")
                cursor.execute("CHECKPOINT")
            else:
                cursor.execute("ANALYZE")

    def enqueue_many(self, kind, count):
        """Enqueue `count` jobs, with the bulk call if there is one; return the seconds it took."""
        begun = time.perf_counter()
        self.system.enqueue_many(kind, range(count))
        return time.perf_counter() - begun

    def enqueue(self, kind, number):
        """Enqueue one job; return the time at which the call began."""
        begun = time.time()
        self.system.enqueue(kind, number)
        return begun

    def enqueue_turns(self, calls):
        """Alternate single enqueues and bare `create()` calls.

        Returns microseconds per call, and the medians of the ratios between them.
        """
        ways = (bare, self._alone, bare_with_row, self._with_row)
        for way in ways:
            timed(way, 5)
        turns = [[timed(way, CALLS) for way in ways] for _ in range(max(1, calls // CALLS))]
        names = ("create_us", "enqueue_us", "row_and_create_us", "row_and_enqueue_us")
        found = {name: median(column) for name, column in zip(names, zip(*turns, strict=True), strict=True)}
        found["enqueue_ratio"] = median(turn[1] / turn[0] for turn in turns)
        found["with_row_ratio"] = median(turn[3] / turn[2] for turn in turns)
        return found

    def _alone(self, number):
        self.system.enqueue("noop", number)

    def _with_row(self, number):
        from django.db import transaction

        with transaction.atomic():
            bare(number)
            self.system.enqueue_with_row("noop", number)

    def left(self):
        return self.system.left()

    def rows(self):
        """Return how many rows the tasks wrote, and for how many jobs."""
        from benchmarks.peers.project.models import Row

        return [Row.objects.count(), Row.objects.values("number").distinct().count()]

    def server_pids(self):
        """Return the pids of PostgreSQL's processes for this database, and of those for all databases.

        The process of this agent's own session is left out.
        """
        from django.db import connection

        if connection.vendor != "postgresql":
            return []
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                " AND (datname = current_database() OR datname IS NULL)"
            )
            return [pid for (pid,) in cursor.fetchall()]

    def operations(self):
        """Return the number of transactions of this database, or of commands of Redis, so far."""
        from django.db import connection

        if self.system.store == "Redis":
            return self.system.redis().info("stats")["total_commands_processed"]
        if connection.vendor != "postgresql":
            return None
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
            )
            return cursor.fetchone()[0]


def bare(number):
    from benchmarks.peers.project.models import Row

    Row.objects.create(number=number, text="x")


def bare_with_row(number):
    from django.db import transaction

    with transaction.atomic():
        bare(number)
        bare(number)


def timed(call, calls):
    begun = time.perf_counter()
    for number in range(calls):
        call(number)
    return (time.perf_counter() - begun) / calls * 1e6


def shown(cursor, statement):
    cursor.execute(statement)
    return cursor.fetchone()[0]


def administer(*statements):
    import psycopg

    from benchmarks.settings import DATABASES

    at = DATABASES["default"]
    place = {"host": at["HOST"], "port": at["PORT"], "user": at["USER"], "password": at["PASSWORD"]}
    with psycopg.connect(**place, dbname="postgres", autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.format(psycopg.sql.Identifier(at["NAME"]).as_string(connection)))


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of packages must not mix with the answers
    agent = Agent(SYSTEMS[os.environ["BENCH_SYSTEM"]])
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(agent, name)(*arguments)}
        except Exception as error:  # noqa: BLE001 (the harness reports it)
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
