"""Run `manage.py runfaktory` in processes of its own, over the test's database."""

import json
import os
import re

import pytest
from django.db import connection

from tests.programs import Program
from tests.waiting import wait_until

FAST = {"POLL_INTERVAL": 0.2, "BEAT_INTERVAL": 0.5, "WORKER_TIMEOUT": 30}


@pytest.fixture
def runfaktory(transactional_db):
    """Start the command with these arguments. All programs are ended after the test."""
    programs = []

    def start(*args, environment=None, **settings):
        connection.close()
        program = Program(
            *("-m", "django", "runfaktory", *args),
            **{
                "DJANGO_SETTINGS_MODULE": "tests.runtime.processes.settings",
                "FAKTORY_TEST_NAME": str(connection.settings_dict["NAME"]),
                "FAKTORY_TEST_SETTINGS": json.dumps(FAST | settings),
            }
            | (environment or {}),
        )
        programs.append(program)
        return program

    yield start
    for program in programs:
        program.clean_up()
        print(f"--- {program.pid}\n{program.text}")  # noqa: T201  (shown where the test failed)


@pytest.fixture
def address():
    """Return the host and port that a started server listens on."""

    def found(program):
        [line] = program.wait_for_log("server listens")
        host, port = re.search(r"address=(\S+):(\d+)", line).groups()
        return host, int(port)

    return found


@pytest.fixture
def meeting(tmp_path):
    """A folder through which a task and its test communicate."""
    return Meeting(tmp_path)


class Meeting:
    def __init__(self, folder):
        self.folder = folder
        os.mkfifo(folder / "pipe")

    def __str__(self):
        return str(self.folder)

    def pid(self, but=None):
        """Return the pid of the process that runs the task, once it is written and differs from `but`."""

        def read_pid():
            path = self.folder / "pid"
            pid = int(path.read_text()) if path.exists() else None
            return pid if pid != but else None

        return wait_until(read_pid, what="the pid written by a task")

    def release_task(self):
        (self.folder / "pipe").write_text("go on")
