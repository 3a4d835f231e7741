"""Build the site of the documentation, for tests of its search and of its pages in a browser."""

import subprocess
import sys

from tests.docs.pages import DOCS


def build(folder):
    """Build the site without the design decisions."""
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--fresh-env", DOCS, folder]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
