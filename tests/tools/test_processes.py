"""Test `pytest --processes`: it reports the same results as one process, and survives crashes."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.core


@pytest.fixture
def run(tmp_path):
    """Return a function that runs these tests in a folder of their own, and returns exit code and output."""
    (tmp_path / "conftest.py").write_text("from tests.processes import pytest_addoption, pytest_runtestloop\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(code, *options, processes=2):
        (tmp_path / "test_it.py").write_text(code)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
        done = subprocess.run(
            [*command, f"--processes={processes}", *options, str(tmp_path)],
            # The import of the plugins takes most of the time.
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def summary(output):
    return re.sub(r" in [\d.]+s.*", "", output.strip().splitlines()[-1])


RESULTS = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_good(number):
    pass

def test_bad():
    print("printed by the test")
    assert [1] == [2]

def test_skipped():
    pytest.skip("why")

@pytest.fixture
def broken():
    raise ValueError("no room")

def test_error(broken):
    pass
"""


@pytest.mark.parametrize("processes", [1, 3, 25])
def test_results_are_those_of_one_process(run, processes):
    code, output = run(RESULTS, processes=processes)
    assert (code, summary(output)) == (1, "1 failed, 20 passed, 1 skipped, 1 error")
    for text in ("assert [1] == [2]", "printed by the test", "ValueError: no room"):
        assert text in output


def test_the_report_for_ci_has_each_test_once(run, tmp_path):
    run(RESULTS, f"--junit-xml={tmp_path}/report.xml", processes=3)
    report = (tmp_path / "report.xml").read_text()
    assert 'errors="1" failures="1" skipped="1" tests="23"' in report
    assert report.count("<testcase") == 23


CRASHING = """
import os, signal

def test_before():
    pass

def test_crash():
    os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    pass
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_crash_fails_its_test_and_the_other_tests_run(run, processes):
    code, output = run(CRASHING, processes=processes)
    assert (code, summary(output)) == (1, "1 failed, 2 passed")
    assert "test_crash" in output
    assert "its process ended with -9" in output


ENDING = """
import pathlib, pytest

@pytest.fixture(scope="session", autouse=True)
def opened(tmp_path_factory):
    yield
    (pathlib.Path(__file__).parent / f"closed-{tmp_path_factory.getbasetemp().name}").touch()

@pytest.mark.parametrize("number", range(6))
def test_it(number):
    pass
"""


def test_each_process_ends_its_session_fixtures_and_has_a_folder_of_its_own(run, tmp_path):
    assert run(ENDING, processes=3)[0] == 0
    assert {path.name for path in tmp_path.glob("closed-*")} == {"closed-gw0", "closed-gw1", "closed-gw2"}


FAILING = """
import pytest

@pytest.mark.parametrize("number", range(200))
def test_it(number):
    assert number != 0
"""


def test_exitfirst_stops_the_run(run):
    code, output = run(FAILING, "-x", processes=2)
    assert code == 1
    assert "stopping after 1 failures" in output
    assert int(re.search(r"(\d+) passed", output)[1]) < 199


def test_an_error_during_collection_runs_no_test(run):
    code, output = run("import nothing_of_this_name\n", processes=2)
    assert code == 2
    assert "nothing_of_this_name" in output


SLOWER = """
import os, pathlib, time, pytest

@pytest.mark.parametrize("number", range(40))
def test_it(number):
    runs, half = pathlib.Path(__file__).parent / "runs", number // 20
    with runs.open("a") as file:
        file.write(f"{half} {os.getpid()}\\n")
    ends_at = time.monotonic() + 60
    while half == 1 and len({line for line in runs.read_text().split("\\n") if line[:1] == "1"}) < 2:
        assert time.monotonic() < ends_at, "no other process has taken a test of this half"
        time.sleep(0.01)
"""


def test_a_process_without_tests_takes_some_of_another(run, tmp_path):
    assert run(SLOWER, processes=2)[0] == 0
    assert len((tmp_path / "runs").read_text().splitlines()) == 40
