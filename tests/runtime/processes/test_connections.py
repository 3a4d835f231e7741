"""A node that gets too few connections, or loses them: jobs wait, none loses an attempt, each runs once."""

import time
from pathlib import Path

import pytest

from tests.faults.stores import Cluster, programs_folder
from tests.programs import Program
from tests.settings import KIND
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(KIND != "postgresql", reason="needs a PostgreSQL that it may stop"),
    pytest.mark.skipif(programs_folder() is None, reason="there is no pg_ctl on this machine"),
    pytest.mark.once,
    pytest.mark.timeout(600),
]
NODES, PROCESSES, THREADS, JOBS = 2, 1, 4, 300
ROLE = "limited"

ENQUEUE = """
import sys, django
django.setup()
from tests.runtime.processes import tasks
task, folder, count = getattr(tasks, sys.argv[1]), sys.argv[2], int(sys.argv[3])
task.enqueue_many([(folder, str(number)) for number in range(count)])
"""


@pytest.fixture(scope="module")
def _cluster():
    cluster = Cluster()
    yield cluster
    cluster.clean_up()


@pytest.fixture
def cluster(_cluster):
    _cluster.new_database()
    return _cluster


@pytest.fixture
def enqueue(cluster, tmp_path):
    def add(task, count):
        settings = {"DJANGO_SETTINGS_MODULE": "tests.runtime.processes.settings", **cluster.environment}
        program = Program("-c", ENQUEUE, task, str(tmp_path), str(count), **settings)
        assert program.code() == 0, program.text

    return add


def jobs(cluster):
    """Return state, failures and losses of the jobs."""
    return cluster.execute("SELECT state, losses, errtype, history FROM django_faktory_job")


def all_done(cluster):
    return {row[0] for row in jobs(cluster)} == {"succeeded"}


def runs(folder):
    """Return the names of the jobs that have run, once for each run."""
    path = Path(folder) / "begun"
    return path.read_text().split() if path.exists() else []


def noise(program):
    """Return its lines, without those of each job."""
    return [line for line in program.lines if "job succeeded" not in line]


@pytest.mark.parametrize("limit", [5, 9, 12, 20])
def test_too_few_connections_cost_no_job_an_attempt(cluster, enqueue, runfaktory, tmp_path, limit):
    enqueue("writes_atomically", JOBS)
    cluster.execute(f"DROP ROLE IF EXISTS {ROLE}")
    cluster.execute(f"CREATE ROLE {ROLE} LOGIN CONNECTION LIMIT {limit}")
    cluster.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {ROLE}")
    cluster.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {ROLE}")
    environment, begun_at = {**cluster.environment, "PGUSER": ROLE}, time.monotonic()
    try:
        nodes = [
            runfaktory(
                *("127.0.0.1:0", "--processes", str(PROCESSES), "--concurrency", str(THREADS), "--no-reload"),
                environment=environment,
            )
            for _ in range(NODES)
        ]
        wait_until(lambda: all_done(cluster), 300, every_s=0.2, what="all jobs have succeeded")
        took_s = time.monotonic() - begun_at
        for node in nodes:
            lines = noise(node)
            print(f"limit {limit}: {took_s:.1f} s, {len(lines)} lines")  # noqa: T201
            assert len(lines) <= took_s + 10, "one line a second, and those of the start"
            [needed] = [line for line in lines if "connections needed" in line] or [""]
            assert needed or limit == 20
        assert sorted(runs(tmp_path), key=int) == [str(number) for number in range(JOBS)], "each job runs once"
        assert {row[1:3] for row in jobs(cluster)} == {(0, "")}
    finally:
        for node in nodes:
            node.clean_up()
        cluster.execute(f"DROP OWNED BY {ROLE}")
        cluster.execute(f"DROP ROLE {ROLE}")
