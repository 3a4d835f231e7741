"""Test the admin in django-unfold and django-jazzmin: every page opens, and every button can be seen and pressed."""

import os
import subprocess
import sys

import pytest

from tests.settings import TAG

pytestmark = [pytest.mark.slow, pytest.mark.once]


@pytest.mark.parametrize("theme", ["unfold", "jazzmin"])
def test_the_browser_tests_pass_in_another_theme(chromium_path, theme):
    """Run in a separate process, because Django selects templates when it starts."""
    pytest.importorskip(theme)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
    environment |= {"FAKTORY_TEST_ADMIN": theme, "FAKTORY_TEST_DB": "sqlite", "FAKTORY_TEST_TAG": f"{TAG}_{theme}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/browser/in_theme.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout, done.stdout[-2000:]
