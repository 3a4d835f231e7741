"""Test how mypy checks a project's tasks: correct calls pass, wrong ones are reported. mypy runs once for all tests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import django_faktory

pytestmark = [pytest.mark.slow, pytest.mark.core]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PROGRAM = HERE / "program.py"
SETTINGS = """
[mypy]
strict = True
plugins = mypy_django_plugin.main
show_error_codes = True
follow_imports = silent
[mypy.plugins.django-stubs]
django_settings_module = tests.settings
strict_settings = False
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the codes of mypy's errors by line."""
    config = tmp_path_factory.mktemp("mypy") / "mypy.ini"
    config.write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(ROOT / ".mypy_cache")]
    done = subprocess.run([*command, str(PROGRAM)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors = {}
    for line, code in re.findall(r"program\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE):
        errors.setdefault(int(line), set()).add(code)
    return errors


def wanted():
    lines = PROGRAM.read_text().splitlines()
    marks = {number: line.partition("# E: ")[2] for number, line in enumerate(lines, 1) if "# E: " in line[1:]}
    return {number: set(codes.split(", ")) for number, codes in marks.items()}


def test_mypy_reports_exactly_the_wrong_calls(found):
    assert wanted()
    assert found == wanted()


def test_the_package_contains_a_py_typed_marker():
    assert (Path(django_faktory.__file__).parent / "py.typed").exists()
