"""Programs started by tests end with the run, even if it is killed; otherwise they would take the next run's jobs."""

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

ENDS_WITH_PARENT = """
import subprocess, sys
code = "import signal; from tests.programs import end_with_parent as end; end(); print(1, flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print("started", child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends it")
def test_a_process_with_end_with_parent_ends_when_its_parent_is_killed():
    parent = Program("-c", ENDS_WITH_PARENT)
    try:
        pid = int(parent.wait_for_log("started")[0].split()[1])
        assert psutil.pid_exists(pid)
        parent.signal(signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid), 60, what="its child has ended")
    finally:
        parent.clean_up()


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("setpriv"), reason="the kernel of Linux ends it")
def test_a_program_ends_when_the_test_run_that_started_it_is_killed():
    run = Program("-c", STARTS_ANOTHER)
    try:
        pid = int(run.wait_for_log("started")[0].split()[1])
        run.signal(signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid), what="its program has ended")
    finally:
        run.clean_up()
