"""Two test runs of one checkout would use the same databases and reports: the second one ends at once."""

import contextlib
import fcntl
import subprocess
import sys

import pytest

from tests.programs import ROOT

pytestmark = pytest.mark.core


@pytest.fixture
def other_run():
    """Hold the lock of a test run, unless the run of this test holds it."""
    (ROOT / ".demo").mkdir(exist_ok=True)
    with (ROOT / ".demo" / "tests.lock").open("w") as lock:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def test_a_second_test_run_in_one_checkout_ends_at_once_and_says_why(other_run):
    command = [sys.executable, "scripts/test.py", "--databases", "sqlite", "tests/tools/test_test_runs.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("expected one test run at a time in this checkout")
