"""Plant one defect after the other in a copy of the source, and check that the tests detect each.

A suite that passes proves something only if it can fail. For each plant (`scripts/plants.py`), the few tests that
should detect it run until the first failure. Before that, the same tests must pass without plants. Prints a table. The exit code is 1 if a plant survived, if its
text was not found exactly once, or if pytest failed in another way.
`--sample 3`: only three plants, different ones at each commit.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.plants import PLANTS  # noqa: E402  (found by the path above)
from tests import services  # noqa: E402
from tests.own_servers import Guard  # noqa: E402
from tests.programs import obey_signals  # noqa: E402

LEFT_OUT = (".*", "*.egg-info", "__pycache__", "node_modules", "db.sqlite3*")
SOME_FAILED = 1
LONGEST_S = 240


class Found(NamedTuple):
    """The result of one plant, with the test that caught it."""

    name: str
    database: str
    caught_by: str
    trouble: str
    seconds: float


class Field:
    """A copy of the source in which the tests run, with their own database."""

    def __init__(self, folder):
        self._folder = folder
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)

    def planted(self, plant):
        """Apply the plant, run its tests, and revert it."""
        begun = time.monotonic()
        path = self._folder / plant.path
        text = path.read_text(encoding="utf-8")
        times = text.count(plant.old)
        if times != 1:
            trouble = f"its text is {times} times in {plant.path}, expected 1"
            return Found(plant.name, plant.database, "", trouble, 0.0)
        path.write_text(text.replace(plant.old, plant.new), encoding="utf-8")
        try:
            code, output = self.run(plant.database, *plant.tests)
        finally:
            path.write_text(text, encoding="utf-8")
        caught = re.findall(r"^FAILED (\S+)", output, re.MULTILINE) if code == SOME_FAILED else []
        trouble = (
            "" if caught else "it survived: write the test" if not code else f"no test failed, but:\n{output[-5000:]}"
        )
        return Found(plant.name, plant.database, "".join(caught[:1]), trouble, time.monotonic() - begun)

    def run(self, database, *tests):
        """Return pytest's exit code and its output."""
        command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-rf", "--no-header", "-p", "no:cacheprovider"]
        own = {"PYTHONPATH": str(self._folder), "FAKTORY_TEST_DB": database, "COLUMNS": "400"}
        own |= {"FAKTORY_TEST_TAG": f"planted{os.getpid()}", "FAKTORY_MODEL_STEPS": "500", "FAKTORY_TEST_WAIT": "20"}
        try:
            done = subprocess.run(
                [*command, *tests],
                cwd=self._folder,
                env=os.environ | own,
                capture_output=True,
                text=True,
                check=False,
                timeout=LONGEST_S,
            )
        except subprocess.TimeoutExpired:
            return -1, f"the tests did not end within {LONGEST_S} s"
        return done.returncode, done.stdout + done.stderr[-1000:]

    def is_sound(self, plants):
        """Return True if the tests pass without a plant: otherwise a later failure proves nothing."""
        for database in sorted({plant.database for plant in plants}):
            for tests in sorted({plant.tests for plant in plants if plant.database == database}):
                code, output = self.run(database, *tests)
                if code:
                    ended = f"pytest {' '.join(tests)} ended with {code}"
                    print(f"without any plant, on {database}: {ended}\n{output[-5000:]}")
                    return False
        return True


def main():
    obey_signals()
    options = arguments()
    plants = chosen(options)
    if options.list:
        print("\n".join(f"{plant.database:<11} {plant.name}" for plant in plants))
        return 0
    with Guard({plant.database for plant in plants} | {"redis"}):
        return plant_all(plants, options)


def plant_all(plants, options):
    """Run the tests of each plant; return the exit code."""
    missing = {kind: services.DATABASES[kind]().missing for kind in {plant.database for plant in plants}}
    grown = [plant for plant in plants if not missing[plant.database]]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        field = Field(Path(folder))
        if not options.unchecked and not field.is_sound(grown):
            return 1
        found = []
        for plant in grown:
            found.append(field.planted(plant))
            print_result(found[-1])
    return summary(found, {kind: why for kind, why in missing.items() if why})


def arguments():
    parser = argparse.ArgumentParser(description="Plant defects, and check that the tests detect them.")
    parser.add_argument("--sample", type=int, metavar="N", help="number of plants to run; each commit selects others")
    parser.add_argument("--only", metavar="WORDS", default="", help="run plants with these words in their name")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without plants first")
    parser.add_argument("--list", action="store_true", help="print their names")
    return parser.parse_args()


def chosen(options):
    plants = [plant for plant in PLANTS if options.only in plant.name]
    if not options.sample:
        return plants
    first = commits() * options.sample % len(plants)
    return (plants * 2)[first : first + min(options.sample, len(plants))]


def commits():
    """Return the number of commits, which selects the sample."""
    counted = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return int(counted.stdout) if counted.returncode == 0 else 0


def print_result(found):
    result = f"caught by {found.caught_by}" if found.caught_by else found.trouble
    print(f"{found.seconds:5.1f} s  {found.database:<11} {found.name}\n{'':21}{result}", flush=True)


def summary(found, missing):
    survived = [one for one in found if not one.caught_by]
    print(f"\n{len(found)} planted, {len(found) - len(survived)} caught")
    for one in survived:
        print(f"NOT CAUGHT  {one.name}: {one.trouble.splitlines()[0]}")
    for kind, why in missing.items():
        print(f"left out on {kind}: {why}")
    return 1 if survived or (missing and os.environ.get("CI") == "true") else 0


if __name__ == "__main__":
    sys.exit(main())
