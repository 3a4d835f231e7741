"""`manage.py runfaktory >&-`: start without some standard streams, as some shells and init scripts do."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from django.db import connection

from django_faktory.models import Job
from tests.project.tasks import noop
from tests.runtime.processes.conftest import FAST

pytestmark = [pytest.mark.slow, pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True), pytest.mark.once]


def run(command, closing):
    """Run a command of `manage.py` from a shell that closes these streams."""
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.runtime.processes.settings",
        "FAKTORY_TEST_NAME": str(connection.settings_dict["NAME"]),
        "FAKTORY_TEST_SETTINGS": json.dumps(FAST),
    }
    connection.close()
    line = f"exec {shlex.quote(sys.executable)} -m django {command} {closing}"
    return subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("closing", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_runfaktory_works_without_standard_streams(closing):
    result = noop.enqueue()
    done = run("runfaktory --worker-only --processes 1 --drain --no-reload", closing)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert Job.objects.get(jid=result.id).state == "succeeded"


def test_errors_are_reported_on_stderr_if_only_stdout_is_closed():
    done = run("runfaktory --worker-only --processes none --no-reload", ">&-")
    assert done.returncode == 1
    assert "--processes" in done.stderr
    assert "Traceback" not in done.stderr
