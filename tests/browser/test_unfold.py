"""Test the admin in django-unfold: every page opens without overflow or console errors, and actions work."""

import os
import subprocess
import sys

import pytest

from tests.settings import TAG


def test_the_browser_tests_pass_in_django_unfold(chromium_path):
    """Run in a separate process, because Django selects templates when it starts."""
    pytest.importorskip("unfold")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
    environment |= {"FAKTORY_TEST_ADMIN": "unfold", "FAKTORY_TEST_DB": "sqlite", "FAKTORY_TEST_TAG": f"{TAG}_unfold"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/browser/in_unfold.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout, done.stdout[-2000:]
