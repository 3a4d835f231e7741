"""Run the tests on every database that can be reached, and say what was left out.

`core` tests need no database and run once; so do folders that ask nothing special of theirs (tests/conftest.py).
With CI=true whatever cannot be reached is a failure; and of failures, if there are few, each gets a second run without
company: passed then, it is named at the end as unsteady, and is a bug of the test or, worse, of the code. Arguments that are not its own go to pytest: `scripts/test.py tests/store -x`.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import services  # noqa: E402  (found by the path above)

PROCESSES = 4
"""Tests mostly wait, for a disk or for another process: more of them than two cores."""

COMPILED = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(ROOT / ".demo" / "compiled")}
"""Where Python is told to keep no bytecode, each of some two thousand processes would compile all of the project anew."""

FEW = 5
"""Most failures that may be the machine's: more of them have a cause in common."""

SOME_FAILED = 1
NOTHING_CHOSEN = 5
"""pytest's exit code where no test was selected: right for a run of some files that hold core tests only."""


class Run:
    """The tests on one database: pytest's own process, and what it said."""

    def __init__(self, kind, *, is_first, measure, more):
        self.kind = kind
        self.report = ROOT / ".demo" / f"tests-{kind}.xml"
        self.command = [sys.executable, "-m", *(["coverage", "run", "-m"] if measure else []), "pytest", "-q"]
        self.command += [f"--junit-xml={self.report}", "-o", "junit_logging=no"]
        self.command += ["-o", f"cache_dir={ROOT / '.demo' / f'cache-{kind}'}"]
        self.command += ([] if is_first else ["-m", "not core and not once"]) + more
        self.counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        self.unsteady = []
        """Tests that failed in company and passed alone."""

    def __call__(self, *, again):
        """Run the tests; with `again` a few that failed have a second try."""
        begun = time.monotonic()
        suites = self._pytest("-n", str(PROCESSES), "--dist", "worksteal")
        self._count(suites)
        failed = [f"{case.get('classname')}.{case.get('name')}" for case in suites.iter("testcase") if _failed(case)]
        if again and self.exit_code == SOME_FAILED and len(failed) <= FEW:
            print(f"\n{len(failed)} failed on {self.kind}: once more, without company", flush=True)
            self.report = self.report.with_stem(f"{self.report.stem}-again")
            self._pytest("--last-failed", "--last-failed-no-failures", "none")
            self.unsteady = failed if self.is_good else []
        self.seconds = time.monotonic() - begun

    def _pytest(self, *options):
        self.report.unlink(missing_ok=True)
        own = {"FAKTORY_TEST_DB": self.kind} | ({"COVERAGE_CORE": "sysmon"} if sys.version_info >= (3, 12) else {})
        environment = {"FAKTORY_TEST_TAG": tag(), **os.environ, **COMPILED, **own}
        self.exit_code = subprocess.run([*self.command, *options], cwd=ROOT, env=environment, check=False).returncode
        return ET.parse(self.report).getroot() if self.report.exists() else ET.Element("testsuites")

    def _count(self, suites):
        for suite in suites.iter("testsuite"):
            failed = int(suite.get("failures")) + int(suite.get("errors"))
            skipped = int(suite.get("skipped"))
            self.counts["failed"] += failed
            self.counts["skipped"] += skipped
            self.counts["passed"] += int(suite.get("tests")) - failed - skipped

    @property
    def is_good(self):
        return self.exit_code in (0, NOTHING_CHOSEN)


def main():
    # A shell's background job ignores INT and QUIT, and nohup HUP: every process that the tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    options, more = arguments()
    wanted = options.databases.split(",")
    asked = [services.DATABASES[kind]() for kind in wanted]
    others = [ask() for ask in services.OTHERS]
    reachable = [kind for kind, service in zip(wanted, asked, strict=True) if not service.missing]
    is_ci = os.environ.get("CI") == "true"
    measure = options.coverage and not more
    if measure:
        coverage("erase")
    runs = [Run(kind, is_first=n == 0, measure=measure, more=more) for n, kind in enumerate(reachable)]
    (ROOT / ".demo").mkdir(exist_ok=True)
    for run in runs:
        print(f"\n== {run.kind}", flush=True)
        run(again=is_ci)
    missing = [service for service in (*asked, *others) if service.missing]
    wished = [service for service in (ask() for ask in services.OPTIONAL) if service.missing]
    is_covered = not measure or covered(enough={"sqlite", "postgresql"} <= {run.kind for run in runs})
    summary(runs, missing, wished)
    is_whole = not missing or not is_ci
    sys.exit(0 if all(run.is_good for run in runs) and is_covered and is_whole else 1)


def _failed(case):
    return case.find("failure") is not None or case.find("error") is not None


def arguments():
    parser = argparse.ArgumentParser(description="Run the tests on every database that can be reached.")
    parser.add_argument("--databases", default=",".join(services.DATABASES), help="which (default: %(default)s)")
    parser.add_argument("--coverage", action="store_true", help="measure it; before Python 3.12 that takes long")
    options, more = parser.parse_known_args()
    unknown = set(options.databases.split(",")) - services.DATABASES.keys()
    if unknown:
        parser.error(f"--databases: expected some of {', '.join(services.DATABASES)}, got {', '.join(unknown)}")
    return options, more


def tag():
    """Two checkouts on one machine have databases of their own, the same ones at each run."""
    return f"make{zlib.crc32(str(ROOT).encode()):08x}"


def covered(*, enough):
    """Report the coverage of all runs together; it must be high where there was `enough` to run."""
    coverage("combine", "--quiet")
    return coverage("report", *([] if enough else ["--fail-under=0"])) == 0


def coverage(*arguments):
    return subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT, check=False).returncode


def summary(runs, missing, wished):
    width = shutil.get_terminal_size().columns
    print(f"\n{' what ran ':=^{width}}")
    for run in runs:
        told = ", ".join(f"{count} {word}" for word, count in run.counts.items())
        trouble = "" if run.is_good else f"  (pytest ended with {run.exit_code})"
        print(f"{services.DATABASES[run.kind]()!s:<24} {told} in {run.seconds:.0f} s{trouble}")
        for test in run.unsteady:
            print(f"  unsteady: {test} failed, and passed when it ran alone")
    for service in (*missing, *wished):
        print(f"{service.name:<24} left out: {service.missing}")
    if missing and os.environ.get("CI") == "true":
        print("CI=true: what was left out is a failure")
    totals = {word: sum(run.counts[word] for run in runs) for word in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {word}" for word, count in totals.items()), flush=True)


if __name__ == "__main__":
    main()
