"""The setup script: which virtual environments `make` must not touch."""

import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.core


def test_bootstrap_does_not_empty_a_linked_virtual_environment(tmp_path):
    """`venv --clear` follows the link and would empty the other environment."""
    here, theirs = tmp_path / "here", tmp_path / "theirs"
    (here / "scripts").mkdir(parents=True)
    theirs.mkdir()
    (theirs / "precious").touch()
    (here / "scripts" / "bootstrap.py").write_bytes((ROOT / "scripts" / "bootstrap.py").read_bytes())
    (here / "pyproject.toml").touch()
    (here / ".venv").symlink_to(theirs)
    done = subprocess.run(
        [sys.executable, str(here / "scripts" / "bootstrap.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (theirs / "precious").exists()
    assert done.returncode == 1
    assert done.stderr == f".venv is a link to {theirs}, made for another checkout: remove the link\n"
