"""Each benchmark starts and measures at a small size; its figures mean nothing here."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import settings
from benchmarks.processes import original
from tests.programs import ROOT
from tests.services import postgresql, redis, redis_url

pytestmark = [pytest.mark.core, pytest.mark.slow]

ENOUGH_S = 8.0
"""Time after which a benchmark that still measures is interrupted: it works."""

SMALL = {
    "attack": ["idle", "--seconds", "0.5", "--scale", "0.01"],
    "batches": ["drain", "wire", "--members", "20", "--taken", "20", "--connections", "2", "--rounds", "1"],
    "ceiling": ["--seconds", "0.02"],
    "due_jobs": [],
    "enqueue": [],
    "first_speed": ["enqueue_many"],
    "gearmonkey": [],
    "growth": ["--backlog", "500", "--rounds", "1", "--jobs", "100"],
    "held": ["--log", "100", "--late", "1", "--held-s", "0.1", "--info", "150", "--snapshot-s", "1", "--offered", "4"],
    "history": ["--retention", "1000", "--midnight", "2", "--push", "40", "--jobs", "10"],
    "limits": ["--jobs", "20", "--held", "50"],
    "locks": ["--hot", "20", "--locked", "50"],
    "mutate": ["500"],
    "pages": ["10000"],
    "queues": ["20"],
    "scaling": ["--nodes", "1", "--jobs", "100", "--rounds", "1", "--idle-s", "0.5", "--no-docs"],
    "server_load": ["--rounds", "1", "--jobs", "50", "--idle-s", "0.5", "--connections", "10"],
    "steps": [],
    "traces": [],
}
ELSEWHERE = {"attackers", "fwp_load"}
"""Started by other benchmarks, with their arguments. `peers` needs the package index."""


def test_each_benchmark_is_started():
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert modules == {*SMALL, *ELSEWHERE}


@pytest.fixture
def environment():
    """Select a database of its own, which is dropped at the end."""
    if missing := postgresql().missing:
        pytest.skip(missing)
    import psycopg

    name = f"faktory_bench_{os.getpid()}"
    yield {"BENCH_NAME": name, "BENCH_DATABASE": "postgresql"}
    at = settings.DATABASES["default"]
    login = {"host": at["HOST"], "port": at["PORT"], "user": at["USER"], "password": at["PASSWORD"]}
    with psycopg.connect(**login, dbname="postgres", autocommit=True) as own:
        own.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_measures_until_it_ends_or_is_interrupted(name, environment):
    if name == "gearmonkey":
        if redis().missing:
            pytest.skip(redis().missing)
        environment |= {"REDIS_URL": f"{redis_url().rpartition('/')[0]}/15"}  # the benchmark empties it
    benchmark = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", *SMALL[name]],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    is_interrupted = False
    try:
        output, _ = benchmark.communicate(timeout=ENOUGH_S)
    except subprocess.TimeoutExpired:
        is_interrupted = True
        benchmark.send_signal(signal.SIGINT)  # not SIGTERM: it has to stop its nodes
        output, _ = benchmark.communicate(timeout=120)
    # 1: slower than wanted, as any benchmark may be in a test.
    assert is_interrupted or (benchmark.returncode in (0, 1) and "Traceback" not in output), output


FAKE_SERVER = """#!{python}
import os, signal, socket, sys
folder = sys.argv[sys.argv.index("-d") + 1]
port = int(sys.argv[sys.argv.index("-b") + 1].rpartition(":")[2])
open(os.path.join(folder, "data"), "x").close()  # fails if an earlier run has left its data
listener = socket.create_server(("127.0.0.1", port))
while True:
    listener.accept()[0].close()
"""


def test_each_run_of_the_original_server_stores_its_data_in_a_folder_of_its_own(tmp_path):
    binary = tmp_path / "faktory"
    binary.write_text(FAKE_SERVER.format(python=sys.executable))
    binary.chmod(0o755)
    for _ in range(2):
        with original(str(binary)) as (process, _):
            folder = Path(process.args[process.args.index("-d") + 1])
            assert (folder / "data").exists()
        assert not folder.exists()
