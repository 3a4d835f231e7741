"""The supervisor of runfaktory: its messages, and the replacements that it forks."""

import signal

import psutil
import pytest

from tests.project.tasks import add
from tests.runtime.processes.test_runfaktory import ANY_PORT, WORKER, reaches
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.django_db(transaction=True)]

PROJECT_LOGGING = {"FAKTORY_TEST_LOGGING": "1"}


def test_supervisor_messages_use_the_logging_of_the_project(runfaktory):
    program = runfaktory(*WORKER, environment=PROJECT_LOGGING)
    program.wait_for_log("worker started")
    [child] = program.children()
    child.kill()
    [line] = program.wait_for_log(
        "child ended, starting another role=worker 0", f"pid={child.pid}", "exit=SIGKILL", "pause=1 s"
    )
    assert line.startswith("theirs: ")
    program.wait_for_log("worker started", times=2)
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    assert program.text.count("theirs: stopping") == 1


def test_supervisor_messages_contain_its_own_process_id(runfaktory):
    program = runfaktory(*WORKER)
    program.wait_for_log("worker started")
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    [line] = [line for line in program.lines if line.endswith(" stopping")]
    assert line.split()[3] == str(program.pid)


def test_every_process_can_be_replaced_repeatedly(runfaktory):
    program = runfaktory(ANY_PORT, "--processes", "1")
    program.wait_for_log("server listens")
    program.wait_for_log("worker started")
    for times in (2, 3):
        for child in program.children():
            child.kill()
        program.wait_for_log("server listens", times=times)
        program.wait_for_log("worker started", times=times)
        reaches(add.enqueue(2, 3), "succeeded")
    program.signal(signal.SIGTERM)
    assert program.code() == 0


def test_a_replacement_stops_on_sigterm_while_it_starts(runfaktory):
    program = runfaktory(*WORKER)
    program.wait_for_log("worker started")
    [child] = program.children()
    child.kill()
    wait_until(lambda: [found for found in program.children() if found.pid != child.pid])
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    assert "stopping at once" not in program.text


def test_a_replacement_ends_with_its_supervisor(runfaktory):
    program = runfaktory(*WORKER)
    program.wait_for_log("worker started")
    [child] = program.children()
    child.kill()
    program.wait_for_log("worker started", times=2)
    [replacement] = [found for found in program.children() if found.pid != child.pid]
    program.signal(signal.SIGKILL)
    program.wait_for_log("the parent process is gone")
    wait_until(lambda: not replacement.is_running() or replacement.status() == psutil.STATUS_ZOMBIE)
