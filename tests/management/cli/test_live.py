"""Test `top` in a pseudo-terminal, in a separate process."""

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest
from django.db import connection

from tests.factories import JobFactory, QueueFactory
from tests.programs import ROOT, WITH_US

pytestmark = pytest.mark.once


@pytest.mark.django_db(transaction=True)
def test_top_draws_the_current_state_and_ends_after_count_refreshes():
    QueueFactory(name="mail")
    JobFactory(working=True, jobtype="shop.slow", wid="\x1b[31mw")
    name = str(connection.settings_dict["NAME"])
    connection.close()
    ours, theirs = pty.openpty()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DJANGO_SETTINGS_MODULE": "tests.runtime.processes.settings",
        "FAKTORY_TEST_NAME": name,
        "FAKTORY_TEST_SETTINGS": json.dumps({}),
        "TERM": "xterm-256color",
        "COLUMNS": "160",
        "LINES": "50",
    }
    words = [*WITH_US, sys.executable, "-m", "django", "faktory", "top", "--count", "2", "--interval", "0.1"]
    program = subprocess.Popen(words, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    with suppress(OSError):  # Linux raises it when the other side is closed
        while some := os.read(ours, 65_536):
            output += some
    os.close(ours)
    assert program.wait(60) == 0
    text = output.decode()
    assert all(word in text for word in ("processed 0", "(0.0/s)", "mail", "shop.slow", "\\x1b[31mw"))
    assert "\x1b[2K" in text  # the screen is redrawn in place
