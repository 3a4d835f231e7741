"""Run Django's own tests of the Tasks framework with our backends in place of Django's: `docs/reference/django-tasks.md`.

The tests are part of Django's source package; pip downloads it once into `.demo/`, which is not committed. Needs a
Python with Django 6.0 or newer. Fails unless exactly the exceptions below fail: an exception that passes must be
removed from the list.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import django

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".demo" / "django-suite"
TESTS = {(6, 0): 76, (6, 1): 85}
"""Number of tests in each version: fewer would mean that some were not found."""

DUMMY, IMMEDIATE = "django.tasks.backends.dummy", "django.tasks.backends.immediate"


@dataclass
class Variant:
    name: str
    dummy: str
    immediate: str
    exceptions: dict
    more: dict = field(default_factory=dict)
    """Additional replacements: {old text: new text}."""

    def rewritten(self, text):
        for module, name, ours in (
            (DUMMY, "DummyBackend", self.dummy),
            (IMMEDIATE, "ImmediateBackend", self.immediate),
        ):
            place, _, own_name = ours.rpartition(".")
            text = text.replace(f"{module}.{name}", ours)
            text = text.replace(f"from {module} import {name}", f"from {place} import {own_name} as {name}")
        for old, new in self.more.items():
            text = text.replace(old, new)
        return text


DATETIMES = "asserts that a datetime is refused as an argument; ours takes it (docs/arguments.md)"
RUN_AFTER = "asserts that run_after is refused; ours takes it"
RESULTS = "asserts that results cannot be read; ours can"
MEMORY = "changes the dummy's copy in memory; ours reads the row"

VARIANTS = (
    Variant(
        "the backends for tests",
        dummy="django_faktory.testing.backends.DummyBackend",
        immediate="django_faktory.testing.backends.ImmediateBackend",
        exceptions={
            "test_tasks.TaskTestCase.test_enqueue_with_invalid_argument": DATETIMES,
            "test_tasks.TaskTestCase.test_aenqueue_with_invalid_argument": DATETIMES,
            "test_immediate_backend.ImmediateBackendTestCase.test_cannot_pass_run_after": RUN_AFTER,
        },
    ),
    Variant(
        "FaktoryBackend, with the worker run after each enqueue",
        dummy="django_suite_support.KeptBackend",
        immediate="django_suite_support.DrainedBackend",
        exceptions={
            "test_tasks.TaskTestCase.test_enqueue_with_invalid_argument": DATETIMES,
            "test_tasks.TaskTestCase.test_aenqueue_with_invalid_argument": DATETIMES,
            "test_tasks.TaskTestCase.test_refresh_result": (
                "calls refresh() in a coroutine: Django's ORM refuses that; arefresh() is for it"
            ),
            "test_dummy_backend.DummyBackendTestCase.test_refresh_result": MEMORY,
            "test_dummy_backend.DummyBackendTestCase.test_refresh_result_async": MEMORY,
            "test_immediate_backend.ImmediateBackendTestCase.test_cannot_get_result": RESULTS,
            "test_immediate_backend.ImmediateBackendTestCase.test_cannot_refresh_result": RESULTS,
            "test_immediate_backend.ImmediateBackendTestCase.test_cannot_pass_run_after": RUN_AFTER,
        },
        # Jobs are rows: these tests need a database, and the tables of our app.
        more={"SimpleTestCase": "TransactionTestCase", "available_apps = []": "available_apps = None"},
    ),
)


def main():
    version = django.VERSION[:2]
    if version not in TESTS:
        sys.exit(f"expected Django {' or '.join('{}.{}'.format(*known) for known in TESTS)}, got {django.__version__}")
    source = downloaded(django.__version__)
    good = [run(variant, source, TESTS[version]) for variant in VARIANTS]
    sys.exit(0 if all(good) else 1)


def downloaded(version):
    """Return the folder `tests/tasks` of this Django's source package; download it if it is missing."""
    folder = CACHE / version
    if not (folder / "tasks").is_dir():
        fresh = CACHE / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--no-binary", ":all:", f"Django=={version}", "--dest", str(fresh)], check=True)
        [archive] = fresh.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            root = tar.getnames()[0].partition("/")[0]
            wanted = [member for member in tar if member.name.startswith(f"{root}/tests/tasks/")]
            tar.extractall(fresh, members=wanted, filter="data")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(fresh / root / "tests" / "tasks", folder / "tasks")
        shutil.rmtree(fresh)
    return folder / "tasks"


def run(variant, source, expected):
    print(f"\n== Django {django.__version__}'s tests of Tasks, with {variant.name}", flush=True)
    folder = CACHE / "run"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tasks").mkdir(parents=True)
    for path in source.glob("*.py"):
        (folder / "tasks" / path.name).write_text(variant.rewritten(path.read_text()))
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "django_suite_settings",
        "DJANGO_SUITE_FOLDER": str(folder),
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "scripts"), str(ROOT)]),
    }
    command = [sys.executable, "-m", "django", "test", "tasks", "--noinput"]
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    try:
        result = json.loads((folder / "result.json").read_text())
    except FileNotFoundError:
        sys.exit(f"the tests did not run:\n{done.stdout}{done.stderr}")
    return is_as_expected(variant, result, expected, done.stderr)


def is_as_expected(variant, result, expected, output):
    failed, exceptions = {name.removeprefix("tasks.") for name in result["failed"]}, set(variant.exceptions)
    print(f"{result['ran'] - len(failed) - len(result['skipped'])} of {result['ran']} pass; {expected} expected to run")
    for name in sorted(failed & exceptions):
        print(f"  does not apply: {name}: {variant.exceptions[name]}")
    for name in sorted(failed - exceptions):
        print(f"  FAILED: {name}")
    for name in sorted(exceptions - failed):
        print(f"  PASSES, but is listed as an exception: {name}")
    if result["skipped"]:
        print(f"  SKIPPED: {', '.join(result['skipped'])}")
    good = failed == exceptions and result["ran"] == expected and not result["skipped"]
    if not good:
        print(output)
    return good


if __name__ == "__main__":
    main()
