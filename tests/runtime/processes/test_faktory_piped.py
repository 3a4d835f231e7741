"""`manage.py faktory … | head`: the reader closes the pipe early."""

import json
import os
import subprocess
import sys

import pytest
from django.db import connection

pytestmark = [pytest.mark.slow, pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True), pytest.mark.once]


def test_a_closed_output_pipe_ends_the_command_without_a_traceback():
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.runtime.processes.settings",
        "FAKTORY_TEST_NAME": str(connection.settings_dict["NAME"]),
        "FAKTORY_TEST_SETTINGS": json.dumps({}),
    }
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "django", "faktory", "info"],
            stdout=writing,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
