"""Programs that tests start: they end with the run, even if it is killed, and a fork behaves like a new interpreter.

A program that outlives its run would take the next run's jobs.
"""

import shutil
import signal
import sys

import psutil
import pytest

from tests import programs
from tests.fork_server import ForkServer
from tests.programs import Program
from tests.waiting import wait_until

pytestmark = pytest.mark.core

STARTS_ANOTHER = """
from tests.programs import Program
started = Program("-c", "import time; time.sleep(600)")
print("started", started.pid, flush=True)
started.code(600)
"""


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("setpriv"), reason="the kernel of Linux ends it")
def test_a_program_ends_when_the_test_run_that_started_it_is_killed():
    run = Program("-c", STARTS_ANOTHER)
    try:
        pid = int(run.wait_for_log("started")[0].split()[1])
        run.signal(signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid), what="its program has ended")
    finally:
        run.clean_up()


forked = pytest.mark.skipif(not ForkServer.is_possible(), reason="needs pidfd_open")


@pytest.fixture
def program(monkeypatch):
    """Start a program; all are ended after the test."""
    # Variables of this process may have changed since its server was started: each test starts one.
    monkeypatch.setattr(programs, "fork_servers", {})
    started = []

    def start(*args, **environment):
        started.append(Program(*args, **environment))
        return started[-1]

    yield start
    for one in started:
        one.clean_up()
    for server in programs.fork_servers.values():
        server.close()


@forked
@pytest.mark.parametrize(
    ("ends", "code"),
    [("exit", 3), ("raise", 1), ("interrupt", -signal.SIGINT), ("kill", -signal.SIGKILL), ("thread", 0)],
)
def test_a_forked_program_ends_with_the_exit_code_of_an_interpreter(program, ends, code):
    found = program("-m", "tests.tools.ending", ends)
    assert found.code() == code
    assert found.code() == code, "asked twice"
    assert not found.is_alive()
    assert ("Traceback" in found.text) == (ends in ("raise", "interrupt"))
    assert ("after the end" in found.text) == (ends != "kill")
