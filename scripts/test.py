"""Run the tests on SQLite, PostgreSQL and MariaDB, and print what was left out.

The databases run at the same time; the output of the second and third is printed at the end.
Without --all the tests marked `slow` are left out, Hypothesis tries few examples, and the second and third database run
only what is about SQL and transactions (the marks in pyproject.toml). --rest runs only what --all adds to a run without
it.
Arguments that are not its own go to pytest: if they name tests, as in `scripts/test.py tests/store -x`, all of these
run as with --all.
The servers are started for the run (tests/own_servers.py) unless the environment names others.
With CI=true a missing server or program is a failure, and if few tests fail, they run a second time alone: a test that
passes then is reported as flaky, a bug of the test or of the code.
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import services  # noqa: E402  (found by the path above)
from tests.own_servers import Guard  # noqa: E402
from tests.programs import WITH_US, obey_signals  # noqa: E402

PROCESSES = min(12, 2 * (os.cpu_count() or 2))
PROCESSES_OF_OTHERS = 2
"""Processes on the first database, and on each other one, which has fewer tests.

Tests wait for half of their time, so that there are more processes than CPUs. Each imports and collects all tests, which
takes 5 s of CPU time on the first database.
"""

SLOW_PROCESSES_OF_OTHERS = 3
"""The same with slow tests, which wait more."""

COMPILED = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(ROOT / ".demo" / "compiled")}
"""If the environment disables bytecode files, each of some 2,000 processes would compile the whole project again."""

TAG = f"make{zlib.crc32(str(ROOT).encode()):08x}"
"""Databases of this checkout, which differ from those of pytest alone: both may run at the same time."""

FEW = 12
"""Maximum number of failures that are run again. More failures than this have a common cause."""

SOME_FAILED = 1
NOTHING_CHOSEN = 5
"""Exit code of pytest if no test was selected. No failure: the named files may have core tests only."""


class Run:
    """The tests on one database: pytest's own process, and its results."""

    def __init__(self, kind, *, is_first, is_quick, is_rest, measure, more):
        self.kind = kind
        self.report = ROOT / ".demo" / f"tests-{kind}.xml"
        python = [*WITH_US, sys.executable]
        self.command = [*python, "-m", *(["coverage", "run", "-m"] if measure else []), "pytest", "-q"]
        self.command += [f"--junit-xml={self.report}", "-o", "junit_logging=no"]
        self.command += ["-o", f"cache_dir={ROOT / '.demo' / f'cache-{kind}'}"]
        chosen = [expression(kind, is_first=is_first, is_quick=is_quick)]
        if is_rest:
            chosen.append(f"(varied or not ({expression(kind, is_first=is_first, is_quick=True)}))")
        if not names_tests(more):
            chosen.append("not linted")
        self.command += ["-m", " and ".join(filter(None, chosen)), *more]
        self._examples = "quick" if is_quick else "thorough"
        self._processes = PROCESSES if is_first else PROCESSES_OF_OTHERS if is_quick else SLOW_PROCESSES_OF_OTHERS
        self.counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        self.seconds = 0.0
        self.flaky = []
        """Tests that failed in parallel with others and passed alone."""

    def start(self, *, is_shown):
        """Start pytest; its output goes to the terminal or, unless `is_shown`, to a file until it ends."""
        self._output = None if is_shown else self.report.with_suffix(".log")
        self._process = self._pytest("-n", str(self._processes))

    def finish(self):
        """Wait for pytest, print its output, and count its results."""
        self.exit_code = self._process.wait()
        if self._output:
            print(f"\n== {self.kind}\n{self._output.read_text(encoding='utf-8', errors='replace')}", flush=True)
            self._output = None
        suites = ET.parse(self.report).getroot() if self.report.exists() else ET.Element("testsuites")
        self._count(suites)
        self._failed = [
            f"{case.get('classname')}.{case.get('name')}" for case in suites.iter("testcase") if _failed(case)
        ]

    def repeat_failed(self):
        """Run a few failed tests a second time, alone."""
        if self.exit_code != SOME_FAILED or len(self._failed) > FEW:
            return
        print(f"\n{len(self._failed)} failed on {self.kind}: once more, alone", flush=True)
        self.exit_code = self._pytest("--last-failed", "--last-failed-no-failures", "none").wait()
        self.flaky = self._failed if self.is_good else []

    def _pytest(self, *options):
        self.report.unlink(missing_ok=True)
        own = {"FAKTORY_TEST_DB": self.kind} | ({"COVERAGE_CORE": "sysmon"} if sys.version_info >= (3, 12) else {})
        mine = {"FAKTORY_TEST_TAG": f"{TAG}{self.kind[:1]}", "FAKTORY_TEST_EXAMPLES": self._examples}
        environment = {**mine, **os.environ, **COMPILED, **own}
        with self._output.open("w") if self._output else contextlib.nullcontext() as output:
            return subprocess.Popen(
                [*self.command, *options], cwd=ROOT, env=environment, stdout=output, stderr=output and subprocess.STDOUT
            )

    def _count(self, suites):
        for suite in suites.iter("testsuite"):
            failed = int(suite.get("failures")) + int(suite.get("errors"))
            skipped = int(suite.get("skipped"))
            self.counts["failed"] += failed
            self.counts["skipped"] += skipped
            self.counts["passed"] += int(suite.get("tests")) - failed - skipped
            self.seconds = float(suite.get("time"))

    @property
    def is_good(self):
        return self.exit_code in (0, NOTHING_CHOSEN)


def expression(kind, *, is_first, is_quick):
    """Return pytest's expression of the tests to run on this kind of database, or an empty string for all."""
    once = ["once"]
    if is_quick:
        once += ["once_if_quick", *(["portable"] if kind == "mariadb" else [])]
    return " and ".join(
        [
            *([] if is_first else [f"not core and (each_database or not ({' or '.join(once)}))"]),
            *(["(quick or not slow)"] if is_quick else []),
        ]
    )


def main():
    obey_signals()
    options, more = arguments()
    wanted = options.databases.split(",")
    (ROOT / ".demo").mkdir(exist_ok=True)
    with (ROOT / ".demo" / "tests.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # both would use the same databases and reports, and give false failures
            print(
                "expected one test run at a time in this checkout: wait for the other, or use a clone", file=sys.stderr
            )
            return 1
        with Guard([*wanted, "redis"]):
            return run_all(wanted, options, more)


def run_all(wanted, options, more):
    """Run the tests on each database; return the exit code."""
    asked = [services.DATABASES[kind]() for kind in wanted]
    others = [ask() for ask in services.OTHERS]
    reachable = [kind for kind, service in zip(wanted, asked, strict=True) if not service.missing]
    is_ci = os.environ.get("CI") == "true"
    measure = options.coverage and not more
    is_quick = not (options.all or options.rest or measure or names_tests(more))
    if measure:
        coverage("erase")
    how = {"is_quick": is_quick, "is_rest": options.rest, "measure": measure, "more": more}
    runs = [Run(kind, is_first=n == 0, **how) for n, kind in enumerate(reachable)]
    if not names_tests(more):
        compile_tests()
    for run in runs:
        run.start(is_shown=run is runs[0])
    for run in runs:
        run.finish()
    for run in runs if is_ci else ():
        run.repeat_failed()
    missing = [service for service in (*asked, *others) if service.missing]
    wished = [service for service in (ask() for ask in services.OPTIONAL) if service.missing]
    is_covered = not measure or covered(enough={"sqlite", "postgresql"} <= {run.kind for run in runs})
    summary(runs, missing, wished)
    is_whole = not missing or not is_ci
    return 0 if all(run.is_good for run in runs) and is_covered and is_whole else 1


def compile_tests():
    """Make pytest rewrite and compile all test modules once, if they are not compiled yet.

    Each process of the first run would compile all of them: 9 s of CPU time.
    """
    if Path(COMPILED["PYTHONPYCACHEPREFIX"], *ROOT.parts[1:], "tests").exists():
        return
    modules = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: path.stat().st_size)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    halves = [
        subprocess.Popen(
            [*command, *map(str, half)], cwd=ROOT, env={**os.environ, **COMPILED}, stdout=subprocess.DEVNULL
        )
        for half in (modules[::2], modules[1::2])
    ]
    for process in halves:  # its exit code does not matter: a module with an error fails in the run
        process.wait()


def names_tests(more):
    """Return True if pytest's arguments name files or folders."""
    return any((ROOT / word.partition("::")[0]).exists() for word in more)


def _failed(case):
    return case.find("failure") is not None or case.find("error") is not None


def arguments():
    parser = argparse.ArgumentParser(description="Run the tests on every database that can be reached.")
    parser.add_argument("--databases", default=",".join(services.DATABASES), help="which (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="slow tests and all examples too, on each database")
    parser.add_argument("--rest", action="store_true", help="only what --all adds to a run without it")
    parser.add_argument(
        "--coverage", action="store_true", help="measure that of --all; before Python 3.12 it takes long"
    )
    options, more = parser.parse_known_args()
    unknown = set(options.databases.split(",")) - services.DATABASES.keys()
    if unknown:
        parser.error(f"--databases: expected some of {', '.join(services.DATABASES)}, got {', '.join(unknown)}")
    return options, more


def covered(*, enough):
    """Report the coverage of all runs together; it must reach the minimum if `enough` databases ran."""
    coverage("combine", "--quiet")
    return coverage("report", *([] if enough else ["--fail-under=0"])) == 0


def coverage(*arguments):
    return subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT, check=False).returncode


def summary(runs, missing, wished):
    width = shutil.get_terminal_size().columns
    print(f"\n{' what ran ':=^{width}}")
    for run in runs:
        counts = ", ".join(f"{count} {word}" for word, count in run.counts.items())
        trouble = "" if run.is_good else f"  (pytest ended with {run.exit_code})"
        print(f"{services.DATABASES[run.kind]()!s:<24} {counts} in {run.seconds:.0f} s{trouble}")
        for test in run.flaky:
            print(f"  flaky: {test} failed, and passed when it ran alone")
    for service in (*missing, *wished):
        print(f"{service.name:<24} left out: {service.missing}")
    if missing and os.environ.get("CI") == "true":
        print("CI=true: what was left out is a failure")
    totals = {word: sum(run.counts[word] for run in runs) for word in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {word}" for word, count in totals.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
