"""`runfaktory` as process 1 of a container: it must handle signals, end its children and reap orphans itself."""

import json
import signal
import subprocess
from contextlib import suppress

import psutil
import pytest
from django.db import connection

from django_faktory.models import Job
from tests.programs import Program
from tests.project.tasks import noop
from tests.runtime.processes import tasks
from tests.runtime.processes.conftest import FAST
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once]

AS_FIRST = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
EXECUTE = f"import os, sys; os.execvp('unshare', [*{AS_FIRST}, sys.executable, '-u', *sys.argv[1:]])"
GRACE_S = 30
"""Usual time between SIGTERM and SIGKILL of a container."""


@pytest.fixture(scope="module")
def _can_be_first():
    try:
        found = subprocess.run([*AS_FIRST, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("skipped: this machine has no unshare; install util-linux")
    if found.returncode:
        pytest.skip(f"skipped: no PID namespace can be created here: {found.stderr.strip()}; run as root")


@pytest.fixture
def container(_can_be_first, transactional_db):
    """Start the command as process 1 of a PID namespace. Return the program around it, and the process."""
    programs = []

    def start(*arguments):
        connection.close()
        program = Program(
            *("-c", EXECUTE, "-m", "django", "runfaktory", *arguments),
            DJANGO_SETTINGS_MODULE="tests.runtime.processes.settings",
            FAKTORY_TEST_NAME=str(connection.settings_dict["NAME"]),
            FAKTORY_TEST_SETTINGS=json.dumps(FAST),
        )
        programs.append(program)
        program.wait_for_log("worker started")
        [first] = program.children()
        with open(f"/proc/{first.pid}/status") as file:
            [numbers] = [line.split() for line in file if line.startswith("NSpid:")]
        assert numbers[-1] == "1"
        return program, first

    yield start
    for program in programs:
        program.clean_up()
        print(program.text)  # noqa: T201  (shown where the test failed)


def has_succeeded(result):
    return Job.objects.get(jid=result.id).state == "succeeded"


@pytest.mark.quick
def test_process_1_ends_on_sigterm_with_all_its_children(container):
    """Check S1: the system has no default action for process 1, so a signal without a handler has no effect."""
    program, first = container("127.0.0.1:0", "--processes", "2", "--concurrency", "2", "--no-reload")
    results = [noop.enqueue() for _ in range(20)]
    wait_until(lambda: all(map(has_succeeded, results)), 60)
    family = first.children(recursive=True)
    assert len(family) >= 3, "a server and two workers"
    first.send_signal(signal.SIGTERM)
    assert program.code(GRACE_S) == 0
    assert [process for process in family if process.is_running()] == []


def test_process_1_reaps_orphans_of_tasks(container):
    """Check that orphans are reaped. They used to stay as zombies until the container had no process numbers left."""
    program, first = container("--worker-only", "--processes", "1", "--concurrency", "2", "--no-reload")
    results = [tasks.leaves_a_process_behind.enqueue() for _ in range(3)]
    wait_until(lambda: all(map(has_succeeded, results)), 60)
    wait_until(lambda: names(first).count("sleep") == 0, what="the orphans have ended")
    assert len(names(first)) == 1, "the worker keeps running"
    after = noop.enqueue()
    wait_until(lambda: has_succeeded(after), 60)
    first.send_signal(signal.SIGTERM)
    assert program.code(GRACE_S) == 0
    assert "child ended" not in program.text


def names(process):
    """Return the names of its children, zombies included, but not of a child that is reaped meanwhile."""
    found = []
    for child in process.children():
        with suppress(psutil.NoSuchProcess):
            found.append(child.name())
    return found
