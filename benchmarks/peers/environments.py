"""Create a virtual environment for each system on first use, separate from our own dependencies."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / ".venv-peers"
EVERYWHERE = ("django>=6.1,<6.2", "psycopg[binary]>=3.2")
VERSIONS = ("3.12", "3.13", "3.14")


class CannotInstall(Exception):
    """A system cannot be installed here; the message gives the reason in one line."""


def interpreter(wanted=""):
    """Return a Python that Django 6.1 and all peers support. Raises CannotInstall."""
    places = [Path(wanted)] if wanted else []
    for version in () if wanted else VERSIONS:
        on_path = shutil.which(f"python{version}")
        places += [Path(on_path)] if on_path else []
        places += sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for place in places:
        question = [place, "-c", "import sys; sys.exit(sys.version_info < (3, 12))"]
        if subprocess.run(question, capture_output=True, check=False).returncode == 0:
            return place
    raise CannotInstall(f"expected a Python of 3.12 or newer, found none among {[str(place) for place in places]}")


def environment(system, python):
    """Return the Python of this system's environment; create or update it if needed. Raises CannotInstall."""
    folder = FOLDER / system.environment
    wanted = [*EVERYWHERE, *system.requirements]
    stamp, content = folder / "installed.json", json.dumps([str(python), wanted, _project(system)])
    own = folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == content:
        return own
    print(f"installing {system.environment} into {folder.relative_to(ROOT)}", flush=True)
    _run([python, "-m", "venv", "--clear", folder], system)
    _run([own, "-m", "pip", "install", "--quiet", *wanted], system)
    stamp.write_text(content)
    return own


def _project(system):
    """Return a hash of our pyproject.toml; for a peer, an empty string.

    Our package is installed in editable mode, so only its dependencies can be out of date.
    """
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest() if system.ours else ""


def _run(command, system):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise CannotInstall(
            f"{system.name} cannot be installed: {lines[0].strip() if lines else 'pip printed nothing'}"
        )
