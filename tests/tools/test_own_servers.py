"""Servers of a test run end with it, even if it is killed, and leave no files behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import own_servers
from tests.programs import ROOT, Program
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.core,
    pytest.mark.skipif(not own_servers.Redis.is_installed(), reason="redis-server is not installed"),
]

RUN = """
import os, time
from tests.own_servers import Guard
os.environ.pop("REDIS_URL", None)
with Guard(["redis"]):
    print("started", os.environ["REDIS_URL"], flush=True)
    time.sleep(600)
"""


@pytest.fixture
def run(tmp_path):
    """Yield a run with its own Redis: its program, the guard and the server."""
    program = Program("-c", RUN, TMPDIR=str(tmp_path))
    try:
        program.wait_for_log("started")
        [guard] = psutil.Process(program.pid).children()
        [server] = guard.children()
        yield program, guard, server
    finally:
        program.clean_up()


def wait_for_end(*processes):
    for process in processes:
        wait_until(lambda one=process: not one.is_running(), 60, what=f"{process} has ended")


def test_servers_and_their_folder_are_removed_after_the_run_is_killed(run):
    program, guard, server = run
    folder = Path(server.cwd()).parent
    program.signal(signal.SIGKILL)
    wait_for_end(server, guard)
    assert not folder.exists()


def test_servers_survive_signals_to_the_foreground_process_group(run):
    _, guard, server = run
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        guard.send_signal(number)
    assert guard.is_running()
    assert server.is_running()


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("setpriv"), reason="Linux ends it")
def test_servers_end_after_the_guard_is_killed(run):
    _, guard, server = run
    guard.kill()
    wait_for_end(server)


def test_a_server_address_in_the_environment_takes_precedence():
    command = [
        sys.executable,
        "-m",
        "tests.own_servers",
        sys.executable,
        "-c",
        "import os; print(os.environ['REDIS_URL'])",
    ]
    mine = {"REDIS_URL": "redis://elsewhere:1/0", "PGHOST": "elsewhere", "MYSQL_HOST": "elsewhere"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **mine}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["redis://elsewhere:1/0"]


@pytest.mark.parametrize("name", own_servers.SERVERS)
def test_each_installed_server_starts_and_exports_its_address(name):
    if not own_servers.SERVERS[name].is_installed():
        pytest.skip("not installed")
    code = (
        "import json, os\n"
        "from tests.own_servers import Guard\n"
        "for name in ('PGHOST', 'PGPORT', 'MYSQL_HOST', 'MYSQL_PORT', 'REDIS_URL'):\n"
        "    os.environ.pop(name, None)\n"
        f"with Guard(['{name}']) as guard:\n"
        "    from tests import services\n"
        f"    print(json.dumps([guard.environment, services.{name}().missing]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    environment, missing = json.loads(done.stdout)
    assert environment
    assert not missing or "not installed" in missing
