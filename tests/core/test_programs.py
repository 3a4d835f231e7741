"""What tests start does not outlive them, even where they are killed: it would take the next run's jobs."""

import shutil
import signal
import sys

import psutil
import pytest

from tests.programs import Program
from tests.waiting import wait_until

STARTS_ANOTHER = """
from tests.programs import Program
started = Program("-c", "import time; time.sleep(600)")
print("started", started.pid, flush=True)
started.code(600)
"""


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("setpriv"), reason="the kernel of Linux ends it")
def test_a_program_ends_when_the_run_of_tests_that_started_it_is_killed():
    run = Program("-c", STARTS_ANOTHER)
    try:
        pid = int(run.said("started")[0].split()[1])
        run.signal(signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid), 20, what="its program is gone")
    finally:
        run.clean_up()
