"""How runfaktory starts, restarts and refuses to start: exit codes and one clear line."""

import itertools
import os
import signal
import socket
import time

import psutil
import pytest
from django.core.management import CommandError, call_command

from django_faktory.store.dialects import triggers
from django_faktory.worker.job_log import NAMES_OF_TASKS
from tests.project import tasks
from tests.runtime.processes.test_runfaktory import ANY_PORT, WORKER
from tests.settings import KIND
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True), pytest.mark.once]


def only_line(program):
    """Return the only line of output, blank lines excluded."""
    [line] = [line for line in program.lines if line]
    return line


def test_an_invalid_option_exits_with_1(runfaktory):
    program = runfaktory("--processes", "many")
    assert program.code() == 1
    assert only_line(program) == "CommandError: --processes: expected a whole number from 1 to 1024, got 'many'"


def test_an_invalid_setting_exits_with_1(runfaktory):
    program = runfaktory(ANY_PORT, CONCURRENCY="many")
    assert program.code() == 1
    program.wait_for_log("FAKTORY['CONCURRENCY']", "expected", "'many'")


def test_a_port_in_use_exits_with_3(runfaktory):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = runfaktory(f"127.0.0.1:{port}", "--processes", "1")
        assert program.code() == 3
    program.wait_for_log("server cannot start", f"127.0.0.1:{port}", times=1)
    assert "Traceback" not in program.text


def test_a_wrong_password_for_a_remote_server_exits_with_3(runfaktory, address):
    server = runfaktory(ANY_PORT, "--server-only", PASSWORD="s3cret")
    program = runfaktory(*WORKER, "--url", "tcp://:wr0ng@{}:{}".format(*address(server)))
    assert program.code() == 3
    program.wait_for_log("worker cannot start", "assword")
    assert "wr0ng" not in program.text


def test_a_database_that_cannot_be_reached_exits_with_3(runfaktory):
    nowhere = "/nowhere/at/all.sqlite3" if KIND == "sqlite" else "no_such_database"
    program = runfaktory(ANY_PORT, environment={"FAKTORY_TEST_NAME": nowhere})
    assert program.code() == 3
    assert "the database 'default' cannot be used" in only_line(program)


def test_logging_configured_by_the_project_is_kept(runfaktory):
    quiet = {"FAKTORY_TEST_LOGGING": "1"}
    program = runfaktory(*WORKER, environment=quiet)
    program.wait_for_log("theirs: worker started")
    assert program.text.count("worker started") == 1


@pytest.mark.parametrize("names_logger", [False, True])
def test_a_job_has_one_line_unless_the_project_names_the_logger_of_django_tasks(runfaktory, names_logger):
    tasks.noop.enqueue()
    logging = ",".join(NAMES_OF_TASKS) if names_logger else "1"
    program = runfaktory(*WORKER, "--drain", environment={"FAKTORY_TEST_LOGGING": logging})
    assert program.code() == 0
    assert program.text.count("job succeeded") == 1
    lines_of_django = program.text.count("state=RUNNING") + program.text.count("state=SUCCESSFUL")
    assert lines_of_django == (2 if names_logger else 0)


class TestReloading:
    @pytest.fixture
    def app(self, tmp_path):
        """An app with tasks that the test changes."""
        folder = tmp_path / "changing_app"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "tasks.py").write_text("print('version 1')\n")
        return folder

    @pytest.fixture
    def start(self, runfaktory, app, monkeypatch):
        def start(*args, **environment):
            apps = {"FAKTORY_TEST_APPS": app.name, "FAKTORY_TEST_PATH": str(app.parent)}
            return runfaktory(ANY_PORT, "--processes", "1", *args, environment=apps | environment)

        return start

    def test_changed_code_restarts_server_and_workers(self, start, app):
        program = start("--reload")
        program.wait_for_log("server listens")
        program.wait_for_log("worker started")
        (app / "tasks.py").write_text("print('version 2')\n")
        moments = itertools.count(int(time.time()))

        def changed_and_noticed():
            # The reloader detects a change only in a file that it has seen before, and the moment of its first look
            # varies.
            os.utime(app / "tasks.py", times=(moment := next(moments), moment))
            return "worker stopped" in program.text

        wait_until(changed_and_noticed, every_s=0.5)
        program.wait_for_log("server listens", times=2)
        program.wait_for_log("worker started", times=2)
        program.wait_for_log("version 2")
        self.ends(program)

    def test_reloading_is_the_default_in_debug_mode(self, start):
        program = start(FAKTORY_TEST_DEBUG="1")
        program.wait_for_log("server listens")
        assert len(psutil.Process(program.pid).children(recursive=True)) == 4
        self.ends(program)

    def test_no_reload_disables_reloading_in_debug_mode(self, start):
        program = start("--no-reload", FAKTORY_TEST_DEBUG="1")
        program.wait_for_log("server listens")
        program.wait_for_log("worker started")
        assert len(psutil.Process(program.pid).children(recursive=True)) == 2

    def test_an_invalid_option_ends_the_reloader_with_1(self, start):
        program = start("--reload", "--concurrency", "many")
        assert program.code() == 1
        program.wait_for_log("--concurrency: expected")

    def test_the_death_of_the_reloader_ends_all_processes(self, start):
        program = start("--reload")
        program.wait_for_log("worker started")
        program.wait_for_log("server listens")
        family = psutil.Process(program.pid).children(recursive=True)
        program.signal(signal.SIGKILL)
        family[0].kill()
        wait_until(lambda: not any(map(is_alive, family)))

    def ends(self, program):
        """Stop the program by Ctrl-C, as in a terminal."""
        family = psutil.Process(program.pid).children(recursive=True)
        os.killpg(program.pid, signal.SIGINT)
        program.code()
        wait_until(lambda: not any(map(is_alive, family)))
        assert "Traceback" not in program.text


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_tasks_module_with_an_import_error_exits_with_1_and_its_line(runfaktory, tmp_path):
    folder = tmp_path / "broken_app"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "tasks.py").write_text("\nimport no_such_thing\n")
    program = runfaktory(ANY_PORT, environment={"FAKTORY_TEST_APPS": "broken_app", "FAKTORY_TEST_PATH": str(tmp_path)})
    assert program.code() == 1
    assert "broken_app.tasks cannot be imported: ModuleNotFoundError" in only_line(program)
    assert f"({folder}/tasks.py, line 2)" in only_line(program)


@pytest.mark.skipif(KIND != "sqlite", reason="others name the missing table in errors of their own")
def test_a_missing_table_error_mentions_migrate(transactional_db):
    triggers.forget()  # another test of this process may have found them
    call_command("migrate", "django_faktory", "zero", verbosity=0)
    try:
        with pytest.raises(
            CommandError, match=r"'default' lacks the trigger .*; run manage\.py migrate --database default$"
        ):
            call_command("faktory", "info")
    finally:
        call_command("migrate", verbosity=0)
