"""Test `make demo` as a user runs it: real processes, on the configured database."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
from django.db import connection

from tests.programs import WITH_US
from tests.settings import KIND
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.django_db(transaction=True)]

ROOT = Path(__file__).resolve().parents[2]


def database_url():
    found = connection.settings_dict
    if KIND == "sqlite":
        return f"sqlite:///{found['NAME']}"
    scheme = {"postgresql": "postgres", "mariadb": "mysql"}[KIND]
    login = f"{quote(found['USER'])}:{quote(found['PASSWORD'])}"
    return f"{scheme}://{login}@{found['HOST']}:{found['PORT']}/{found['NAME']}"


def free_ports():
    """Return two free ports: the demo's default ports would collide with another demo."""
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as one,
        closing(socket.create_server(("127.0.0.1", 0))) as other,
    ):
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture
def demo(tmp_path):
    """Start the demo with these arguments, and kill all its remaining processes after the test."""
    started = []

    def start(*arguments):
        web, faktory = free_ports()
        ports = [f"--web-port={web}", f"--faktory-port={faktory}"]
        process = subprocess.Popen(
            [*WITH_US, sys.executable, str(ROOT / "scripts" / "demo.py"), f"--logs={tmp_path}", *ports, *arguments],
            env={**os.environ, "DATABASE_URL": database_url()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for left in (*children, process):
            left.kill()
        process.wait()
        process.stdout.close()


def test_the_demo_with_once_ends_with_every_job_as_expected(demo):
    output, _ = demo("--once").communicate(timeout=150)
    assert "7 of 7 jobs ended as expected" in output
    assert re.search(r"7 of 7 batches ended as expected, delivery \d+ left", output)
    assert "/admin/   login: admin   password: " in output.partition("migrating")[0], "the addresses come first"


def test_the_demo_exits_with_1_if_a_job_does_not_end_in_time(demo):
    process = demo("--once", "--within=0")
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "NO: dead after 2" in output


def until_it_runs(process):
    """Read the demo's output until all has started; return its processes, by the command that each runs."""
    for line in process.stdout:
        if "-- jobs run" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    return {word: [child for child in children if word in child.cmdline()] for word in ("runserver", "runfaktory")}


def test_ctrl_c_ends_the_demo_and_all_its_processes(demo):
    process = demo()
    children = [child for found in until_it_runs(process).values() for child in found]
    assert len(children) == 4, "web, supervisor, server, worker"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.endswith("stopped\n")
    wait_until(lambda: not [child for child in children if child.is_running()], what="all have ended")


def test_the_demo_ends_when_one_of_its_processes_dies(demo):
    process = demo()
    [web] = until_it_runs(process)["runserver"]
    web.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "web ended with exit code -9; its log, " in output
