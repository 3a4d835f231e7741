"""The supervisor of runfaktory does not import Django, without a visible difference: ADR 0012."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from django_faktory.models import Job
from tests.project.tasks import add
from tests.runtime.processes import tasks
from tests.runtime.processes.test_runfaktory import ANY_PORT, WORKER, reaches, state_of
from tests.settings import KIND
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        KIND == "mariadb", reason="there the processes of a node hear each other by pipes: it stays whole"
    ),
]

MB = 2**20
ROOT = Path(__file__).parents[3]
THEIRS = {"FAKTORY_TEST_LOGGING": "1"}
UNTRACED = {"COVERAGE_PROCESS_CONFIG": "", "COVERAGE_PROCESS_START": ""}
BREAKS_WHEN_TOLD = (
    "import pathlib\nif pathlib.Path({!r}).exists():\n    raise RuntimeError('broken since it started')\n"
)


def memory_mb(pid):
    return psutil.Process(pid).memory_info().rss / MB


def kill(pid):
    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def app(tmp_path):
    """Create an app; its tasks cannot be imported once the file `broken` exists. Return (environment, that file)."""
    folder, broken = tmp_path / "breaking_app", tmp_path / "broken"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "tasks.py").write_text(BREAKS_WHEN_TOLD.format(str(broken)))
    return {"FAKTORY_TEST_APPS": folder.name, "FAKTORY_TEST_PATH": str(tmp_path)}, broken


@pytest.mark.core
def test_the_supervisor_imports_neither_django_nor_large_modules():
    code = (
        "import sys, django_faktory.runtime.supervisor.standalone\n"
        "print(sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    large = {"dataclasses", "inspect", "logging", "threading", "typing"}
    assert not (large | {"django", "asyncio", "psycopg", "msgspec"}) & set(json.loads(done.stdout.replace("'", '"')))


def test_the_supervisor_needs_less_than_a_third_of_a_workers_memory(runfaktory):
    program = runfaktory(ANY_PORT, "--processes", "1", environment=UNTRACED)
    program.said("worker started")
    program.said("server listens")
    server, worker = program.children()
    wait_until(lambda: memory_mb(program.pid) < min(memory_mb(server.pid), memory_mb(worker.pid)) / 3)


def test_the_supervisor_keeps_its_command_line(runfaktory):
    program = runfaktory(*WORKER)
    program.said("worker started")
    # The process may be replacing its program: then it has no command line for a moment.
    wait_until(lambda: psutil.Process(program.pid).cmdline()[-len(WORKER) - 1 :] == ["runfaktory", *WORKER])


def test_supervisor_messages_use_the_logging_of_the_project(runfaktory):
    program = runfaktory(*WORKER, environment=THEIRS)
    program.said("worker started")
    [child] = program.children()
    kill(child.pid)
    [line] = program.said(
        "child ended, starting another role=worker 0", f"pid={child.pid}", "exit=SIGKILL", "pause=1 s"
    )
    assert line.startswith("theirs: ")
    program.said("worker started", times=2)
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    assert program.text.count("theirs: stopping") == 1


def test_supervisor_messages_contain_its_own_process_id(runfaktory):
    program = runfaktory(*WORKER)
    program.said("worker started")
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    [line] = [line for line in program.lines if line.endswith(" stopping")]
    assert line.split()[3] == str(program.pid)


def test_every_process_can_be_replaced_repeatedly(runfaktory):
    program = runfaktory(ANY_PORT, "--processes", "1")
    program.said("server listens")
    program.said("worker started")
    for times in (2, 3):
        for child in program.children():
            kill(child.pid)
        program.said("server listens", times=times)
        program.said("worker started", times=times)
        reaches(add.enqueue(2, 3), "succeeded")
    program.signal(signal.SIGTERM)
    assert program.code() == 0


def test_a_replacement_that_cannot_be_loaded_is_retried(runfaktory, app):
    """Change code under a running node: other processes continue, and the reason for the failure is logged."""
    environment, broken = app
    program = runfaktory(ANY_PORT, "--processes", "1", environment=environment)
    program.said("server listens")
    [line] = program.said("worker started")
    broken.touch()
    kill(int(line.rpartition("pid=")[2]))
    program.said("broken since it started")
    program.said("child ended, starting another role=worker 0", "exit=1")
    broken.unlink()
    program.said("worker started", times=2)
    assert program.text.count("server listens") == 1


def test_without_a_logging_process_messages_are_written_to_stderr(runfaktory, app):
    environment, broken = app
    program = runfaktory(*WORKER, environment=environment)
    program.said("worker started")
    [child] = program.children()
    broken.touch()
    kill(child.pid)
    program.said("broken since it started")
    program.said(f"ERROR   {program.pid} child ended, starting another", f"pid={child.pid}", "exit=SIGKILL")
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    program.said(f"INFO    {program.pid} stopping")


def test_a_replacement_stops_on_sigterm_while_it_loads(runfaktory):
    program = runfaktory(*WORKER)
    program.said("worker started")
    [child] = program.children()
    kill(child.pid)
    wait_until(lambda: [found for found in program.children() if found.pid != child.pid])
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    assert "stopping at once" not in program.text


def test_a_replacement_ends_with_its_supervisor(runfaktory):
    program = runfaktory(*WORKER)
    program.said("worker started")
    [child] = program.children()
    kill(child.pid)
    program.said("worker started", times=2)
    [replacement] = [found for found in program.children() if found.pid != child.pid]
    program.signal(signal.SIGKILL)
    program.said("the parent process is gone")
    wait_until(lambda: not replacement.is_running() or replacement.status() == psutil.STATUS_ZOMBIE)


def test_jobs_of_a_worker_killed_during_shutdown_are_requeued(runfaktory, meeting):
    """By then the report of the loss has been prepared."""
    result = tasks.never_ends.enqueue(str(meeting))
    program = runfaktory(*WORKER)
    meeting.pid()
    program.signal(signal.SIGTERM)
    wait_until(lambda: len(program.children()) == 2, what="a farewell that is prepared")
    program.insist(signal.SIGTERM, "stopping at once")
    assert program.code(15) == 0
    job = Job.objects.get(jid=result.id)
    assert (job.state, job.losses, job.failures) == ("enqueued", 0, 0)


def test_an_unneeded_farewell_process_ends_with_the_program(runfaktory, meeting):
    result = tasks.waits.enqueue(str(meeting))
    program = runfaktory(*WORKER)
    meeting.pid()
    program.signal(signal.SIGTERM)
    wait_until(lambda: len(program.children()) == 2, what="a farewell that is prepared")
    meeting.go_on()
    assert program.code() == 0
    assert state_of(result) == "succeeded"
    wait_until(lambda: not any(map(is_alive, program._family)))


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
