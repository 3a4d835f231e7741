"""In django-unfold every page opens, none sticks out or complains, and acts do what they say."""

import os
import subprocess
import sys

import pytest

from tests.settings import TAG


@pytest.mark.timeout(600)
def test_the_admin_is_whole_in_django_unfold(chromium_path):
    """In a process of its own: which templates there are is settled when Django starts."""
    pytest.importorskip("unfold")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
    environment |= {"FAKTORY_TEST_ADMIN": "unfold", "FAKTORY_TEST_DB": "sqlite", "FAKTORY_TEST_TAG": f"{TAG}_unfold"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/browser/in_unfold.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout, done.stdout[-2000:]
